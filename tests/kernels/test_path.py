"""Which kernels a process takes, as a user chooses and sees it."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command import Command, Finished
from headrace.errors import StartError
from headrace.kernels import PATH_VARIABLE, REFERENCE, path
from tiny_checkpoints import write_tiny_gguf

MISSING = "torch takes the place of native kernels"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 16 elements, which the native kernels take."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def without_extension(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What makes a process, and those it starts, one of an installation without the extension."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.modules['headrace.kernels._native'] = None\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def generate(model: Path, environment: dict[str, str], *arguments: str) -> Command:
    common = ["--prompt", "What a day", "--temperature", "0", "--max-tokens", "40", "--ignore-eos"]
    return Command(
        ["generate", "--model", str(model), "--dtype", "float32", *common, *arguments, "--json"],
        environment={PATH_VARIABLE: "", **environment},
    )


def output_tokens(finished: Finished) -> list[int]:
    assert finished.code == 0, finished.err
    tokens: list[int] = json.loads(finished.out)["output_token_ids"]
    return tokens


# A process for each path: forked, because importing torch takes most of its time.
EACH_PATH = """
import os, sys, torch
from headrace.kernels import PATH_VARIABLE, REFERENCE, path
from headrace.kernels.linear import Linear
for name in sys.argv[1:]:
    if not os.fork():
        os.environ[PATH_VARIABLE] = name
        note, code = path.choose_path(), path.has_native() and path.native.path_name()
        if name == REFERENCE:
            del path.native
        x, weight = torch.randn(3, 20), torch.randn(7, 20)
        y = Linear(weight, None, torch.float32)(x, torch.empty(3, 7))
        print(path.path_name(), code, note, torch.allclose(y, x @ weight.T, atol=1e-5), flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_process_takes_the_path_that_the_environment_names() -> None:
    names = path.paths()
    script = [sys.executable, "-c", EACH_PATH, *names]
    told = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True, timeout=100)
    for name, line in zip(names, told.stdout.splitlines(), strict=True):
        taken, code, note, right = line.split()
        assert (taken, note, right) == (name, "None", "True")
        assert name in (REFERENCE, code)


@pytest.mark.skipif(not path.has_native(), reason="native kernels are not built")
def test_without_the_extension_tokens_are_the_same_in_float32_and_it_is_said_once(
    model: Path, without_extension: dict[str, str]
) -> None:
    started = [generate(model, without_extension, "-pp", "2"), generate(model, {})]
    without, native = [command.finish() for command in started]
    assert without.err.count(MISSING) == 1
    assert MISSING not in native.err
    tokens = output_tokens(native)
    assert len(set(tokens)) > 10
    assert output_tokens(without) == tokens


def test_an_unknown_path_is_one_line_that_names_what_there_is(model: Path) -> None:
    finished = generate(model, {PATH_VARIABLE: "sse9"}).finish()
    assert finished.code == 1
    (line,) = finished.err.splitlines()
    assert "HEADRACE_KERNELS=sse9" in line
    assert ", ".join(path.paths()) in line
    assert finished.left == []


def test_without_the_extension_the_reference_may_be_named_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "headrace.kernels._native", None)
    monkeypatch.setattr(path, "native", path._load())
    monkeypatch.setattr(path, "_path", REFERENCE)
    assert not path.has_native()
    with pytest.raises(StartError, match="native kernels are missing"):
        path.native.path_names()
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    assert MISSING in (path.choose_path() or "")
    monkeypatch.setenv(PATH_VARIABLE, REFERENCE)
    assert path.choose_path() is None
    monkeypatch.setenv(PATH_VARIABLE, "portable")
    with pytest.raises(StartError, match=r"have torch$"):
        path.choose_path()


@pytest.mark.skipif(not path.has_native(), reason="native kernels are not built")
def test_the_stub_names_what_the_extension_has_and_nothing_else() -> None:
    stub = Path(path.__file__).with_name("_native.pyi").read_text(encoding="utf-8")
    declared = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.AnnAssign):
            declared[ast.unparse(node.target)] = set[str]()
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = node.body if isinstance(node, ast.ClassDef) else []
            declared[node.name] = {f.name for f in inner if isinstance(f, ast.FunctionDef)}
    there = {
        name: {n for n in vars(found) if n == "__init__" or not n.startswith("_")}
        if isinstance(found := getattr(path.native, name), type)
        else set[str]()
        for name in dir(path.native)
        if not name.startswith("_")
    }
    assert declared == there


def test_a_path_that_is_not_here_leaves_the_one_that_was_taken() -> None:
    before = path.path_name()
    with pytest.raises(StartError, match="no-such-path"):
        path.use_path("no-such-path")
    assert path.path_name() == before


@pytest.mark.skipif(not path.has_native(), reason="native kernels are not built")
def test_the_best_path_of_the_machine_is_taken_unless_another_is_named() -> None:
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = set(next((x for x in info.splitlines() if x.startswith("flags")), "").split())
    best = "portable"
    if flags >= {"avx2", "fma", "bmi2"}:
        best = "avx2"
        if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}:
            best = "avx512_bf16" if flags >= {"avx512_bf16", "avx512_vnni"} else "avx512"
            if flags >= {"amx_tile", "amx_bf16", "avx512_vnni"}:
                best = "amx"
    assert path.path_name() == best


def test_only_float32_and_bfloat16_on_the_cpu_run_native(native_path: str) -> None:
    cpu = torch.device("cpu")
    assert path.runs_native(cpu, torch.float32)
    assert path.runs_native(cpu, torch.bfloat16)
    assert not path.runs_native(cpu, torch.float16)
    assert not path.runs_native(torch.device("meta"), torch.float32)
