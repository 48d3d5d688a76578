"""The same model as before on some of the hosts: a plan around those that stay away."""

from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from headrace.deployment.machine import Cluster
from headrace.deployment.resolve import Deployment, resolve
from headrace.errors import StartError


def plan_around(deployment: Deployment, room: Mapping[int, int]) -> Deployment:
    """Place the stages, as many as before, on these hosts alone.

    room: by the numbers of the hosts that are left, bytes of memory for their stages. What requests
    were told, or their tokens depend on, stays as it was: types and lengths. Raises StartError that
    says what each host lacks if they have no room for all layers, or that none is left, UsageError
    for settings that do not fit the hosts that are left.
    """
    if not room:
        raise StartError("no host that could run stages is left")
    cluster, numbers = deployment.cluster, sorted(room)
    hosts = list(cluster.hosts)
    for number in numbers:
        hosts[number] = structs.replace(hosts[number], free_memory=room[number])
    among = {number: at for at, number in enumerate(numbers)}
    left = Cluster(
        hosts=tuple(hosts[number] for number in numbers),
        links={
            (among[sender], among[receiver]): figures
            for (sender, receiver), figures in cluster.links.items()
            if sender in among and receiver in among
        },
    )
    # What the hosts would choose by themselves may be another type without the one that is away.
    config = replace(deployment.config, dtype=deployment.dtype, weights=deployment.weights)
    found = resolve(config, deployment.model, left)
    return replace(
        found,
        config=deployment.config,
        cluster=replace(cluster, hosts=tuple(hosts)),
        hosts=tuple(numbers[host] for host in found.hosts),
    )
