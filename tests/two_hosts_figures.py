"""What two hosts gain on one, and deferred token feedback on blocking: `python
tests/two_hosts_figures.py`, as root, on a machine with two cores at least and nothing else to do.

Two network namespaces stand for two hosts, each with one core of the machine, joined by a line of
1 Gb/s and 2 ms each way. Rounds are interleaved: pp=2 on the two hosts, pp=1 on one of them, and
pp=2 on one host that has both cores. Then `bench overlap` on the two hosts. Prints tables, and with
--json one JSON object.

Engine, agent and sockets take their time of the hosts' cores, too, as they would anywhere. Where
the kernel has no netem a process of this machine is the line; what it takes of the two cores is
printed, and a real line takes nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from headrace.bench.machine import machine, versions
from headrace.cli.printing import print_rows, print_where, rounded
from headrace.config import DEFAULT_PORT
from headrace.deployment.machine import this_host
from headrace.host.cluster_key import write_cluster_key
from relay import Line
from two_hosts import MASTER_ADDRESS, TwoHosts, UnavailableError

LINE = Line(2, rate_mbit=1000)
# Those of public splits of a model over two hosts, by two batches in flight.
PUBLIC = "public figures for two hosts: busy 76 to 79 %, gain 1.31 to 1.37"
_HEADRACE = [sys.executable, "-m", "headrace"]


@dataclass
class Lab:
    """Two hosts with a core each. line_cores: what the line took of the processor while both were
    at work, by bench."""

    hosts: TwoHosts
    cores: tuple[int, int]
    key: Path
    line_cores: list[float] = field(default_factory=list)

    def apart(self, *bench: str, engines: int = 1) -> dict[str, Any]:
        """What a bench says, with the second stage on the second host. engines: that it starts."""
        flags = ["-pp", "2", "--nnodes", "2", "--master-addr", MASTER_ADDRESS]
        flags += ["--cluster-key-file", str(self.key)]
        ports = [DEFAULT_PORT + number for number in range(engines)]
        line = psutil.Process(self.hosts.relay.pid)
        began, before = time.monotonic(), sum(line.cpu_times()[:2])
        with self._agents(ports) as agents:
            where = ["taskset", "-c", str(self.cores[0]), *self.hosts.on(0)]
            answer = self._bench(where, *bench, *flags)
            for agent in agents:
                assert agent.wait(60) == 0
        taken = sum(line.cpu_times()[:2]) - before
        self.line_cores.append(taken / (time.monotonic() - began))
        return answer

    def together(self, cores: tuple[int, ...], *bench: str) -> dict[str, Any]:
        """What a bench says on one host with these cores."""
        of = ["taskset", "-c", ",".join(map(str, cores)), *self.hosts.on(0)]
        return self._bench(of, *bench, "-pp", str(len(cores)))

    def _bench(self, where: list[str], *arguments: str) -> dict[str, Any]:
        command = [*where, *_HEADRACE, "bench", *arguments, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    @contextmanager
    def _agents(self, ports: list[int]) -> Iterator[list["subprocess.Popen[bytes]"]]:
        where = ["taskset", "-c", str(self.cores[1]), *self.hosts.on(1)]
        agents = [
            subprocess.Popen(
                [
                    *(*where, *_HEADRACE, "join", f"{MASTER_ADDRESS}:{port}"),
                    *("--cluster-key-file", str(self.key)),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for port in ports
        ]
        try:
            yield agents
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()


def measure(lab: Lab, asked: argparse.Namespace) -> dict[str, Any]:
    """All figures; the gain is that of two hosts over one of them."""
    load = ["--num-prompts", str(asked.num_prompts), "--max-num-seqs", str(asked.num_prompts)]
    load += ["--model", asked.model, "--dtype", asked.dtype, "--rounds", str(asked.rounds)]
    lengths = ["--input-len", str(asked.input_len), "--output-len", str(asked.output_len)]
    runs: dict[str, list[dict[str, Any]]] = {"two hosts": [], "one host": [], "both cores": []}
    for number in range(1, asked.starts + 1):
        print(f"start {number} of {asked.starts}", file=sys.stderr)
        runs["two hosts"].append(lab.apart("throughput", *load, *lengths))
        runs["one host"].append(lab.together(lab.cores[:1], "throughput", *load, *lengths))
        runs["both cores"].append(lab.together(lab.cores, "throughput", *load, *lengths))
    print("bench overlap", file=sys.stderr)
    overlap = lab.apart("overlap", *load, engines=2)
    figures = {name: _figures(of) for name, of in runs.items()}
    speed = {name: of["output_tokens_per_s"] for name, of in figures.items()}
    return {
        "line": {"delay_ms": LINE.delay_ms, "rate_mbit": LINE.rate_mbit},
        "model": asked.model,
        "dtype": asked.dtype,
        "num_prompts": asked.num_prompts,
        "input_len": asked.input_len,
        "output_len": asked.output_len,
        "runs": figures,
        "gain": speed["two hosts"] / speed["one host"],
        "gain_on_one_host": speed["both cores"] / speed["one host"],
        "overlap": overlap,
        "cores_of_the_line": max(lab.line_cores),
        "machine": machine(),
        "versions": versions(),
    }


def _figures(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the start of median speed, and the spread over all rounds."""
    speeds = [speed for start in starts for speed in start["output_tokens_per_s_rounds"]]
    middle = sorted(starts, key=lambda s: s["output_tokens_per_s"])[(len(starts) - 1) // 2]
    return {
        "output_tokens_per_s": median(speeds),
        "output_tokens_per_s_min": min(speeds),
        "output_tokens_per_s_max": max(speeds),
        "num_microbatches": middle["num_microbatches"],
        "step_ms_p50": middle["step_ms_p50"],
        "layers": [stage["layers"] for stage in middle["stages"]],
        "busy_fractions": [stage["busy_fraction"] for stage in middle["stages"]],
    }


def show(answer: dict[str, Any]) -> None:
    """For people."""
    print(
        f"{answer['model']}, {answer['dtype']}: {answer['num_prompts']} requests at once, "
        f"{answer['input_len']} tokens in, {answer['output_len']} out; a core a host, 1 Gb/s and "
        "2 ms between them"
    )
    print_rows([{"run": name, **figures} for name, figures in answer["runs"].items()])
    print(
        f"two hosts over one: x {answer['gain']:.3g}; pp=2 on one host with both cores over pp=1 "
        f"with one: x {answer['gain_on_one_host']:.3g} ({PUBLIC})"
    )
    overlap = answer["overlap"]
    names = ("deferred", "blocking", "blocking_best")
    print_rows(
        [
            {
                "on two hosts": name.replace("_", ", "),
                "tokens/s": overlap[name]["output_tokens_per_s"],
                "microbatches": overlap[name]["num_microbatches"],
                "busy": [stage["busy_fraction"] for stage in overlap[name]["stages"]],
            }
            for name in names
        ]
    )
    print(
        f"deferred over blocking: x {overlap['ratio']:.3g}; over blocking with its best number of "
        f"microbatches: x {overlap['ratio_best']:.3g}"
    )
    print(f"the line itself took {answer['cores_of_the_line']:.1%} of a core")
    print_where(answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="of the load at each start")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    cores = this_host().cores
    if len(cores) < 2:
        print("two_hosts_figures.py: needs two cores, one for each host", file=sys.stderr)
        return 1
    try:
        with TwoHosts(LINE) as hosts, tempfile.TemporaryDirectory() as folder:
            write_cluster_key(Path(folder) / "key")
            lab = Lab(hosts, (cores[0], cores[1]), Path(folder) / "key")
            answer = rounded(measure(lab, asked))
    except UnavailableError as error:
        print(f"two_hosts_figures.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer)) if asked.json else show(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
