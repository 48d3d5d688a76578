import json

import pytest
import typer

from headrace.bench import links
from headrace.cli.bench import app
from headrace.errors import PipelineError, UsageError

SIZES = (4 << 10, 1 << 20)


@pytest.fixture(autouse=True)
def few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SIZES", SIZES)
    monkeypatch.setattr(links, "_ROUND_TRIPS", (1 << 20, 3))
    # Fewer than may be under way, and more.
    monkeypatch.setattr(links, "_ONE_WAY", (16 << 20, 20))


def run(*arguments: str) -> None:
    typer.main.get_command(app).main(["links", *arguments], standalone_mode=False)


def test_every_backend_has_figures_of_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    run("--rounds", "2", "--json")
    answer = json.loads(capsys.readouterr().out)
    cases = [(case["backend"], case["size"]) for case in answer["cases"]]
    assert cases == [(name, size) for name in links.backends() for size in SIZES]
    assert {"local", "gloo", "curve", "curve_insecure"} == {name for name, _ in cases}
    for case in answer["cases"]:
        assert 0 < case["us_min"] <= case["us"] <= case["us_max"]
        assert 0 < case["gb_per_s_min"] <= case["gb_per_s"] <= case["gb_per_s_max"]
        assert case["of_copy"] > 0
        assert case["cores"] > 0
    assert [copy["size"] for copy in answer["copy"]] == list(SIZES)
    assert {"machine", "versions"} <= answer.keys()


def test_without_json_it_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    run("--rounds", "1")
    shown = capsys.readouterr().out
    assert "curve_insecure" in shown
    assert "1 MiB" in shown


def test_a_process_that_cannot_go_on_is_an_error_with_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "backends", lambda: ["smoke signals"])
    with pytest.raises(PipelineError, match=r"measuring links failed: .*smoke signals"):
        run("--rounds", "1")


def test_rounds_must_be_some() -> None:
    with pytest.raises(UsageError, match="--rounds must be from 1 to 1000"):
        run("--rounds", "0")
