"""Bodies are weighed before they are decoded, in pieces, whatever is in them."""

import asyncio
import contextlib
import gc
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from headrace.serving.api_errors import ApiError
from headrace.serving.body import MOST_BODIES, Bodies
from headrace.serving.body_work import SMALL, _pieces, _Scan, check_work
from headrace.serving.requests import DetokenizeBody
from headrace.serving.settings import ServerSettings

TEXTS = st.text(st.sampled_from('a"\\,:[]{}é\n0'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.lists(st.integers(0, 300)))
def test_what_is_counted_does_not_depend_on_the_pieces(value: Any, cuts: list[int]) -> None:
    data = json.dumps(value).encode()
    whole = _Scan()
    whole.take(data)
    assert (whole.depth, whole.text) == (0, None)
    pieces = _Scan()
    begin = 0
    for cut in sorted(cut for cut in cuts if cut < len(data)):
        # Pieces do not end within an escape.
        if cut > begin and data[cut - 1 : cut] != b"\\":
            pieces.take(data[begin:cut])
            begin = cut
    pieces.take(data[begin:])
    assert (pieces.depth, pieces.text) == (0, None)
    assert pieces.work == whole.work


@pytest.mark.parametrize("begin", ["", "x"])
def test_pieces_have_a_bound_also_where_escapes_have_no_end(begin: str) -> None:
    data = bytearray(json.dumps(begin + "\\" * 300_000 + "\n").encode())
    pieces = list(_pieces(data))
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= 64 * 1024
    whole, apart = _Scan(), _Scan()
    whole.take(bytes(data))
    for piece in pieces:
        apart.take(piece)
    assert (whole.text, whole.work) == (apart.text, apart.work)


def refusal(body: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asyncio.run(check_work(bytearray(body.encode())))
    assert caught.value.status == 400
    assert len(caught.value.message) < 300
    return caught.value


N = 2_000_000
TOO_MUCH = {
    "numbers": (f'{{"model": "m", "prompt": [{"1," * N}1]}}', "prompt"),
    "lists": (f'{{"n": 1, "prompt": [{"[1]," * N}1]}}', "prompt"),
    "texts": ('{"n": 1, "prompt": [' + '"a",' * N + "1]}", "prompt"),
    "messages": ('{"messages": [' + '{"role": "user", "content": "a"},' * N + "1]}", "messages"),
    "names": ('{"prompt": "a", "metadata": {' + '"a": 1,' * N + "1]}", "metadata"),
    "spaces": ('{"prompt": "a", "n": ' + " " * 2 * N + "1}", "n"),
    "long number": ('{"prompt": "a", "n": ' + "7" * 100_000 + "}", "n"),
    "open brackets": ('{"prompt": ' + "[" * N, "prompt"),
    "no names": ("[" * N, None),
    "a long name": ('{"' + "x" * 1000 + '": ' + "[" * N, "x" * 100),
}


@pytest.mark.parametrize(("body", "field"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_body_with_too_much_in_it_is_refused_by_name(body: str, field: str | None) -> None:
    assert refusal(body).param == field


@pytest.mark.parametrize(
    "value",
    [
        "a" * 15_000_000,
        '", [{\\' * 1_000_000,
        [[50256] * 8192] * 50,
        ["a b c " * 100] * 20_000,
        [{"role": "user", "content": "a"}] * 15_000,
    ],
    ids=["long text", "text like JSON", "prompts of ids", "prompts", "messages"],
)
def test_what_requests_have_is_not_too_much(value: Any) -> None:
    asyncio.run(check_work(bytearray(json.dumps({"prompt": value}).encode())))


def test_others_have_their_turn_while_a_body_is_weighed() -> None:
    async def turns() -> int:
        count = 0
        weighing = asyncio.ensure_future(check_work(bytearray(b'"' + b"a" * 1_000_000 + b'"')))
        while not weighing.done():
            count += 1
            await asyncio.sleep(0)
        return count

    # Once a piece.
    assert asyncio.run(turns()) >= 1_000_000 // (64 * 1024)


async def read(bodies: Bodies, request: Request, kind: type[DetokenizeBody]) -> DetokenizeBody:
    """A body, of which nothing is made."""
    async with bodies.of(request, kind) as body:
        return body


def test_bodies_that_arrive_together_have_a_bound_and_leave_their_room() -> None:
    limit = 100_000
    bodies = Bodies(ServerSettings(served_model_names=("m",), max_body_size=limit))
    go = asyncio.Event()

    def request(body: bytes) -> Request:
        """All but the last byte at once, that one when all may go."""
        pieces = [body[:-1], body[-1:]]

        async def receive() -> dict[str, Any]:
            if len(pieces) == 1:
                await go.wait()
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

        headers = [(b"content-type", b"application/json")]
        return Request({"type": "http", "method": "POST", "headers": headers}, receive)

    async def main() -> None:
        largest = b'{"tokens": [1]' + b" " * (limit - 15) + b"}"
        assert len(largest) == limit
        taken = [
            asyncio.ensure_future(read(bodies, request(largest), DetokenizeBody))
            for _ in range(MOST_BODIES)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await read(bodies, request(largest), DetokenizeBody)
        assert (caught.value.status, caught.value.code) == (503, "bodies_full")
        assert "retry-after" in caught.value.headers()
        # Whoever leaves makes room, however that comes.
        taken.pop().cancel()
        await asyncio.sleep(0)
        taken.append(asyncio.ensure_future(read(bodies, request(largest), DetokenizeBody)))
        go.set()
        assert [body.tokens for body in await asyncio.gather(*taken)] == [[1]] * MOST_BODIES
        assert (await read(bodies, request(largest), DetokenizeBody)).tokens == [1]
        # What is being worked on has its bytes still, but does not shut out those who ask for less.
        async with contextlib.AsyncExitStack() as working:
            for _ in range(MOST_BODIES):
                await working.enter_async_context(bodies.of(request(largest), DetokenizeBody))
            with pytest.raises(ApiError) as caught:
                await read(bodies, request(largest), DetokenizeBody)
            assert caught.value.code == "bodies_full"
            small = await read(bodies, request(b'{"tokens": [2]}'), DetokenizeBody)
            assert small.tokens == [2]
        assert (await read(bodies, request(largest), DetokenizeBody)).tokens == [1]

    asyncio.run(main())


def request_of(*pieces: bytes) -> Request:
    """A request whose body comes in these pieces."""
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def test_large_bodies_are_weighed_one_after_the_other_and_small_ones_pass_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a turn of the event loop would have a piece of each in it."""
    within = most = 0

    async def weigh(data: bytearray) -> None:
        nonlocal within, most
        within += 1
        most = max(most, within)
        for _ in range(10):
            await asyncio.sleep(0)
        within -= 1

    monkeypatch.setattr("headrace.serving.body.check_work", weigh)
    bodies = Bodies(ServerSettings(served_model_names=("m",)))
    large = b'{"tokens": [1]' + b" " * SMALL + b"}"

    async def main() -> None:
        reading = [
            asyncio.ensure_future(read(bodies, request_of(large), DetokenizeBody)) for _ in range(5)
        ]
        await asyncio.sleep(0)
        await read(bodies, request_of(b'{"tokens": [1]}'), DetokenizeBody)
        assert not any(one.done() for one in reading)
        await asyncio.gather(*reading)

    asyncio.run(main())
    assert most == 1


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b" " * 3_000_000, b" " * 3_000_000], 413),
        ([b'{"tokens": [' + b"0.5," * 300_000 + b"1]}"], 400),
        ([b'{"tokens": [' + b"1," * 1_900_000 + b"1]}"], 400),
    ],
    ids=["too large", "wrong", "too much in it"],
)
def test_a_refused_body_is_forgotten_at_once(pieces: list[bytes], status: int) -> None:
    """Not only when the collector finds that what was raised refers to itself."""
    bodies = Bodies(ServerSettings(served_model_names=("m",), max_body_size=5_000_000))

    async def main() -> None:
        found = 0
        try:
            await read(bodies, request_of(*pieces), DetokenizeBody)
        except ApiError as error:
            found = error.status
        assert found == status

    asyncio.run(main())
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        asyncio.run(main())
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert left < 500_000
