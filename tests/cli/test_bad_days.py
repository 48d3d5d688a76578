"""A user's mistake ends in one clear line, in time, with nothing left behind."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace.cli
from command import Finished, Mark, run
from headrace.checkpoint.locate import locate_model
from tiny_checkpoints import write_tiny_gguf, write_tiny_llama

Case = Callable[[Path], tuple[list[str], str]]


def tiny(folder: Path) -> Path:
    return write_tiny_llama(folder / "model")


def tiny_file(folder: Path) -> str:
    return str(write_tiny_gguf(folder / "model.gguf"))


def edit_json(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**content, **changes}), encoding="utf-8")


def missing_path(folder: Path) -> tuple[list[str], str]:
    return ["--model", str(folder / "nowhere")], "no such file or directory"


def directory_without_model(folder: Path) -> tuple[list[str], str]:
    return ["--model", str(folder)], "has no config.json"


def file_of_another_kind(folder: Path) -> tuple[list[str], str]:
    (folder / "model.bin").write_bytes(b"x")
    return [
        "--model",
        str(folder / "model.bin"),
    ], "pickled weights, which can run code, are not read"


def unsupported_architecture(folder: Path) -> tuple[list[str], str]:
    model = tiny(folder)
    edit_json(model / "config.json", architectures=["FalconForCausalLM"])
    return (
        ["--model", str(model)],
        "FalconForCausalLM is not supported; supported are LlamaForCausalLM, MistralForCausalLM",
    )


def quantized_weights(folder: Path) -> tuple[list[str], str]:
    model = tiny(folder)
    edit_json(model / "config.json", quantization_config={"quant_method": "fp8"})
    return ["--model", str(model)], "its weights are quantized (fp8)"


def broken_config(folder: Path) -> tuple[list[str], str]:
    model = tiny(folder)
    (model / "config.json").write_text("{", encoding="utf-8")
    return ["--model", str(model)], "config.json cannot be read"


def truncated_safetensors(folder: Path) -> tuple[list[str], str]:
    model = tiny(folder)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return ["--model", str(model)], "damaged or cut short"


def no_weights(folder: Path) -> tuple[list[str], str]:
    model = tiny(folder)
    (model / "model.safetensors").unlink()
    return ["--model", str(model)], "only safetensors weights are read"


def missing_shard(folder: Path) -> tuple[list[str], str]:
    model = write_tiny_llama(folder / "model", max_shard_size="20KB")
    next(iter(sorted(model.glob("model-*.safetensors")))).unlink()
    return ["--model", str(model), "-pp", "2"], "model-00001-of"


def tensors_of_another_model(folder: Path) -> tuple[list[str], str]:
    model = tiny(folder)
    edit_json(model / "config.json", intermediate_size=64)
    return ["--model", str(model), "-pp", "2"], "the configuration asks for [64, 32]"


def truncated_gguf(folder: Path) -> tuple[list[str], str]:
    file = folder / "cut.gguf"
    with locate_model("smollm2").path.open("rb") as whole:
        file.write_bytes(whole.read(20_000_000))
    return ["--model", str(file)], "cut.gguf"


def gguf_that_is_none(folder: Path) -> tuple[list[str], str]:
    (folder / "text.gguf").write_text("hello", encoding="utf-8")
    return ["--model", str(folder / "text.gguf")], "GGUF"


def unknown_pre_tokenizer(folder: Path) -> tuple[list[str], str]:
    file = folder / "odd.gguf"
    before, key, after = locate_model("smollm2").path.read_bytes().partition(b"ggml.pre")
    file.write_bytes(before + key + after.replace(b"smollm", b"smoxxm", 1))
    return ["--model", str(file)], "smoxxm"


def broken_tokenizer(folder: Path) -> tuple[list[str], str]:
    model = tiny(folder)
    (model / "tokenizer.json").write_text('{"version": 7}', encoding="utf-8")
    return ["--model", str(model)], "its tokenizer cannot be loaded"


def tokenizer_of_another_model(folder: Path) -> tuple[list[str], str]:
    model = write_tiny_llama(folder / "model", vocab_size=280, eos_token_id=279)
    return ["--model", str(model)], "the tokenizer belongs to another model"


def prompt_too_long(folder: Path) -> tuple[list[str], str]:
    arguments = ["--model", tiny_file(folder), "--max-model-len", "16", "--prompt", "x" * 20]
    return arguments, "the prompt has 20 tokens"


def more_positions_than_the_model_has(folder: Path) -> tuple[list[str], str]:
    return ["--model", tiny_file(folder), "--max-model-len", "500"], "128 positions"


def more_stages_than_layers(folder: Path) -> tuple[list[str], str]:
    return ["--model", tiny_file(folder), "-pp", "5"], "more than the model's 4 layers"


def bad_partition(folder: Path) -> tuple[list[str], str]:
    arguments = ["--model", tiny_file(folder), "-pp", "2", "--layer-partition", "3,2"]
    return arguments, "adds up to 5, the model has 4 layers"


def no_threads(folder: Path) -> tuple[list[str], str]:
    return ["--model", "smollm2", "--cpu-threads", "0"], "--cpu-threads must be at least 1, not 0"


def cores_of_more_stages(folder: Path) -> tuple[list[str], str]:
    arguments = ["--model", tiny_file(folder), "--cpu-bind", "0|0"]
    return arguments, "--cpu-bind 0|0 is for 2 stages, --pipeline-parallel-size is 1"


def cache_too_small(folder: Path) -> tuple[list[str], str]:
    arguments = ["--model", tiny_file(folder), "--kv-cache-memory", "1000"]
    return arguments, "not enough memory for the cache"


def cache_larger_than_the_machine(folder: Path) -> tuple[list[str], str]:
    arguments = ["--model", tiny_file(folder), "--kv-cache-memory", "900000GiB"]
    return arguments, "not enough memory for the cache"


def size_that_is_none(folder: Path) -> tuple[list[str], str]:
    return ["--model", "smollm2", "--kv-cache-memory", "much"], "--kv-cache-memory 'much'"


def blocks_too_long(folder: Path) -> tuple[list[str], str]:
    return ["--model", tiny_file(folder), "--block-size", "129"], "--block-size 129"


def name_too_long(folder: Path) -> tuple[list[str], str]:
    return ["--model", "x" * 5000], "no such file or directory"


def prompt_of_broken_text(folder: Path) -> tuple[list[str], str]:
    return ["--model", tiny_file(folder), "--prompt", "\udcff"], "not valid Unicode"


def unknown_flag(folder: Path) -> tuple[list[str], str]:
    return ["--model", "smollm2", "--speed", "9"], "--speed"


def flag_out_of_range(folder: Path) -> tuple[list[str], str]:
    return ["--model", "smollm2", "--temperature", "-1"], "temperature must be from 0 to 2"


def empty_prompt(folder: Path) -> tuple[list[str], str]:
    return ["--model", tiny_file(folder), "--prompt", ""], "the prompt is empty"


def missing_prompt_file(folder: Path) -> tuple[list[str], str]:
    return ["--model", "smollm2", "--prompt-file", str(folder / "none.txt")], "none.txt"


def prompt_that_is_no_text(folder: Path) -> tuple[list[str], str]:
    (folder / "prompt").write_bytes(b"\xff\xfe\xff")
    return ["--model", "smollm2", "--prompt-file", str(folder / "prompt")], "not UTF-8"


FAILURES = [
    missing_path,
    directory_without_model,
    file_of_another_kind,
    unsupported_architecture,
    broken_config,
    truncated_safetensors,
    tensors_of_another_model,
    truncated_gguf,
    gguf_that_is_none,
    unknown_pre_tokenizer,
    broken_tokenizer,
    name_too_long,
    cache_too_small,
    cache_larger_than_the_machine,
]
# Much like those, and each takes several seconds.
LONG_FAILURES = [no_weights, missing_shard, tokenizer_of_another_model, quantized_weights]
WRONG_USAGE = [
    prompt_too_long,
    more_positions_than_the_model_has,
    more_stages_than_layers,
    bad_partition,
    no_threads,
    cores_of_more_stages,
    size_that_is_none,
    blocks_too_long,
    prompt_of_broken_text,
    unknown_flag,
    flag_out_of_range,
    empty_prompt,
    missing_prompt_file,
    prompt_that_is_no_text,
]


# One of each kind as a process, of those that fail: at once, when files are read, and when stages
# are up. The others differ in what is wrong and not in how the command ends.
AS_PROCESS = [
    missing_path,
    truncated_gguf,
    tensors_of_another_model,
    unknown_flag,
    prompt_of_broken_text,
]


@pytest.fixture
def run_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Finished]:
    """`command.run` without a process of the command's own, though with its stages."""
    mark = Mark()
    monkeypatch.setenv(*mark.variable)

    def run_here(*arguments: str) -> Finished:
        capfd.readouterr()
        code = headrace.cli.run([*arguments])
        out, err = capfd.readouterr()
        return Finished(code, out, err, mark.processes())

    return run_here


@pytest.mark.parametrize(
    ("case", "code"),
    [
        *((case, 1) for case in FAILURES),
        *(pytest.param(case, 1, marks=pytest.mark.long) for case in LONG_FAILURES),
        *((case, 2) for case in WRONG_USAGE),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_a_mistake_ends_in_one_clear_line(
    tmp_path: Path, run_here: Callable[..., Finished], case: Case, code: int
) -> None:
    arguments, expected = case(tmp_path)
    prompt = [] if any(a.startswith("--prompt") for a in arguments) else ["--prompt", "hi"]
    start = run if case in AS_PROCESS else run_here
    finished = start("generate", "--json", *arguments, *prompt)
    assert finished.code == code, finished.err
    assert finished.out == ""
    assert len(finished.err.splitlines()) == 1, finished.err
    assert finished.err.startswith("headrace: ")
    assert expected in finished.err
    assert finished.left == []


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        finished = run(
            "generate", "--json", "--model", tiny_file(tmp_path), "-pp", "2", "--prompt", "hi",
            "--link-backend", "gloo", "--master-port", port,
        )  # fmt: skip
    assert finished.code == 1
    assert f"127.0.0.1:{port}" in finished.err
    assert len(finished.err.splitlines()) == 1
    assert finished.left == []


def test_debug_shows_where_it_happened(
    tmp_path: Path, run_here: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_KERNELS", "of-nowhere")
    finished = run_here(
        "generate", "--json", "--model", tiny_file(tmp_path), "--prompt", "hi", "--debug"
    )
    assert "Traceback" in finished.err
    assert "choose_path" in finished.err, "the stage's own traceback"
    assert "HEADRACE_KERNELS=of-nowhere" in finished.err.splitlines()[-1]
