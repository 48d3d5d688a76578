"""`headrace generate`: complete one prompt, streamed or as JSON."""

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from headrace.checkpoint.generation_config import in_words
from headrace.checkpoint.locate import SYNTHETIC
from headrace.cli import options
from headrace.cli.flags import all_flags, with_flags
from headrace.config import EngineConfig
from headrace.engine.request import FinishReason
from headrace.errors import UsageError
from headrace.llm import LLM
from headrace.progress import loading_display
from headrace.prompts import tokenized_chat
from headrace.sampling_params import SamplingParams
from headrace.trace import write_trace


@with_flags
def generate(
    model_tag: options.ModelArgument = None,
    model: options.ModelOption = None,
    prompt: Annotated[str | None, typer.Option(help="The text to complete.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a file; default: standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message to a chat model.")
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Output tokens at most; default: the model's, or 128."),
    ] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="So many likeliest tokens, 0: all; default: the model's."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Tokens so likely, relative to the likeliest; default: the model's."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1: less of what is in prompt and output; default: the model's."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")
    ] = False,
    as_json: options.AsJson = False,
    *,
    engine: Annotated[
        dict[str, Any],
        all_flags(EngineConfig, without=("model", "scheduling_policy", "max_logprobs")),
    ],
    trace: Annotated[
        Path | None,
        typer.Option(help="Write what each stage did, and when, as a trace that Perfetto opens."),
    ] = None,
    debug: options.Debug = False,
) -> int:
    """Complete a prompt and print the answer as it comes."""
    model = options.one_model("generate", model_tag, model)
    choice = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "max_tokens": max_tokens,
    }
    given: dict[str, Any] = {name: value for name, value in choice.items() if value is not None}
    given |= {"stop": stop or [], "ignore_eos": ignore_eos}
    # A wrong value is told before anything is loaded.
    SamplingParams(**given)
    config = EngineConfig(model=model, **engine)
    text = _read_prompt(prompt, prompt_file)
    if not text:
        raise UsageError("the prompt is empty")
    if trace is not None:
        options.check_writable("--trace", trace)
    display = nullcontext(lambda _: None) if as_json else loading_display(config.ranks)
    with display as on_progress:
        llm = LLM(config, on_progress=on_progress)
    with llm:
        tokenizer, card = llm.tokenizer, llm.card
        ids = (
            tokenized_chat(
                [{"role": "user", "content": text}], tokenizer, card.max_model_len
            ).token_ids
            if chat
            else tokenizer.encode(text)
        )
        defaults: dict[str, Any] = {"max_tokens": 128, **card.sampling_defaults}
        answer = _generated(llm, ids, SamplingParams(**defaults | given), echo=not as_json)
        llm.settle()
        if trace is not None:
            write_trace(trace, llm.timelines(), "; ".join([model, *_labels(llm)]), llm.card.ranks)
        if as_json:
            print(json.dumps(_as_json(llm, ids, answer)))
        else:
            _print_summary(llm, ids, answer)
    return 0


@dataclass
class _Generated:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.total_s if self.total_s else 0.0


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other")
    if prompt is not None:
        return prompt
    source: Path | Literal["standard input"] = prompt_file or "standard input"
    try:
        if isinstance(source, Path):
            return source.read_text(encoding="utf-8").removesuffix("\n")
        if sys.stdin.isatty():
            print("type the prompt, then Ctrl-D:", file=sys.stderr)
        # The newline that ends the last line, as every text file has it, is not part of the text.
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except OSError as error:
        raise UsageError(f"the prompt cannot be read from {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt in {source} is not UTF-8 text: {error.reason}") from error


def _generated(llm: LLM, prompt: list[int], params: SamplingParams, echo: bool) -> _Generated:
    """Run the request; echo: print the text as it comes."""
    answer = _Generated()
    started = time.monotonic()
    for delta in llm.stream(prompt, params):
        if delta.token is not None:
            answer.token_ids.append(delta.token)
        if len(answer.token_ids) == 1:
            answer.first_token_s = time.monotonic() - started
        answer.text += delta.text
        answer.finish_reason = delta.finish_reason
        if echo:
            print(delta.text, end="", flush=True)
    answer.total_s = time.monotonic() - started
    if echo:
        print(flush=True)
    return answer


def _as_json(llm: LLM, prompt: list[int], answer: _Generated) -> dict[str, Any]:
    card, now = llm.card, llm.snapshot
    return {
        "prompt_tokens": len(prompt),
        "output_token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "timing": {
            "load_s": round(card.load_s, 3),
            "first_token_s": round(answer.first_token_s, 4),
            "output_tokens_per_s": round(answer.tokens_per_s, 2),
        },
        "dtype": card.dtype,
        "num_microbatches": now.num_microbatches,
        **_emulation(llm),
        "stages": [
            {
                "layers": stage.layers,
                "busy_fraction": round(shards[0].busy_fraction, 4),
                "feedback_wait_s": round(shards[0].feedback_wait_s, 4),
                "activation_wait_s": round(shards[0].activation_wait_s, 4),
                "weight_bytes": stage.weight_bytes,
                "peak_memory_bytes": sum(shard.peak_memory_bytes for shard in shards),
            }
            for stage, shards in zip(card.stages, card.ranks.by_stage(now.usage), strict=True)
        ],
    }


def _emulation(llm: LLM) -> dict[str, Any]:
    """What makes the figures those of no model, or of other links; empty if nothing does."""
    config = llm.config
    found: dict[str, Any] = {}
    if config.model.startswith(SYNTHETIC):
        found["synthetic"] = True
    if config.link_emulation is not None:
        found["emulated_link"] = {
            "latency_ms": config.link_latency_ms,
            "bandwidth_mbps": config.link_bandwidth_mbps,
        }
    return found


def _labels(llm: LLM) -> list[str]:
    """What a reader of the figures must know: that they are not those of a model and its links."""
    labels = []
    if llm.config.model.startswith(SYNTHETIC):
        labels.append("synthetic: the stages only sleep, no model runs")
    if llm.config.link_emulation is not None:
        line = f"the links were emulated: {llm.config.link_latency_ms:g} ms one way"
        if llm.config.link_bandwidth_mbps is not None:
            line += f", {llm.config.link_bandwidth_mbps:g} Mbit/s"
        labels.append(line)
    return labels


def _print_summary(llm: LLM, prompt: list[int], answer: _Generated) -> None:
    card = llm.card
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    console.print(
        f"\n{len(prompt)} prompt + {len(answer.token_ids)} output tokens, "
        f"{answer.tokens_per_s:.1f} tokens/s, first after {answer.first_token_s:.2f} s, "
        f"loaded in {card.load_s:.1f} s\n{card.line}",
        highlight=False,
    )
    if defaults := card.sampling_defaults:
        console.print(
            f"sampling defaults of the model: {in_words(defaults)} "
            "(--generation-config none: without)",
            highlight=False,
        )
    table = Table()
    for heading in ("stage", "layers", "busy", "feedback wait", "activation wait", "peak memory"):
        table.add_column(heading, justify="right")
    for rank, usage in enumerate(llm.snapshot.usage):
        name = card.ranks.name(rank).removeprefix("stage ")
        table.add_row(
            name,
            str(card.stages[card.ranks.stage_of(rank)].layers),
            f"{usage.busy_fraction:.0%}",
            f"{usage.feedback_wait_s:.2f} s",
            f"{usage.activation_wait_s:.2f} s",
            f"{usage.peak_memory_bytes / 2**20:.0f} MiB",
        )
    console.print(table)
    if labels := _labels(llm):
        console.print("; ".join(labels), highlight=False)
    if len(card.stages) > 1:
        console.print(
            "A single request goes from stage to stage: each waits while the others compute.",
            highlight=False,
        )
