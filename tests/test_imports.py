"""Who may import whom, and what must never be used: the house rules of docs/architecture.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

ROOT = Path(headrace.__file__).parent

# Packages and modules in one order: each may import those before it. docs/architecture.md says what
# each is for.
ORDER = [
    "errors", "checks", "setting", "patterns", "signals", "protocol", "sampling_params", "host",
    "kernels", "sampling", "checkpoint", "model", "execution", "pipeline", "simulation", "engine",
    "config", "deployment", "trace", "conversation", "prompts", "progress", "engine_thread", "llm",
    "async_llm", "client", "serving", "bench", "cli", "__main__",
]  # fmt: skip
# The deciding side and the moving side meet in `deployment` alone, and in no other file.
DECIDES, MOVES = {"engine"}, {"execution", "pipeline", "simulation"}


def imports_of(file: Path) -> set[str]:
    """Every module that the file imports, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            found.add(node.module or "")
    return found


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "headrace" and len(parts) > 1 else None


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_follow_one_order_of_packages(file: Path) -> None:
    own = file.relative_to(ROOT).parts[0].removesuffix(".py")
    used = {p for module in imports_of(file) if (p := package_of(module))} - {own}
    if own == "__init__":
        # The public names, each from where it is.
        return
    assert own in ORDER, f"{own} is not part of the house: add it to docs/architecture.md"
    assert used <= set(ORDER[: ORDER.index(own)])
    if own != "deployment":
        used.add(own)
        assert not (used & DECIDES and used & MOVES)


@pytest.mark.parametrize("package", ["engine", "protocol", "checkpoint"])
def test_the_deciding_side_never_imports_torch(package: str) -> None:
    for file in (ROOT / package).rglob("*.py"):
        assert not any(m.split(".")[0] == "torch" for m in imports_of(file)), file


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_pickle_and_no_object_collectives(file: Path) -> None:
    modules = {m.split(".")[0] for m in imports_of(file)}
    assert not modules & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
    text = file.read_text(encoding="utf-8")
    for name in ("_object_list", "all_gather_object", "send_pyobj", "recv_pyobj", "torch.load"):
        assert name not in text


def test_a_files_model_starts_without_torch_and_transformers() -> None:
    """They take seconds to import, on the cores on which the stages load meanwhile. Only chats need
    transformers."""
    code = (
        "import sys, headrace.cli, headrace.deployment.start\n"
        "from headrace.checkpoint.gguf_file import read_gguf\n"
        "from headrace.checkpoint.locate import locate_model\n"
        "from headrace.checkpoint.tokenizer import tokenizer_of_gguf\n"
        "tokenizer_of_gguf(read_gguf(locate_model('smollm2').path)).encode('a')\n"
        "sys.exit(bool({'torch', 'transformers', 'jinja2'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_imports_ray_unless_it_is_asked_for() -> None:
    """It is optional, and starts threads."""
    code = "import sys, headrace.cli, headrace.deployment.start; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    users = [file.name for file in FILES if any(m.split(".")[0] == "ray" for m in imports_of(file))]
    assert users == ["ray_hosts.py"]
