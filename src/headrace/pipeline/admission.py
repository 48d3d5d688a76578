"""Whether a host that joins, or comes again, may take part: if not, why."""

import headrace
from headrace.protocol.cluster import Join, Layout
from headrace.protocol.hosts import HostFacts


def why_not(join: Join, layout: Layout) -> str | None:
    """Of a host's first word. layout: what the engine's host was told."""
    if join.version != headrace.__version__:
        return (
            f"host {join.name} has Headrace {join.version}, the engine's host "
            f"{headrace.__version__}: install the same on both"
        )
    if join.node_rank is not None and not 0 < join.node_rank < layout.nnodes:
        return (
            f"host {join.name} was given --node-rank {join.node_rank}, and the engine's host "
            f"--nnodes {layout.nnodes}: there are 1 to {layout.nnodes - 1}"
        )
    if join.layout is None:
        return None
    for name in Layout.__struct_fields__:
        theirs, ours = getattr(join.layout, name), getattr(layout, name)
        if theirs != ours:
            flag = f"--{name.replace('_', '-')}"
            return f"host {join.name} has {flag} {theirs}, the engine's host {flag} {ours}"
    return None


def why_not_again(host: HostFacts, weights: str, *, sends: bool) -> str | None:
    """Of a host that was there before. weights: the total of all hosts' digest. sends: whether it
    can be sent what it lacks."""
    if host.weights is None:
        lacks = f"host {host.name} came again without the model's files (--no-send-weights)"
        return None if sends else lacks
    if host.weights.total != weights:
        return f"host {host.name} came again with another model than the others have"
    return None
