"""Fifty requests streamed at once, some left midway: does anybody notice?

Streams 50 requests through AsyncLLM: once untouched, then three times with a third of them aborted
at random moments (their tasks cancelled, or their loops left). What remains must be the same, token
for token, and what the aborted ones had must be the beginning of their answers.

usage: python examples/streaming_aborts.py [MODEL] [STAGES]    (about a minute)
"""

import asyncio
import random
import sys
import time

from headrace import AsyncLLM, SamplingParams

REQUESTS = 50
SUBJECTS = ["rivers", "mills", "bread", "the moon", "trains", "glass", "bees"]


def requests() -> list[tuple[str, SamplingParams]]:
    rng = random.Random(0)
    found = []
    for number in range(REQUESTS):
        prompt = f"{rng.randint(2, 9)} facts about {rng.choice(SUBJECTS)}:\n1."
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.2]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            seed=number,
            max_tokens=rng.randint(5, 40),
        )
        found.append((prompt, params))
    return found


async def stream(
    engine: AsyncLLM,
    prompt: str,
    params: SamplingParams,
    leave_after: int | None,
    tokens: list[int],
) -> None:
    """Keep `tokens` up to date; leave the loop once there are `leave_after` of them."""
    async for output in engine.generate(prompt, params):
        tokens[:] = output.outputs[0].token_ids
        if leave_after is not None and len(tokens) >= leave_after:
            return


async def round_of(
    engine: AsyncLLM, abort: random.Random | None
) -> dict[int, tuple[list[int], bool]]:
    """Each request's tokens, and whether it ran to its end."""
    tokens: dict[int, list[int]] = {number: [] for number in range(REQUESTS)}
    tasks: dict[int, asyncio.Task[None]] = {}
    aborted = set()
    for number, (prompt, params) in enumerate(requests()):
        leave_after = None
        if abort is not None and abort.random() < 1 / 6:
            leave_after = abort.randint(1, 5)
            aborted.add(number)
        tasks[number] = asyncio.create_task(
            stream(engine, prompt, params, leave_after, tokens[number])
        )
    while abort is not None and len(aborted) < REQUESTS // 3:
        await asyncio.sleep(abort.uniform(0.0, 0.2))
        running = [number for number in tasks if not tasks[number].done() and number not in aborted]
        if not running:
            break
        victim = abort.choice(running)
        tasks[victim].cancel()
        aborted.add(victim)
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {number: (tokens[number], number not in aborted) for number in tasks}


async def main() -> int:
    if "--help" in sys.argv:
        print(__doc__)
        return 0
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    stages = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    engine = AsyncLLM(
        model, pipeline_parallel_size=stages, max_model_len=512, max_num_seqs=32, dtype="float32"
    )
    async with engine:
        started = time.monotonic()
        whole = await round_of(engine, None)
        print(f"untouched: {REQUESTS} requests in {time.monotonic() - started:.1f} s")
        wrong = 0
        for seed in range(3):
            started = time.monotonic()
            some = await round_of(engine, random.Random(seed))
            finished = [number for number, (_, done) in some.items() if done]
            wrong += sum(some[number][0] != whole[number][0] for number in finished)
            for number in some.keys() - set(finished):
                begun = some[number][0]
                wrong += begun != whole[number][0][: len(begun)]
            print(
                f"aborts, seed {seed}: {len(finished)} finished, {REQUESTS - len(finished)} "
                f"aborted, in {time.monotonic() - started:.1f} s; {wrong} differ"
            )
    print("what remained is unchanged" if not wrong else "SOMETHING CHANGED")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
