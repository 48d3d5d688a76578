"""The commands' flags are those that the settings declare."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

import headrace
from headrace.cli import app
from headrace.cli.flags import all_flags, engine_flags, with_flags
from headrace.config import EngineConfig
from headrace.errors import UsageError
from headrace.serving.settings import ServerSettings
from headrace.setting import Declared, declared_settings

ENGINE = declared_settings(EngineConfig)
SERVER = declared_settings(ServerSettings)
ROOT = Path(headrace.__file__).parent
# What a bench has of its own under a setting's name: other values, or no single one.
OWN = {
    "kernels": {"dtype"},
    "roofline": {"dtype"},
    "scheduler": {"pipeline_parallel_size", "prefill_policy", "max_model_len", "seed", "model"},
    "microbatches": {"pipeline_parallel_size", "link_latency_ms"},
    "overlap": {"model"},
    "chat": {"seed"},
}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with an engine in it, by name."""
    top: Any = typer.main.get_command(app)
    bench = top.commands["bench"].commands
    yield from ((name, top.commands[name]) for name in ("serve", "generate", "chat"))
    yield from ((name, bench[name]) for name in bench if name != "serve")


def engines_flags() -> Iterator[tuple[str, Any, Declared]]:
    for name, command in commands():
        for option in command.params:
            if option.name in ENGINE.keys() - {"model"} - OWN.get(name, set()):
                yield name, option, ENGINE[option.name]


@pytest.fixture
def taken() -> tuple[Any, dict[str, Any]]:
    """A command with flags of all sorts, and what it was called with."""
    seen: dict[str, Any] = {}

    @with_flags
    def command(
        cups: int = 1,
        *,
        server: Annotated[dict[str, Any], all_flags(ServerSettings, without=("host",))],
        engine: Annotated[
            dict[str, Any], engine_flags("num_microbatches", "block_size", dtype="float32")
        ],
    ) -> int:
        seen.update(cups=cups, server=server, engine=engine)
        return 0

    app = typer.Typer()
    app.command()(command)
    return typer.main.get_command(app), seen


def test_a_command_is_given_the_declared_defaults_and_its_own(
    taken: tuple[Any, dict[str, Any]],
) -> None:
    command, seen = taken
    command.main([], standalone_mode=False)
    assert seen["engine"] == {"dtype": "float32", "block_size": 16, "num_microbatches": None}
    defaults = {name: declared.default for name, declared in SERVER.items() if name != "host"}
    assert seen["server"] == defaults | {"api_keys": (), "served_model_names": ()}


def test_texts_lists_and_words_of_flags_become_values(taken: tuple[Any, dict[str, Any]]) -> None:
    command, seen = taken
    flags = ["--num-microbatches", "3", "--allowed-origins", '["a", "b"]', "--allow-credentials"]
    flags += ["--api-key", "x", "--api-key", "y", "--max-body-size", "1MiB", "--cups", "2"]
    command.main(flags, standalone_mode=False)
    assert seen["cups"] == 2
    assert seen["engine"]["num_microbatches"] == 3
    assert seen["server"]["allowed_origins"] == ("a", "b")
    assert seen["server"]["allow_credentials"] is True
    assert seen["server"]["api_keys"] == ("x", "y")
    assert ServerSettings(**seen["server"]).max_body_bytes == 2**20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--block-size", "0"], "--block-size must be at least 1, not 0"),
        (["--num-microbatches", "0"], "--num-microbatches must be at least 1, not 0"),
        (["--num-microbatches", "x"], "--num-microbatches must be auto or a number, not 'x'"),
        (["--dtype", "int8"], "dtype must be one of auto, float32, bfloat16, float16"),
        (["--port", "65536"], "--port must be from 0 to 65535, not 65536"),
        (["--allowed-methods", "GET"], "--allowed-methods must be a JSON list of texts such as"),
        (["--max-body-size", "x"], "--max-body-size 'x' is not a size"),
        (["--read-timeout", "0"], "--read-timeout must be above 0 and at most 86400, not 0.0"),
    ],
)
def test_a_wrong_value_names_its_flag(
    taken: tuple[Any, dict[str, Any]], flags: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        taken[0].main(flags, standalone_mode=False)


def test_every_flag_of_the_engine_is_the_declared_one_in_every_command() -> None:
    found = list(engines_flags())
    assert {name for name, _, _ in found} >= {"serve", "generate", "chat", "throughput"}
    for name, option, declared in found:
        assert declared.flag in option.opts, name
        assert option.help == declared.setting.help, (name, declared.flag)
        assert "-pp" in option.opts or declared.name != "pipeline_parallel_size"


def test_serve_has_every_setting() -> None:
    serve = dict(commands())["serve"]
    assert {option.name for option in serve.params} >= ENGINE.keys() | SERVER.keys()


def test_no_command_says_anything_of_a_setting_again() -> None:
    """Neither its default nor its help: what is not its own comes from the declaration."""
    helps = [declared.setting.help for declared in {**ENGINE, **SERVER}.values()]
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "cli").glob("*.py"))
    for text in helps:
        assert text not in source
    for name in ENGINE.keys() - set(itertools.chain(*OWN.values())):
        assert not re.search(rf"\b{name}: ", source), name


DOCS = [ROOT.parents[1] / "README.md", *(ROOT.parents[1] / "docs").glob("*.md")]


def rows_under(header: str) -> Iterator[list[str]]:
    """The cells of every row of the documents' tables with this header."""
    for file in DOCS:
        for table in file.read_text(encoding="utf-8").split(header)[1:]:
            lines = itertools.takewhile(lambda line: line.startswith("|"), table.split("\n")[2:])
            yield from (re.split(r"(?<!\\)\|", line.strip("| ")) for line in lines)


def test_flags_and_defaults_in_the_documents_are_the_declared_ones() -> None:
    serve = dict(commands())["serve"]
    # Those of the command itself, such as --dry-run, are no settings.
    flags = {
        name: {**ENGINE, **SERVER}.get(option.name)
        for option in serve.params
        for name in option.opts
    }
    rows = list(rows_under("| flag | default | meaning |"))
    assert rows
    for names, defaults, *_ in rows:
        declared = [flags[name] for name in re.findall(r"`(--[a-z-]+)`", names)]
        told = [default.strip(" `") for default in defaults.split(",")]
        # One default may be that of several flags.
        for each, text in zip(declared, told * (len(declared) // len(told)), strict=True):
            # What the command fills in is said in words.
            assert each is None or text in (in_documents(each), "the value of `--model"), names


def in_documents(declared: Declared) -> str:
    default = declared.default
    if default is None or default == ():
        return "none"
    if isinstance(default, tuple):
        return json.dumps(default)
    if isinstance(default, float):
        return f"{default:g}"
    return "off" if default is False else str(default)


def test_settings_in_the_documents_are_declared() -> None:
    rows = list(rows_under("| setting | what it sets |"))
    assert rows
    for names, *_ in rows:
        assert set(re.findall(r"`([a-z_]+)`", names)) <= ENGINE.keys()
