"""`LLM` as a Python user meets it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.errors import PipelineError, UsageError
from headrace.pipeline import launch
from tiny_checkpoints import write_tiny_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with LLM(str(model), pipeline_parallel_size=2, max_num_seqs=3) as engine:
        yield engine


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"number {n}" for n in range(10)]
    together = llm.generate(prompts, GREEDY)
    assert [answer.prompt for answer in together] == prompts
    for prompt, answer in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, GREEDY)[0]
        assert alone.outputs[0].token_ids == answer.outputs[0].token_ids
        assert len(answer.outputs[0].token_ids) == 12
        assert answer.outputs[0].finish_reason == "length"
        assert answer.finished


def test_text_and_token_prompts_are_the_same(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    text, tokens = llm.generate("hello", GREEDY)[0], llm.generate(ids, GREEDY)[0]
    assert tokens.prompt is None
    for same in ({"prompt": "hello"}, {"prompt_token_ids": ids}):
        again = llm.generate(same, GREEDY)[0]
        assert again.prompt_token_ids == ids
        assert again.prompt == same.get("prompt")
    assert text.prompt_token_ids == tokens.prompt_token_ids == ids
    assert text.outputs[0].token_ids == tokens.outputs[0].token_ids
    assert text.outputs[0].text == llm.tokenizer.decode(text.outputs[0].token_ids)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    lengths = [len(a.outputs[0].token_ids) for a in llm.generate(["a", "b"], params)]
    assert lengths == [1, 5]


def test_a_stop_token_ends_the_sequence_and_is_part_of_it(llm: LLM) -> None:
    free = llm.generate("stop here", GREEDY)[0].outputs[0].token_ids
    stop = free[4]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    stopped = llm.generate("stop here", params)[0].outputs[0]
    assert stopped.token_ids == free[: free.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_streamed_deltas_add_up_to_the_answer(llm: LLM) -> None:
    deltas = list(llm.stream("stream", GREEDY))
    whole = llm.generate("stream", GREEDY)[0].outputs[0]
    assert [d.token for d in deltas] == whole.token_ids
    assert "".join(d.text for d in deltas) == whole.text
    assert [d.finish_reason for d in deltas] == [None] * 11 + ["length"]


def test_a_stream_left_early_frees_its_slot_and_blocks(llm: LLM) -> None:
    llm.settle()
    before = llm._running.engine.scheduler.free_blocks
    for _ in llm.stream("leave", GREEDY):
        break
    llm.settle()
    assert llm._running.engine.scheduler.free_blocks == before
    assert len(llm.generate("again", GREEDY)[0].outputs[0].token_ids) == 12


def test_open_streams_and_generate_keep_each_others_tokens(llm: LLM) -> None:
    expected = {p: llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in ("one", "two", "six")}
    one, two = llm.stream("one", GREEDY), llm.stream("two", GREEDY)
    got: dict[str, list[int | None]] = {"one": [next(one).token], "two": [next(two).token]}
    got["six"] = list(llm.generate("six", GREEDY)[0].outputs[0].token_ids)
    for a, b in zip(one, two, strict=True):
        got["one"].append(a.token)
        got["two"].append(b.token)
    assert got == expected


@pytest.mark.parametrize(
    ("prompts", "params", "reason"),
    [
        ([[1, 300]], GREEDY, "token 300 is not in the vocabulary"),
        ([[-1]], GREEDY, "token -1 is not in the vocabulary"),
        ([""], GREEDY, "empty"),
        (["a", ""], GREEDY, "prompt 1: the prompt is empty"),
        (["x" * 128], GREEDY, "128 tokens"),
        (["a", "b"], [GREEDY], "1 sampling parameters were given for 2 prompts"),
        ([None], GREEDY, "prompt 0 must be a text or a list of token ids, not None"),
        (["b", ["a"]], GREEDY, "prompt 1 must be a text or a list of token ids"),
        ([[1.5]], GREEDY, "prompt 0 must be a text or a list of token ids"),
        (7, GREEDY, "a prompt must be a text or a list of token ids, not 7"),
        ([True, False], GREEDY, "prompt 0 must be a text or a list of token ids, not True"),
        ({"text": "a"}, GREEDY, "the prompt must be a text or a list of token ids"),
        ({"prompt_token_ids": "a", "prompt": "b"}, GREEDY, "the prompt must be a text"),
        ([np.array([1, 2])], GREEDY, "prompt 0 must be a text or a list of token ids"),
        (np.array([1, 2]), GREEDY, "a prompt must be a text or a list of token ids"),
        (b"abc", GREEDY, "a prompt must be a text or a list of token ids"),
        ("\ud800", GREEDY, "not valid Unicode"),
        ("a", {"temperature": 0}, "sampling_params"),
        ("a", "fast", "sampling_params"),
    ],
)
def test_a_bad_request_is_a_value_error_and_harms_no_other(
    llm: LLM, prompts: object, params: object, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert len(llm.generate("fine", GREEDY)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pipeline_size": 2}, "no setting pipeline_size: did you mean pipeline_parallel_size"),
        ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size must be a whole number, not '2'"),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
        ({"block_size": True}, "block_size must be a whole number, not True"),
        ({"num_microbatches": 1000}, "--num-microbatches 1000 is more than the 256 sequences"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "must be at least --max-num-seqs 8"),
        (
            {"token_feedback": "never"},
            "token_feedback must be one of deferred, blocking, not 'never'",
        ),
        ({"kv_cache_memory": "2 cows"}, "--kv-cache-memory '2 cows' is not a size"),
        ({"kv_cache_memory": 1.5}, "kv_cache_memory must be a whole number or a text or None"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization must be above 0"),
        ({"stall_timeout": 0.0}, "--stall-timeout must be above 0"),
        ({"link_latency_ms": -1.0}, "--link-latency-ms must be from 0 to 60000"),
        ({"link_bandwidth_mbps": 0.0}, "--link-bandwidth-mbps must be above 0"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_starts(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        LLM("smollm2", **settings)


def test_a_start_waits_for_nothing_but_its_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it ever looked for something that nobody is going to say, it would hang here."""
    monkeypatch.setattr(launch, "_START_LOOK", 1e6)
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    with LLM(str(model), pipeline_parallel_size=2) as llm:
        assert llm.generate(["a"], SamplingParams(max_tokens=1))[0].finished


@pytest.mark.parametrize("victim", [2])
def test_a_dead_stage_is_blamed_even_if_its_neighbours_are_heard_first(
    tmp_path: Path, victim: int
) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    with LLM(str(model), pipeline_parallel_size=4, max_restarts=0) as llm:
        deltas = llm.stream("x", SamplingParams(max_tokens=100, ignore_eos=True))
        next(deltas)
        stages = [stage.process for stage in llm._running.processes._processes]
        stages[victim].kill()
        stages[victim].wait()
        with pytest.raises(PipelineError, match=f"stage {victim} .* was killed by signal 9"):
            list(deltas)


def test_an_interrupt_inside_the_engine_closes_it_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(write_tiny_gguf(tmp_path / "tiny.gguf"))) as llm:
        receive = llm._running.processes.receive
        monkeypatch.setattr(llm._running.processes, "receive", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("hello", GREEDY)
        monkeypatch.setattr(llm._running.processes, "receive", receive)
        with pytest.raises(UsageError, match="closed"):
            llm.generate("hello", GREEDY)


def _interrupt(timeout_s: float) -> NoReturn:
    raise KeyboardInterrupt


def test_generating_after_close_is_refused(tmp_path: Path) -> None:
    llm = LLM(str(write_tiny_gguf(tmp_path / "tiny.gguf")))
    llm.close()
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        llm.generate("hello", GREEDY)
