"""Who finds what in the prefix cache: whoever begins alike and has the same salt, nobody else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.test_scheduler import BLOCK_SIZE, run, scheduler, sequence

PROMPT = st.lists(st.sampled_from([7, 8]), min_size=1, max_size=3 * BLOCK_SIZE)
SALT = st.sampled_from([b"", b"a", b"ab"])


def shared(mine: list[int], others: list[list[int]]) -> int:
    """Positions of full blocks that one of the others begins with; the last token is computed."""
    most = (len(mine) - 1) // BLOCK_SIZE
    return max(
        (
            blocks * BLOCK_SIZE
            for blocks in range(most + 1)
            for other in others
            if other[: blocks * BLOCK_SIZE] == mine[: blocks * BLOCK_SIZE]
            and len(other) >= blocks * BLOCK_SIZE
        ),
        default=0,
    )


@given(st.lists(st.tuples(PROMPT, SALT), max_size=8))
@settings(max_examples=150, deadline=None)
def test_only_requests_with_the_same_salt_find_what_others_left(
    requests: list[tuple[list[int], bytes]],
) -> None:
    engine = scheduler(num_blocks=200)
    left: dict[bytes, list[list[int]]] = {}
    for number, (prompt, salt) in enumerate(requests):
        own = sequence(number, prompt, 1, salt=salt)
        engine.add(own)
        run(engine, 20)
        assert own.cached_tokens == shared(prompt, left.get(salt, []))
        left.setdefault(salt, []).append(prompt)
