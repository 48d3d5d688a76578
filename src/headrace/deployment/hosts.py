"""Several hosts meet: who takes part, what each has, and that they have the same model."""

import logging
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.locate import locate_model
from headrace.config import DEFAULT_PORT, EngineConfig
from headrace.deployment.agreement import check_agreement
from headrace.deployment.host_facts import read_host_facts
from headrace.deployment.lines import measure_lines
from headrace.deployment.machine import Cluster
from headrace.errors import ModelError, StartError, UsageError
from headrace.host.cluster_key import Secret, read_cluster_key
from headrace.host.network import Interface, interface_named, interface_towards, interfaces
from headrace.pipeline.agent import Agent
from headrace.pipeline.curve import open_door
from headrace.pipeline.hosts import Hosts
from headrace.pipeline.weights_sender import WeightsSender
from headrace.protocol.cluster import Facts, Layout
from headrace.protocol.hosts import HostFacts
from headrace.protocol.messages import HostLinks
from headrace.signals import put_off

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HostMeeting:
    """The hosts that have met. cluster: what they were then, this one first. run: the secret of
    this run, known to its ranks alone."""

    hosts: Hosts
    cluster: Cluster
    run: Secret

    def links_of(self, rank: int, nodes: tuple[int, ...], encrypted: bool) -> HostLinks:
        """How the rank meets those on other hosts. nodes: by rank."""
        node = nodes[rank]
        # Another host may have come again in another place.
        host = self.hosts.facts(node).host if node else self.cluster.hosts[0]
        return HostLinks(list(nodes), host.address, self.run.value, encrypted)


def meet_hosts(config: EngineConfig, check: Callable[[], None]) -> HostMeeting:
    """On the engine's host: let the others in, until all are there.

    check: called once a second or more often, may raise. Raises UsageError for a key that is none,
    StartError that says who is missing or does not fit, and what a host reports.
    """
    if config.node_rank:
        raise UsageError(
            f"an engine runs on host 0, not --node-rank {config.node_rank}: there, run headrace "
            "join, or headrace serve with the same flags"
        )
    secret = _secret(config)
    here = _interface_of_master(config)
    port = config.master_port or DEFAULT_PORT
    door = open_door(here.address, port, "for other hosts to join; choose another --master-port")
    _log.info(
        "waiting at %s:%d (%s) for %d other hosts%s",
        *(here.address, port, here, config.nnodes - 1, _others(here)),
    )
    address = door.address.removeprefix("tcp://")
    with ExitStack() as undo:
        with put_off():
            hosts = Hosts(
                door,
                secret,
                layout_of(config, config.nnodes),
                config.model,
                how_to_join=f"start `headrace join {address} --cluster-key-file ...` there, with a "
                "copy of this host's key, and let it through the firewall",
            )
            undo.callback(hosts.close)
        meeting = meet(hosts, config, secret, here, check)
        undo.pop_all()
    return meeting


def meet(
    hosts: Hosts,
    config: EngineConfig,
    secret: Secret,
    here: Interface,
    check: Callable[[], None],
    *,
    computes: bool = True,
) -> HostMeeting:
    """Wait until all hosts are there, and see whether they fit together.

    here: where they join. check: as above. computes: whether the engine's host is to have stages,
    too. Raises StartError and what hosts report; the hosts are closed then.
    """
    try:
        files = locate_model(config.model)
        own = read_host_facts(here.address, files, check, computes=computes)
        facts = hosts.wait_joined(config.join_timeout, check)
        everybody = (own, *(fact.host for fact in facts))
        _check(hosts, everybody, config.send_weights)
        assert own.weights is not None
        weights, sends = own.weights.total, config.send_weights
        sender = WeightsSender(files, weights, secret, here.address) if sends else None
        hosts.agree(weights, sender)
        run = secret.derive(f"run {secrets.token_hex(16)}")
        links = measure_lines(
            hosts, everybody, here, run.derive("lines"), not config.insecure_links, check
        )
    except BaseException:
        hosts.close()
        raise
    return HostMeeting(hosts=hosts, cluster=Cluster(hosts=everybody, links=links), run=run)


def _check(hosts: Hosts, everybody: tuple[HostFacts, ...], sends: bool) -> None:
    """Raises StartError, and tells the hosts, unless all can work together. sends: whether those
    that lack the model are sent what they need."""
    try:
        check_agreement(everybody)
        first, *others = everybody
        for host in others:
            if host.weights is None and not sends:
                raise StartError(
                    f"host {host.label} does not have the model's files, and {first.label} was "
                    "told not to send them (--no-send-weights): copy them, or leave the flag out"
                )
            if host.weights is None:
                _log.info("host %s lacks the model: what its stages need is sent", host.label)
    except StartError as error:
        hosts.refuse(str(error))
        raise


def agent_of(config: EngineConfig, say: Callable[[str], None]) -> Agent:
    """What takes part on a host beside the engine's, as its flags say.

    say: told what happens. Raises UsageError or StartError.
    """
    return joining_agent(
        config.master_addr,
        config.master_port or DEFAULT_PORT,
        secret=_secret(config),
        interface=config.interface,
        node_rank=config.node_rank,
        layout=layout_of(config, config.nnodes),
        # It may be what the engine's host calls the model.
        model=config.model if _lies_here(config.model) else None,
        receives=config.send_weights,
        join_timeout_s=config.join_timeout,
        say=say,
    )


def joining_agent(
    host: str,
    port: int,
    *,
    secret: Secret,
    interface: str | None,
    node_rank: int | None,
    layout: Layout | None,
    model: str | None,
    receives: bool,
    join_timeout_s: float,
    say: Callable[[str], None],
) -> Agent:
    """What takes part beside the engine at host and port. interface: None for that which leads
    there. model: None for what the engine's host says, as it is found here. receives: whether it
    may be sent what it needs of a model that is not. Raises UsageError for an interface that is
    none, StartError if there is no way."""
    here = interface_towards(host, port) if interface is None else interface_named(interface)
    if others := _others(here):
        say(f"takes {here}{others}")

    def facts(of_master: str) -> tuple[Facts, str | None]:
        name = model or of_master
        if model is not None or _lies_here(name):
            files = locate_model(name)
            return Facts(read_host_facts(here.address, files)), str(files.path.resolve())
        if not receives:
            raise ModelError(
                f"model {name!r}, as the engine's host calls it, is not here, and this host was "
                "told to receive none (--no-send-weights): say where it lies with --model"
            )
        say(f"does not have model {name!r}: receives what its stages need of it")
        return Facts(read_host_facts(here.address, None)), None

    return Agent(
        master=(_resolved(host), port),
        address=here.address,
        interface=str(here),
        secret=secret,
        name=socket.gethostname(),
        node_rank=node_rank,
        layout=layout,
        join_timeout_s=join_timeout_s,
        facts=facts,
        say=say,
    )


def _lies_here(model: str) -> bool:
    """Whether there is anything of that name, be it whole or not."""
    try:
        locate_model(model)
    except ModelError:
        try:
            return Path(model).expanduser().exists()
        except (OSError, RuntimeError, ValueError):
            return False
    return True


def _secret(config: EngineConfig) -> Secret:
    assert config.cluster_key_file is not None
    return read_cluster_key(Path(config.cluster_key_file))


def layout_of(config: EngineConfig, nnodes: int) -> Layout:
    """What hosts must have been told alike, of so many."""
    return Layout(
        nnodes,
        config.pipeline_parallel_size,
        config.tensor_parallel_size,
        config.layer_partition,
    )


def _interface_of_master(config: EngineConfig) -> Interface:
    if config.interface is not None:
        return interface_named(config.interface)
    address = _resolved(config.master_addr)
    for interface in interfaces():
        if interface.address == address:
            return interface
    return Interface("of that address", address)


def _resolved(host: str) -> str:
    """The IPv4 address of that name. Raises StartError if it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise StartError(
            f"--master-addr {host}: no host of that name is known here ({error.strerror or error})"
        ) from error


def _others(taken: Interface) -> str:
    """In words, where the host has several."""
    others = [each for each in interfaces() if each.address != taken.address and each.name != "lo"]
    if not others:
        return ""
    names = ", ".join(f"{each.name} {each.address}" for each in others)
    return f"; this host has {names} too (--interface)"
