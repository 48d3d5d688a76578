"""Where everything goes, as a table for people: printed before anything is loaded."""

from typing import TextIO

from rich.console import Console
from rich.table import Table

from headrace.deployment.partition import layer_costs
from headrace.deployment.resolve import Deployment
from headrace.host.cpus import cores_in_words

# Columns of a file or a pipe, which has no width of its own: more than the table ever takes.
_WIDE = 200


def print_plan(deployment: Deployment, file: TextIO) -> None:
    """The table, to a terminal or to what is no terminal."""
    console = Console(file=file, highlight=False, width=None if file.isatty() else _WIDE)
    console.print(plan_table(deployment))


def plan_table(deployment: Deployment) -> Table:
    """A row for each rank.

    cost: the stage's part of a step's arithmetic. weights, cache: GiB, foretold from the model's
    sizes; the cache is that of one longest sequence, the least there must be, or what was asked
    for. On several hosts also what is free there, the path that the kernels take, and the link to
    the next stage's host, as far as it was measured: one way, from the last back to the first.
    """
    ranks, need = deployment.ranks, deployment.need
    several, shards = len(deployment.cluster.hosts) > 1, ranks.num_shards > 1
    headings = ["host"] * several + ["rank"] + ["stage", "shard"] * shards
    headings += ["layers", "cost", "weights GiB", "cache GiB"] + ["free GiB", "kernels"] * several
    headings += ["cores", "threads"] + ["link to next"] * several
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right")
    parts = _cost_parts(deployment)
    for rank, cpus in enumerate(deployment.cpus):
        stage = ranks.stage_of(rank)
        share = deployment.shares[stage]
        host = deployment.cluster.hosts[deployment.hosts[rank]]
        row = [host.label] * several + [str(rank)]
        row += [str(stage), str(ranks.shard_of(rank))] * shards
        row += [f"{share.first_layer}-{share.end_layer - 1}", f"{parts[stage]:.0%}"]
        row += [_gib(size // ranks.num_shards) for size in (need.weights(share), need.cache(share))]
        row += [_gib(host.free_memory), host.speed.kernels if host.speed else ""] * several
        row += [cores_in_words(cpus.cpus) or "not pinned", str(cpus.threads)]
        row += [_link(deployment, rank)] * several
        table.add_row(*row)
    return table


def _cost_parts(deployment: Deployment) -> list[float]:
    """By stage."""
    costs = layer_costs(deployment.model.sizes)
    stages = [
        sum(costs.layers[share.first_layer : share.end_layer])
        + costs.embedding * share.embeds
        + costs.head * share.samples
        for share in deployment.shares
    ]
    return [stage / sum(stages) for stage in stages]


def _link(deployment: Deployment, rank: int) -> str:
    here = deployment.hosts[rank]
    there = deployment.hosts[(rank + deployment.ranks.num_shards) % len(deployment.hosts)]
    if here == there:
        return "same host"
    link = deployment.cluster.links.get((here, there))
    if link is None:
        return "not measured"
    return f"{link.latency_s * 1e3:.3g} ms, {link.bytes_per_s * 8 / 1e9:.3g} Gb/s"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
