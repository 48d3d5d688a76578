"""The plan as people see it before anything is loaded."""

from rich.console import Console

from headrace.config import EngineConfig
from headrace.deployment.machine import Cluster
from headrace.deployment.plan_table import plan_table
from headrace.deployment.resolve import resolve
from machines import FOUR_CORES, MODEL, unlike_hosts


def lines(cluster: Cluster) -> list[list[str]]:
    """The table's cells, its heading first."""
    config = EngineConfig(model="model.gguf", pipeline_parallel_size=2)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(plan_table(resolve(config, MODEL, cluster)))
    rows = [line for line in capture.get().splitlines() if line[0] in "┃│"]
    return [[cell.strip() for cell in row[1:-1].replace("┃", "│").split("│")] for row in rows]


def test_of_several_hosts_it_tells_each_ranks_host_memory_and_link_to_the_next() -> None:
    heading, first, second = lines(unlike_hosts())
    assert heading == [
        "host", "rank", "layers", "cost", "weights GiB", "cache GiB", "free GiB", "kernels",
        "cores", "threads", "link to next",
    ]  # fmt: skip
    assert first == [
        "ada", "0", "0-10", "34%", "0.125", "0.0645", "8", "avx2", "0,2,4,6", "4",
        "0.2 ms, 1 Gb/s",
    ]  # fmt: skip
    assert second[:4] == ["bob", "1", "11-29", "66%"]
    # Back to the first.
    assert second[-1] == "0.21 ms, 1 Gb/s"


def test_of_one_host_it_tells_ranks_only() -> None:
    heading, first, _ = lines(Cluster(hosts=(FOUR_CORES,)))
    assert heading[:3] == ["rank", "layers", "cost"]
    assert first[:3] == ["0", "0-15", "49%"]
    assert "link to next" not in heading
