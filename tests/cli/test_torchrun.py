"""Under torchrun a command learns from its environment which host it is on."""

from typing import Any

import pytest

from headrace.cli.torchrun import take_from_torchrun
from headrace.config import EngineConfig
from headrace.errors import UsageError
from headrace.setting import declared_settings

DEFAULTS = {name: each.default for name, each in declared_settings(EngineConfig).items()}
TORCHRUN = {
    "GROUP_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def test_its_variables_are_taken_and_a_line_says_so() -> None:
    engine: dict[str, Any] = dict(DEFAULTS)
    line = take_from_torchrun(engine, DEFAULTS, TORCHRUN)
    assert line is not None
    assert "host 1 of 2" in line
    assert "10.0.0.1" in line
    # MASTER_PORT is torchrun's own store's.
    assert (engine["nnodes"], engine["node_rank"]) == (2, 1)
    assert (engine["master_addr"], engine["master_port"]) == ("10.0.0.1", 29401)


@pytest.mark.parametrize("given", [{"nnodes": 3}, {"node_rank": 1}, {"master_addr": "10.0.0.9"}])
def test_flags_go_first(given: dict[str, Any]) -> None:
    engine: dict[str, Any] = {**DEFAULTS, **given}
    assert take_from_torchrun(engine, DEFAULTS, TORCHRUN) is None
    assert engine == {**DEFAULTS, **given}


def test_a_port_that_is_given_is_kept() -> None:
    engine: dict[str, Any] = {**DEFAULTS, "master_port": 29700}
    line = take_from_torchrun(engine, DEFAULTS, TORCHRUN)
    assert (engine["node_rank"], engine["master_port"]) == (1, 29700)
    assert line is not None
    assert "--master-port" not in line


@pytest.mark.parametrize("missing", ["GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"])
def test_without_all_of_them_nothing_is_taken(missing: str) -> None:
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    assert take_from_torchrun(dict(DEFAULTS), DEFAULTS, environment) is None


def test_several_processes_a_host_are_refused() -> None:
    with pytest.raises(UsageError, match="--nproc-per-node 1"):
        take_from_torchrun(dict(DEFAULTS), DEFAULTS, {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"})


def test_ray_is_refused_since_it_would_start_on_each_host() -> None:
    engine: dict[str, Any] = {**DEFAULTS, "distributed_executor_backend": "ray"}
    with pytest.raises(UsageError, match="ray does not go with torchrun"):
        take_from_torchrun(engine, DEFAULTS, TORCHRUN)


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="no numbers"):
        take_from_torchrun(dict(DEFAULTS), DEFAULTS, {**TORCHRUN, "GROUP_RANK": "one"})
