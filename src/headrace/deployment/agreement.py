"""Whether hosts can serve one model together: the same Headrace, the same weights."""

from collections.abc import Sequence

from headrace.checkpoint.digest import first_difference
from headrace.errors import StartError
from headrace.protocol.hosts import HostFacts


def check_agreement(hosts: Sequence[HostFacts]) -> None:
    """Raises StartError for the first host that cannot work with the first, naming both sides.

    Hosts without the model's files are no reason.
    """
    first, *others = hosts
    for other in others:
        if other.version != first.version:
            raise StartError(
                f"host {other.label} has Headrace {other.version}, {first.label} {first.version}: "
                "install the same on both"
            )
        if first.weights is None or other.weights is None:
            continue
        if other.weights.total != first.weights.total:
            raise StartError(
                f"hosts {first.label} and {other.label} have different weights "
                f"({first.weights.total[:8]} and {other.weights.total[:8]})"
                f"{_where(first, other)}: copy the model from one to the other"
            )


def _where(first: HostFacts, other: HostFacts) -> str:
    assert first.weights is not None
    assert other.weights is not None
    name = first_difference(first.weights, other.weights)
    if name is None:
        return ""
    for host, rival in ((first, other), (other, first)):
        assert host.weights is not None
        if name not in {tensor.name for tensor in host.weights.tensors}:
            return f": {rival.label} has a tensor {name[:100]}, {host.label} has none"
    return f": tensor {name[:100]} differs"
