"""Ray: a real cluster of two nodes, here both on loopback."""

import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from command import Mark, wait_until
from headrace import LLM, SamplingParams
from headrace.errors import StartError, UsageError
from serving.running_server import running_server
from tiny_checkpoints import write_tiny_gguf

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'headrace[ray]'"
)
PROMPTS: list[Any] = [{"prompt_token_ids": [n + 1, *range(n, 2 * n + 3)]} for n in range(6)]
# Of loopback's addresses, the head's; the nodes have those after it.
FIRST = 2
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def alone(model: str) -> list[list[int]]:
    """The tokens of one host and one stage."""
    with LLM(model, dtype="float32") as llm:
        return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, PARAMS)]


def completed(url: str, prompt: list[int]) -> list[int]:
    """The tokens of a server's answer."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": PARAMS.max_tokens}
    body |= {"ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).json()
    found = answer["choices"][0]["logprobs"]["tokens"]
    return [int(token.removeprefix("token_id:")) for token in found]


def on_ray(model: str, **settings: Any) -> LLM:
    settings = {"pipeline_parallel_size": 2, **settings}
    return LLM(model, dtype="float32", distributed_executor_backend="ray", **settings)


class RayCluster:
    """A head without cores, as is common; nodes are added. mark: of its processes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.mark, self.nodes = Mark(), list[Any]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(*self.mark.variable)
            head = {
                "num_cpus": 0,
                "include_dashboard": False,
                "node_ip_address": f"127.0.0.{FIRST}",
            }
            self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self.cluster.address

    def add_node(self, number: int, **environment: str) -> Any:
        """One with two cores. environment: of what runs there."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(*self.mark.variable)
            for name, value in environment.items():
                patch.setenv(name, value)
            address = f"127.0.0.{FIRST + number}"
            return self.cluster.add_node(num_cpus=2, node_ip_address=address)

    def actors(self) -> list[psutil.Process]:
        """The processes of those that live."""
        return self._running("ray::AgentActor")

    def stages(self) -> list[psutil.Process]:
        return self._running("headrace.pipeline.stage_process")

    def _running(self, what: str) -> list[psutil.Process]:
        found = []
        for pid in self.mark.processes():
            # It may end at any moment.
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(argument.startswith(what) for argument in process.cmdline()):
                    found.append(process)
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # Its sockets' names have to be short.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    (folder / "ray").mkdir()
    # Ray's nodes put their own in its place.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = RayCluster()
        try:
            cluster.nodes = [cluster.add_node(number) for number in (1, 2)]
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.cluster.shutdown()
            signal.signal(signal.SIGTERM, on_sigterm)
            wait_until(lambda: not cluster.mark.processes())
            shutil.rmtree(folder)


def test_without_ray_the_extra_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headrace.deployment.ray_hosts", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"not installed: pip install 'headrace\[ray\]'"):
        on_ray(model)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"node_rank": 1}, "--node-rank does not go with"),
        ({"master_addr": "10.0.0.1"}, "--master-addr does not go with"),
        ({"interface": "lo"}, "--interface does not go with"),
        ({"cluster_key_file": "key"}, "--cluster-key-file does not go with"),
        ({"link_backend": "gloo"}, "goes with links of Headrace's own"),
        ({"nnodes": 3}, "--nnodes 3 needs as many stages"),
    ],
)
def test_what_ray_says_by_itself_is_not_said_by_flags(
    model: str, setting: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        on_ray(model, **setting)


@needs_ray
def test_a_server_completes_as_one_host_does_and_takes_its_actors_with_it(
    model: str, alone: list[list[int]], cluster: RayCluster
) -> None:
    ray = ("-pp", "2", "--dtype", "float32", "--distributed-executor-backend", "ray")
    with running_server(model, *ray, RAY_ADDRESS=cluster.address) as server:
        assert len(cluster.stages()) == 2
        for prompt, expected in zip(PROMPTS, alone, strict=True):
            assert completed(server.url, prompt["prompt_token_ids"]) == expected
        server.command.process.kill()
        wait_until(lambda: not cluster.actors() and not cluster.stages())


@needs_ray
def test_nodes_that_are_missing_are_told_with_those_there_are(
    model: str, cluster: RayCluster
) -> None:
    with pytest.raises(StartError) as error:
        on_ray(model, pipeline_parallel_size=3, cpu_threads=3, join_timeout=1.0)
    assert "Ray did not find 3 nodes with 3 free CPUs each" in str(error.value)
    assert "127.0.0.2 with 0" in str(error.value)
    assert "4 CPUs are free" in str(error.value)


@needs_ray
def test_what_a_program_does_at_sigterm_is_left_as_it_was(model: str, cluster: RayCluster) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with pytest.raises(StartError):
        on_ray(model, pipeline_parallel_size=3, cpu_threads=3, join_timeout=1.0)
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


# Python runs it first in each process of a node: what actors find there.
OTHERS = {
    "has Headrace 0.0.9, the engine's host": "import headrace; headrace.__version__ = '0.0.9'",
    "No module named 'headrace.*it needs Headrace .*, as here": "sys.modules['headrace'] = None",
}


@pytest.mark.long
@needs_ray
@pytest.mark.parametrize("said", OTHERS)
def test_another_headrace_on_a_node_is_told(
    model: str, cluster: RayCluster, tmp_path: Path, said: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif any('default_worker' in a for a in sys.orig_argv):\n    {OTHERS[said]}\n"
    )
    node = cluster.add_node(4, PYTHONPATH=str(tmp_path))
    try:
        with pytest.raises(StartError, match=said):
            on_ray(model, pipeline_parallel_size=3)
    finally:
        cluster.cluster.remove_node(node)


@needs_ray
def test_a_cluster_that_is_not_there_is_told(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.9", 0)) as listener:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.9:{listener.getsockname()[1]}")
    with pytest.raises(
        StartError, match=r"no Ray cluster can be reached at RAY_ADDRESS 127\.0\.0\.9:"
    ):
        on_ray(model)


@pytest.fixture(scope="module")
def llm(model: str, cluster: RayCluster) -> Iterator[LLM]:
    """Three stages on two nodes, for the tests from here on: starts take long. Its program has
    connected to Ray by itself."""
    import ray

    ray.init(cluster.address, log_to_driver=False)
    try:
        with on_ray(model, pipeline_parallel_size=3, nnodes=2) as llm:
            yield llm
    finally:
        ray.shutdown()


@pytest.mark.long
@needs_ray
def test_stages_on_nodes_of_ray_give_the_tokens_of_one_host(
    alone: list[list[int]], cluster: RayCluster, llm: LLM
) -> None:
    assert tokens(llm) == alone
    # One on each node that has cores.
    assert len(cluster.actors()) == 2
    assert len({stage.ppid() for stage in cluster.stages()}) == 2


@pytest.mark.long
@needs_ray
def test_an_actor_that_is_killed_is_created_anew_and_nothing_is_lost(
    alone: list[list[int]], cluster: RayCluster, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.actors()[0].kill()
    assert tokens(llm) == alone
    # The engine's own node, which has no cores, is not planned with.
    assert "all stages start anew" not in caplog.text
    assert len(cluster.actors()) == 2
    assert len(cluster.stages()) == 3


@pytest.mark.long
@needs_ray
def test_a_node_that_is_gone_gives_its_place_to_another_and_nothing_is_lost(
    alone: list[list[int]], cluster: RayCluster, llm: LLM
) -> None:
    before = set(cluster.actors())
    cluster.nodes.append(cluster.add_node(3))
    cluster.cluster.remove_node(cluster.nodes.pop(0), allow_graceful=False)
    # Its actor ends when it has missed the node, which takes it a while.
    wait_until(lambda: not before <= set(cluster.actors()))
    assert tokens(llm) == alone
    assert len(cluster.actors()) == 2
    assert len(cluster.stages()) == 3


@pytest.mark.long
@needs_ray
def test_an_engine_that_is_closed_gives_back_all_but_a_connection_that_was_there(
    cluster: RayCluster, llm: LLM
) -> None:
    import ray

    llm.close()
    wait_until(lambda: not cluster.actors() and not cluster.stages())
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
