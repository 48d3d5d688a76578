"""Hosts that Ray has: an actor on each, which takes part as `headrace join` does elsewhere.

The engine's process connects to the Ray cluster that its host is a node of. A placement group has
a bundle of cores for each host, every one on another node, and an actor for each bundle. From there
on all is as among hosts that people have join: the actor connects to the engine, and runs ranks.
The engine's own host has no ranks beside such an actor's, so it may be a node without cores.

An actor that has ended is created anew in its bundle, for which Ray finds another node if the one
that had it is gone.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import headrace
from headrace.checkpoint.locate import locate_model
from headrace.config import EngineConfig
from headrace.deployment.hosts import HostMeeting, joining_agent, layout_of, meet
from headrace.errors import HeadraceError, StartError, UsageError
from headrace.host.cluster_key import SECRET_BYTES, Secret
from headrace.host.network import interface_named
from headrace.pipeline.curve import open_door
from headrace.pipeline.hosts import Hosts

_log = logging.getLogger(__name__)

# Seconds between two looks at whether actors live, and before one is created anew.
_LOOK_S = 0.2
_AGAIN_S = 1.0
# Seconds for the cluster's head to be reached.
_REACH_S = 10.0


def meet_hosts_on_ray(config: EngineConfig, check: Callable[[], None]) -> HostMeeting:
    """Have Ray find the hosts, and let them in, until all are there.

    check: called once a second or more often, may raise. Raises UsageError where Ray cannot be
    reached this way, StartError that says what Ray lacks, who is missing or does not fit, and what
    a host reports.
    """
    actors = RayActors(config, check)
    try:
        here = interface_named(ray.util.get_node_ip_address())
        purpose = "for Ray's actors to join; choose another --master-port"
        door = open_door(here.address, config.master_port, purpose)
        secret = Secret(secrets.token_bytes(SECRET_BYTES))
        hosts = Hosts(
            door,
            secret,
            layout_of(config, actors.count + 1),
            _everywhere(config.model),
            how_to_join="its actor runs (Ray's logs tell), so let it through the firewall",
            on_closed=actors.end,
        )
    except BaseException:
        actors.end()
        raise
    actors.start(door.address, secret)

    def check_actors() -> None:
        check()
        actors.check()

    meeting = meet(hosts, config, secret, here, check_actors, computes=False)
    actors.starting = False
    return meeting


class AgentActor:
    """What an actor runs."""

    def run(
        self,
        host: str,
        port: int,
        secret: bytes,
        receives: bool,
        join_timeout_s: float,
        node_rank: int,
    ) -> str | None:
        """Take part until the engine ends in order. Why this host cannot, if it cannot.

        As joining_agent() has it.
        """
        address = ray.util.get_node_ip_address()
        try:
            joining_agent(
                host,
                port,
                secret=Secret(secret),
                interface=address,
                node_rank=node_rank,
                layout=None,
                model=None,
                receives=receives,
                join_timeout_s=join_timeout_s,
                say=_say,
            ).run()
        except HeadraceError as error:
            return str(error)
        return None


class RayActors:
    """An actor a host, from node rank 1 on, in a placement group. Always end() it.

    starting: whether one that cannot take part is a reason for check() to raise.
    """

    def __init__(self, config: EngineConfig, check: Callable[[], None]) -> None:
        """Returns once there is a place for all of them.

        check: called once a second or more often, may raise. Raises UsageError where Ray cannot be
        reached this way, and StartError if there is no cluster, or it has not what is needed.
        """
        ranks = config.ranks
        self.count = config.nnodes if config.nnodes > 1 else ranks.num_stages
        # Where stages or shards do not divide evenly, some hosts have one less.
        stages, hosts = -(-ranks.num_stages // self.count), max(1, self.count // ranks.num_stages)
        self._cpus = stages * -(-ranks.num_shards // hosts) * (config.cpu_threads or 1)
        self._receives, self._join_timeout_s = config.send_weights, config.join_timeout
        self.starting = True
        self._tasks: list[Any] = []
        self._failure: str | None = None
        self._ending = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="ray-actors", daemon=True)
        self._connected = _connect()
        try:
            self._group = self._set_aside(check)
        except BaseException:
            self._disconnect()
            raise

    def start(self, address: str, secret: Secret) -> None:
        """Have all of them join the engine's host, which listens at tcp://ADDRESS:PORT."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        timeout_s = self._join_timeout_s
        self._arguments = (host, int(port), secret.value, self._receives, timeout_s)
        self._tasks = [self._create(number) for number in range(self.count)]
        self._watching.start()

    def check(self) -> None:
        """Raises StartError if one said that its host cannot take part."""
        if self._failure is not None:
            raise StartError(self._failure)

    def end(self) -> None:
        """End all of them and give their places back; may be called again."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._watching.is_alive():
            self._watching.join()
        # Else Python exits, and Ray has seen to it already.
        if ray.is_initialized():
            remove_placement_group(self._group)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connected and ray.is_initialized():
            ray.shutdown()

    def _set_aside(self, check: Callable[[], None]) -> PlacementGroup:
        """The placement group, once Ray has found its places."""
        bundles: list[dict[str, float]] = [{"CPU": self._cpus}] * self.count
        group = placement_group(bundles, strategy="STRICT_SPREAD", name="headrace")
        try:
            waited_s = 0
            while not group.wait(timeout_seconds=1):
                check()
                if not waited_s:
                    _log.info("waiting for Ray to find %s: %s", self._wanted(), _what_ray_has())
                waited_s += 1
                if waited_s > self._join_timeout_s:
                    raise StartError(
                        f"Ray did not find {self._wanted()} within {self._join_timeout_s:g} s: "
                        f"{_what_ray_has()}"
                    )
        except BaseException:
            remove_placement_group(group)
            raise
        return group

    def _wanted(self) -> str:
        nodes, cpus = _count(self.count, "node"), _count(self._cpus, "free CPU")
        return f"{nodes} with {cpus} each (--nnodes, --pipeline-parallel-size, --cpu-threads)"

    def _create(self, number: int) -> Any:
        """An actor in the bundle of this number; what it returns once it ends."""
        place = PlacementGroupSchedulingStrategy(self._group, number)
        actor = ray.remote(AgentActor).options(num_cpus=self._cpus, scheduling_strategy=place)
        return actor.remote().run.remote(*self._arguments, number + 1)

    def _watch(self) -> None:
        while not self._ending.wait(_LOOK_S):
            for number, task in enumerate(self._tasks):
                ended, _ = ray.wait([task], timeout=0)
                if not ended or (why := _why_it_ended(task)) is None:
                    continue
                reason, says_so = why
                reason = f"host {number + 1} ({self._node_of(number)}): {reason}"
                if says_so and self.starting:
                    self._failure = reason
                    return
                _log.warning("%s; its actor is created anew", reason)
                self._ending.wait(_AGAIN_S)
                self._tasks[number] = self._create(number)

    def _node_of(self, number: int) -> str:
        """Where its bundle is, or was, for people."""
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return next(
            (
                f"Ray's node {node['NodeManagerAddress']}"
                for node in ray.nodes()
                if node["NodeID"] == nodes.get(number)
            ),
            "no node of Ray's",
        )


def _connect() -> bool:
    """Whether there was no connection to Ray before."""
    if ray.is_initialized():
        return False
    _check_address(os.environ.get("RAY_ADDRESS", ""))
    with _own_signals():
        try:
            # What actors print is in Ray's logs: here it would be among what commands print.
            ray.init(address="auto", logging_level=logging.WARNING, log_to_driver=False)
        except ConnectionError as error:
            raise StartError(
                "--distributed-executor-backend ray: no Ray cluster runs here: `ray start --head` "
                "begins one, `ray start --address=HOST:6379` on other hosts joins it "
                f"({_first_line(error)})"
            ) from error
        except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise StartError(f"cannot connect to the Ray cluster: {_first_line(error)}") from error
    return True


def _check_address(address: str) -> None:
    """Raises UsageError for one that an engine cannot use, StartError where nobody listens: Ray
    itself would try for minutes."""
    if address.startswith("ray://"):
        raise UsageError(
            "--distributed-executor-backend ray: RAY_ADDRESS is a Ray client's, and the engine has "
            "to run on a node of the cluster: start it there"
        )
    host, _, port = address.rpartition(":")
    # Ray takes those for another of this host's addresses.
    if not host or not port.isdigit() or host in ("localhost", "127.0.0.1"):
        return
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise StartError(
            f"no Ray cluster can be reached at RAY_ADDRESS {address} ({error})"
        ) from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray's handler of SIGTERM, which it puts in the place of another, is taken out again."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _why_it_ended(task: Any) -> tuple[str, bool] | None:
    """Why an actor has ended before the engine, and whether it said so: else it, or its node, was
    ended. None if it ended with the engine."""
    try:
        reason: str | None = ray.get(task)
        return None if reason is None else (reason, True)
    except ray.exceptions.RayError as error:
        raised = isinstance(error, ray.exceptions.RayTaskError) or (
            isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed
        )
        if not raised:
            return _first_line(error), False
        last = str(error).strip().splitlines()[-1]
        return f"{last} (it needs Headrace {headrace.__version__}, as here)", True


def _everywhere(model: str) -> str:
    """The model's name for processes that run in other directories."""
    files = locate_model(model)
    return str(files.path.resolve()) if Path(model).expanduser() == files.path else model


def _what_ray_has() -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = ", ".join(
        f"{node['NodeManagerAddress']} with {node['Resources'].get('CPU', 0):g}" for node in nodes
    )
    free = ray.available_resources().get("CPU", 0)
    return f"it has {_count(len(nodes), 'node')} (CPUs: {each}), {free:g} CPUs are free"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _say(line: str) -> None:
    print(line, flush=True)
