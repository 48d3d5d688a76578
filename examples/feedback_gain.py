"""What deferred token feedback gains: the same requests with and without it, interleaved.

usage: python examples/feedback_gain.py [MODEL] [STAGES] [REQUESTS]
"""

import statistics
import sys
import time

from headrace import LLM, SamplingParams

PROMPT = "Water flows down the headrace to the wheel, and the wheel turns the stone."
ROUNDS = 3


def tokens_per_s(llm: LLM, requests: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    started = time.monotonic()
    outputs = llm.generate([PROMPT] * requests, params)
    return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.monotonic() - started)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    stages = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    requests = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    settings = [(mode, m) for mode in ("deferred", "blocking") for m in (stages, 1)]
    seen: dict[tuple[str, int], list[float]] = {setting: [] for setting in settings}
    for _ in range(ROUNDS):
        # One engine at a time: two would share the cores.
        for mode, microbatches in settings:
            with LLM(
                model,
                pipeline_parallel_size=stages,
                max_model_len=512,
                token_feedback=mode,
                num_microbatches=microbatches,
            ) as llm:
                tokens_per_s(llm, 4)
                seen[mode, microbatches].append(tokens_per_s(llm, requests))
    for (mode, microbatches), rates in seen.items():
        print(
            f"{mode:9} {microbatches} microbatch(es): {statistics.median(rates):7.1f} tokens/s "
            f"(from {min(rates):.1f} to {max(rates):.1f})"
        )


if __name__ == "__main__":
    main()
