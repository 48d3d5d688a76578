"""End-of-text tokens, and the sampling defaults of generation_config.json and of GGUF files."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.checkpoint.generation_config import (
    sampling_defaults_of_directory,
    sampling_defaults_of_gguf,
)
from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.gguf_tokenizer import end_ids
from headrace.errors import ModelError
from headrace.model.read import model_from_huggingface
from headrace.serving.engine_request import sampling_params
from headrace.serving.requests import ChatBody, CompletionBody
from tiny_checkpoints import write_tiny_gguf, write_tiny_llama

ALL = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
}


def directory(path: Path, **fields: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(fields))
    return path


def end_tokens(llm: LLM) -> set[int]:
    return set(llm._running.engine.scheduler.config.eos_token_ids)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ([2, 3], 4, {2, 3, 4, 299}),
        # What no token has, as -1 is written for: it could never come, nor be kept from coming.
        ([2, -1], [300, 10**9], {2, 299}),
    ],
)
def test_every_file_that_names_end_tokens_counts(
    tmp_path: Path, config: Any, generation: Any, ends: set[int]
) -> None:
    folder = write_tiny_llama(tmp_path, eos_token_id=config, num_hidden_layers=1)
    # save_pretrained writes what config.json has into generation_config.json as well.
    directory(folder, **({} if generation is None else {"eos_token_id": generation}))
    with LLM(str(folder), kv_cache_memory="1MiB") as llm:
        assert end_tokens(llm) == ends
        for token in ends:
            params = SamplingParams(temperature=0, logit_bias={token: 100})
            (completion,) = llm.generate("a", params)[0].outputs
            assert (completion.token_ids, completion.finish_reason) == ([token], "stop")
            # Not before its time either.
            params = SamplingParams(temperature=0, logit_bias={token: 100}, min_tokens=3)
            assert len(llm.generate("a", params)[0].outputs[0].token_ids) == 4


def test_an_end_token_that_is_no_token_id_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, num_hidden_layers=1)
    for wrong in ("</s>", [2, None], 1.5, True):
        directory(folder, eos_token_id=wrong)
        with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id must be"):
            model_from_huggingface(folder)


def test_the_end_tokens_that_a_gguf_names_count(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(298)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 297)

    assert end_ids(read_gguf(write_tiny_gguf(tmp_path / "m.gguf", add=add))) == (297, 298, 299)


def test_defaults_are_read_by_vllms_names(tmp_path: Path) -> None:
    defaults = sampling_defaults_of_directory(directory(tmp_path, **ALL, do_sample=False))
    expected = {**ALL, "max_tokens": 2048}
    del expected["max_new_tokens"]
    assert dict(defaults) == expected
    SamplingParams(**defaults)
    assert not sampling_defaults_of_directory(directory(tmp_path, temperature=None, bos_token_id=1))
    (tmp_path / "generation_config.json").unlink()
    assert not sampling_defaults_of_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "warm"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("top_p", [0.9]),
    ],
)
def test_a_default_out_of_its_range_is_told_and_left_out(
    tmp_path: Path, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = directory(tmp_path, **{**ALL, name: value})
    defaults = sampling_defaults_of_directory(folder)
    ours = {"max_new_tokens": "max_tokens"}.get(name, name)
    assert ours not in defaults
    assert len(defaults) == len(ALL) - 1
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{folder / 'generation_config.json'}: its {ours} (")


def test_what_a_gguf_recommends_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in (("temp", 0.7), ("top_p", 0.95), ("penalty_repeat", 1.1)):
            writer.add_float32(f"general.sampling.{name}", value)
        writer.add_int32("general.sampling.top_k", 40)
        writer.add_int32("general.sampling.mirostat", 1)

    defaults = sampling_defaults_of_gguf(read_gguf(write_tiny_gguf(tmp_path / "m.gguf", add=add)))
    assert defaults == {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1}
    (record,) = caplog.records
    assert "general.sampling.mirostat is ignored" in record.getMessage()


def test_requests_take_them_where_they_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 40}
    more: dict[str, Any] = {"n": 1, "logprobs": None, "defaults": defaults}

    def asked(body: CompletionBody | ChatBody, max_tokens: int | None) -> SamplingParams:
        return sampling_params(body, {}, max_tokens=max_tokens, **more)

    silent = asked(ChatBody(messages=[]), None)
    assert (silent.temperature, silent.top_k, silent.max_tokens) == (0.6, 20, 40)
    given = asked(CompletionBody(prompt="a", temperature=0, top_k=0, top_p=0.5), 7)
    assert (given.temperature, given.top_k, given.top_p, given.max_tokens) == (0, 0, 0.5, 7)
    more["defaults"] = {}
    assert asked(ChatBody(messages=[]), None) == SamplingParams(max_tokens=None)


def test_python_programs_take_them_where_they_give_no_parameters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.0)

    caplog.set_level(logging.INFO)
    model = str(write_tiny_gguf(tmp_path / "m.gguf", add=add))
    expected = SamplingParams(temperature=0)
    with LLM(model, kv_cache_memory="1MiB") as llm:
        assert llm.get_default_sampling_params() == expected
        (known,) = llm.generate("a", expected)[0].outputs
        (found,) = llm.generate("a")[0].outputs
        assert found.token_ids == known.token_ids
        assert [delta.token for delta in llm.stream("a")] == known.token_ids
    assert "temperature 0 (generation_config; --generation-config none" in caplog.text

    async def last(engine: AsyncLLM) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate("a"):
            tokens = output.outputs[0].token_ids
        return tokens

    with AsyncLLM(model, kv_cache_memory="1MiB") as engine:
        assert engine.get_default_sampling_params() == expected
        assert asyncio.run(last(engine)) == known.token_ids
    caplog.clear()
    with LLM(model, kv_cache_memory="1MiB", generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    assert "sampling defaults" not in caplog.text
