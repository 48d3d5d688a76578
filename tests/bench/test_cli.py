import json

import pytest
import typer

from headrace.cli.bench import app
from headrace.errors import UsageError


def run(*arguments: str) -> None:
    typer.main.get_command(app).main(["scheduler", *arguments], standalone_mode=False)


def test_running_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    run("--running", "2", "--context-len", "16", "--json")
    assert json.loads(capsys.readouterr().out)["running"] == 2


def test_a_workload_prints_one_json_object_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workload", "mixed", "--prefill-policy", "even", "--requests", "8", "-pp", "2"]
    run(*flags, "--json")
    answer = json.loads(capsys.readouterr().out)
    assert (answer["pp"], answer["requests"]) == (2, 8)
    assert [policy["prefill_policy"] for policy in answer["policies"]] == ["even"]
    run(*flags)
    assert "bubble" in capsys.readouterr().out


@pytest.mark.parametrize("seed", ["0", "3"])
@pytest.mark.parametrize("stages", ["1", "2"])
def test_the_smallest_mixed_load_has_figures(
    capsys: pytest.CaptureFixture[str], stages: str, seed: str
) -> None:
    flags = ["--workload", "mixed", "--requests", "2", "-pp", stages, "--seed", seed]
    run(*flags, "--json")
    answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert len(answer["policies"]) == 5
    run(*flags)
    assert "bubble" in capsys.readouterr().out


def test_the_long_load_prints_one_json_object_or_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--workload", "long", "--requests", "1", "--max-model-len", "64", "-pp", "1"]
    run(*flags, "--json")
    answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [one["order"] for one in answer["orders"]] == ["first come", "shortest first"]
    run(*flags)
    assert "A prompt of 62 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--running N or --workload mixed"),
        (["--running", "1", "--workload", "mixed"], "either"),
        (["--running", "0"], "--running must be from 1"),
        (["--workload", "odd"], "--workload must be one of mixed, long, not 'odd'"),
        (
            ["--workload", "mixed", "--prefill-policy", "x"],
            "--prefill-policy must be one of budget, even or None, not 'x'",
        ),
        (["--workload", "mixed", "--load", "0"], "--load must be above 0"),
        (["--workload", "mixed", "--requests", "1"], "--requests must be from 2"),
        (["--workload", "mixed", "--requests", "0"], "--requests must be from 2"),
        (["--workload", "long", "--requests", "0"], "--requests must be from 1"),
        (["--workload", "long", "--max-model-len", "63"], "--max-model-len must be from 64"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(*arguments)
