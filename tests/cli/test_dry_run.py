"""`headrace serve --dry-run` tells all that is decided and starts nothing."""

import json
from pathlib import Path

from command import run

SERVE = ["serve", "synthetic:1+0", "--max-model-len", "64", "-pp", "2", "--cpu-threads", "3"]


def test_a_dry_run_prints_every_rank_and_the_sizes_as_json() -> None:
    finished = run(*SERVE, "--cpu-bind", "none", "--dry-run", "--json")
    assert finished.code == 0
    decided = json.loads(finished.out)
    assert [(rank["rank"], rank["stage"], rank["shard"]) for rank in decided["ranks"]] == [
        (0, 0, 0),
        (1, 1, 0),
    ]
    assert [(rank["first_layer"], rank["end_layer"]) for rank in decided["ranks"]] == [
        (0, 1),
        (1, 2),
    ]
    assert [(rank["cores"], rank["threads"]) for rank in decided["ranks"]] == [([], 3)] * 2
    assert decided["max_model_len"] == 64
    assert (decided["link_backend"], decided["rendezvous"]) == ("local", None)


def test_a_dry_run_tells_where_stages_meet_if_they_listen_on_the_network() -> None:
    finished = run(*SERVE, "--link-backend", "gloo", "--dry-run", "--json")
    assert json.loads(finished.out)["rendezvous"] == {"address": "127.0.0.1", "port": None}


def test_a_dry_run_without_json_is_for_people() -> None:
    finished = run(*SERVE, "--dry-run")
    assert finished.code == 0
    assert "max_model_len: 64" in finished.out
    assert "listens" not in finished.out


def test_json_without_a_dry_run_is_refused() -> None:
    finished = run(*SERVE, "--json")
    assert finished.code == 2
    assert "--json needs --dry-run" in finished.err


def test_a_dry_run_refuses_what_a_start_would() -> None:
    finished = run(*SERVE, "--layer-partition", "1,2", "--dry-run")
    assert finished.code == 2
    assert "--layer-partition 1,2 adds up to 3, the model has 2 layers" in finished.err


def test_a_dry_run_of_several_hosts_says_what_it_cannot_know(tmp_path: Path) -> None:
    several = ("--nnodes", "2", "--cluster-key-file", str(tmp_path / "key"))
    finished = run(*SERVE, *several, "--dry-run", "--json")
    assert finished.code == 0
    assert json.loads(finished.out)["ranks"]
    assert "what the other 1 of --nnodes 2 have" in finished.err
    assert "is known once they have joined" in finished.err


def test_a_dry_run_on_ray_needs_no_cluster_and_says_what_it_cannot_know() -> None:
    finished = run(*SERVE, "--distributed-executor-backend", "ray", "--dry-run", "--json")
    assert finished.code == 0
    assert json.loads(finished.out)["ranks"]
    assert "which nodes Ray gives" in finished.err
