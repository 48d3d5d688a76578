"""Blocking against deferred token feedback, as published for gpt-oss-20b, at a size that runs here.

vLLM's pull request 51650 made the broadcast of sampled tokens asynchronous: 338 -> 448 output
tokens a second, a ratio of 1.325, with gpt-oss-20b, the sonnet data set, pp=2 and tp=2. This writes
a checkpoint of that architecture, smaller and with random weights, starts `headrace serve` on it
once with each kind of feedback, and drives both in turn with `headrace bench serve`.

The figures are those of a random model on this machine, not of gpt-oss-20b.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
HEADRACE = Path(sys.executable).with_name("headrace")
PUBLISHED = 448 / 338
FEEDBACKS = ("blocking", "deferred")
# Published: 90 prompts, 18 at once, prompts four times as long as answers.
PROMPTS, AT_ONCE, INPUT_LEN, OUTPUT_LEN = 90, 18, 192, 48
# Milliseconds one way; (stages, shards of each).
LATENCIES = (0.0, 2.0, 20.0)
LAYOUTS = ((2, 2), (2, 1))


def write_checkpoint(path: Path) -> None:
    """A GPT-OSS: experts, sinks, windows, YaRN and biases as published, a fifth as wide, with a
    third of the layers and random weights; a token is a byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

    config = GptOssConfig(
        vocab_size=1024, hidden_size=576, intermediate_size=288, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=2, head_dim=64, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128, tie_word_embeddings=False, pad_token_id=None,
        max_position_embeddings=131072, dtype="bfloat16",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({token: n for n, token in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(["<|return|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|return|>").save_pretrained(path)


@contextmanager
def server(model: Path, layout: tuple[int, int], latency_ms: float, feedback: str) -> Iterator[int]:
    """`headrace serve` at the port that this gives."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stages, shards = layout
    command = [
        HEADRACE, "serve", "--model", model, "-pp", stages, "-tp", shards, "--port", port,
        "--token-feedback", feedback, "--link-latency-ms", latency_ms,
        "--no-enable-prefix-caching", "--max-num-seqs", AT_ONCE, "--dtype", "bfloat16",
        # The whole text must fit: its lines are counted in tokens.
        "--max-model-len", 32768, "--kv-cache-memory", "256MiB",
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
        try:
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            if process.wait(60) not in (0, 130):
                log.seek(0)
                print(log.read().decode(errors="replace")[-2000:], file=sys.stderr)


def tokens_per_s(port: int, prompts: int, seed: int) -> float:
    """Of a load on a server, once it is ready."""
    command = [
        HEADRACE, "bench", "serve", "--port", port, "--dataset-name", "sonnet",
        "--dataset-path", HERE / "sonnet.txt", "--sonnet-input-len", INPUT_LEN,
        "--sonnet-output-len", OUTPUT_LEN, "--sonnet-prefix-len", INPUT_LEN // 2,
        "--num-prompts", prompts, "--max-concurrency", AT_ONCE, "--ignore-eos",
        "--temperature", 0, "--seed", seed, "--ready-check-timeout-sec", 120, "--json",
    ]  # fmt: skip
    answer = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True)
    return float(json.loads(answer.stdout)["output_throughput"])


def measure(
    model: Path, layout: tuple[int, int], latency_ms: float, rounds: int
) -> dict[str, list[float]]:
    """Output tokens a second of each round, by feedback, in turn."""
    found: dict[str, list[float]] = {feedback: [] for feedback in FEEDBACKS}
    with ExitStack() as stack:
        ports = {
            feedback: stack.enter_context(server(model, layout, latency_ms, feedback))
            for feedback in FEEDBACKS
        }
        for port in ports.values():
            tokens_per_s(port, AT_ONCE, 0)
        for number in range(rounds):
            for feedback in FEEDBACKS if number % 2 == 0 else reversed(FEEDBACKS):
                found[feedback].append(tokens_per_s(ports[feedback], PROMPTS, number))
    return found


def report(layout: tuple[int, int], latency_ms: float, found: dict[str, list[float]]) -> str:
    ratios = [b / a for a, b in zip(*(found[feedback] for feedback in FEEDBACKS), strict=True)]
    figures = " | ".join(
        f"{median(found[f]):.1f} ({min(found[f]):.1f} to {max(found[f]):.1f})" for f in FEEDBACKS
    )
    stages, shards = layout
    return (
        f"| {stages} | {shards} | {latency_ms:g} ms | {figures} | "
        f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each, in turn (3)")
    parser.add_argument("--model", type=Path, help="where the checkpoint is, or is written")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model: Path = given.model or Path(folder) / "random-gpt-oss"
        if not (model / "config.json").exists():
            write_checkpoint(model)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        print(
            f"A random model of GPT-OSS's architecture, {size / 2e6:.0f} million weights, on "
            f"{len(os.sched_getaffinity(0))} cores; {PROMPTS} sonnet prompts of {INPUT_LEN} tokens "
            f"and {OUTPUT_LEN} of answer, {AT_ONCE} at once; {given.rounds} rounds in turn.\n"
            f"Published for gpt-oss-20b, pp=2 tp=2: {PUBLISHED:.3f}\n"
        )
        print("| stages | shards | link | blocking, tokens/s | deferred, tokens/s | ratio |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for layout in LAYOUTS:
            for latency_ms in LATENCIES:
                found: Any = measure(model, layout, latency_ms, given.rounds)
                print(report(layout, latency_ms, found), flush=True)


if __name__ == "__main__":
    main()
