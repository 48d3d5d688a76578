"""The event loop's turns are shared by all requests: one of them does one piece of work in each."""

import asyncio
from itertools import pairwise

from headrace.serving.service import Service
from headrace.serving.settings import ServerSettings


def test_however_many_requests_have_texts_one_is_tokenized_in_a_turn() -> None:
    tokenized: list[str] = []

    def tokenize(text: str, add_special_tokens: bool) -> list[int]:
        tokenized.append(text)
        return []

    async def main() -> list[int]:
        service = Service(ServerSettings(served_model_names=("m",)))
        requests = [
            asyncio.ensure_future(service._tokenized(tokenize, str(number), True))
            for number in range(10)
        ]
        after_turns = []
        while not all(request.done() for request in requests):
            await asyncio.sleep(0)
            after_turns.append(len(tokenized))
        return after_turns

    after_turns = asyncio.run(main())
    assert tokenized == [str(number) for number in range(10)]
    assert all(now - before <= 1 for before, now in pairwise(after_turns))
