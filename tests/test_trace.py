import json
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.cli import app
from headrace.errors import UsageError
from headrace.protocol.messages import Activity, Timeline
from headrace.protocol.ranks import Ranks
from headrace.trace import trace_events, write_trace


def rows(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Each row's activities, in the order of the file."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(event["tid"], []).append(event)
    return found


def test_a_run_can_be_traced_with_a_row_a_stage_that_has_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    arguments = [
        "generate", "--model", "synthetic:2+0.1", "-pp", "2", "--prompt", "w1", "--json",
        "--max-tokens", "12", "--ignore-eos", "--num-microbatches", "2", "--trace", str(file),
    ]  # fmt: skip
    assert typer.main.get_command(app).main(arguments, standalone_mode=False) == 0
    assert len(json.loads(capsys.readouterr().out)["output_token_ids"]) == 12
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["stage 0", "stage 1"]
    steps = {}
    for stage, row in rows(events).items():
        ends = [0.0, *(round(event["ts"] + event["dur"], 3) for event in row)]
        assert all(event["ts"] >= end for event, end in zip(row, ends, strict=False))
        assert all(event["dur"] >= 0 for event in row)
        forwards = {e["args"]["step"] for e in row if e["args"]["what"] == "forward"}
        steps[stage] = forwards
        for event in row:
            if event["cname"] == "grey":
                assert event["name"].startswith("wait for ")
    assert steps[0] == steps[1]
    assert len(steps[0]) >= 12
    assert max(steps[0]) + 1 == len(steps[0])
    assert {"wait for feedback of 0", "forward 0 [a]"} <= {e["name"] for e in rows(events)[0]}
    assert {"sample 0 [a]", "send 0 [a]"} <= {e["name"] for e in rows(events)[1]}


def activity(step: int, microbatch: int, began: float = 0.0) -> Activity:
    return Activity("forward", step, microbatch, step, began, began + 1)


def test_work_has_its_microbatchs_colour_and_letter_and_waits_are_grey() -> None:
    work = [activity(n, n % 4) for n in range(8)]
    wait = Activity("activation_wait", 3, 2, 3, 0.0, 1.0)
    (row,) = rows(trace_events([Timeline(5, 1.0, [*work, wait])], Ranks(6))).values()
    colours = [event["cname"] for event in row]
    assert len(set(colours[:4])) == 4
    assert colours[:4] == colours[4:8]
    assert "grey" not in colours[:8]
    assert [event["name"] for event in row[3:5]] == ["forward 3 [d]", "forward 4 [a]"]
    assert (row[8]["name"], row[8]["cname"]) == ("wait for activations of 3", "grey")
    assert row[8]["args"] == {"step": 3, "microbatch": 2, "what": "activation_wait", "of": 3}


def test_letters_go_on_after_z() -> None:
    shown = Timeline(0, 1.0, [activity(0, n) for n in (25, 26, 51, 52)])
    names = [event["name"].split()[-1] for event in rows(trace_events([shown], Ranks(1)))[0]]
    assert names == ["[z]", "[aa]", "[az]", "[ba]"]


def test_moments_are_microseconds_since_the_first_and_what_goes_on_lasts_until_now() -> None:
    first = Timeline(0, 12.5, [Activity("forward", 0, 0, 0, 10.0, 11.0)])
    second = Timeline(1, 12.5, [Activity("activation_wait", 0, 0, 0, 10.000002, None)])
    found = rows(trace_events([first, second], Ranks(2)))
    assert [(e["ts"], e["dur"]) for e in found[0] + found[1]] == [
        (0.0, 1_000_000.0),
        (2.0, 2_499_998.0),
    ]


def test_no_activities_are_a_trace_too(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", [Timeline(0, 1.0, [])], "nothing ran", Ranks(1))
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]


def test_a_file_that_cannot_be_written_is_refused_before_anything_of_the_model_is_looked_at(
    tmp_path: Path,
) -> None:
    for bad in (tmp_path, tmp_path / "nowhere" / "t.json"):
        arguments = ["generate", "--model", "/nowhere", "--prompt", "x", "--trace", str(bad)]
        with pytest.raises(UsageError, match=r"--trace .* cannot be written: \w+"):
            typer.main.get_command(app).main(arguments, standalone_mode=False)
