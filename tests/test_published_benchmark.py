"""The published benchmark's script, with next to no load: both kinds of feedback are measured."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "published_benchmark.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_it_measures_both_kinds_of_feedback_in_turn(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PROMPTS", 4)
    monkeypatch.setattr(script, "AT_ONCE", 2)
    monkeypatch.setattr(script, "OUTPUT_LEN", 4)
    script.write_checkpoint(tmp_path)
    found = script.measure(tmp_path, (2, 2), 0.0, 2)
    assert {feedback: len(rates) for feedback, rates in found.items()} == {
        "blocking": 2,
        "deferred": 2,
    }
    assert all(rate > 0 for rates in found.values() for rate in rates)


def test_it_reports_medians_ratios_and_their_spread(script: ModuleType) -> None:
    found = {"blocking": [100.0, 200.0, 100.0], "deferred": [150.0, 220.0, 120.0]}
    assert script.report((2, 1), 20.0, found) == (
        "| 2 | 1 | 20 ms | 100.0 (100.0 to 200.0) | 150.0 (120.0 to 220.0) | "
        "1.200 (1.100 to 1.500) |"
    )
