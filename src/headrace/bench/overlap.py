"""What deferred token feedback gains over blocking: the same requests, interleaved, in one run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from headrace.bench.batch_run import Batch, BatchRun, RunRecorder, median_run, run_batch
from headrace.bench.plot import Panel
from headrace.bench.running import running_engine
from headrace.bench.stage_alone import seconds_alone
from headrace.checkpoint.locate import SYNTHETIC
from headrace.config import DEFAULT_PORT, EngineConfig
from headrace.deployment.rank_setup import rank_config
from headrace.deployment.resolve import Deployment
from headrace.deployment.start import RunningEngine
from headrace.engine.microbatch_count import best_count, round_seconds
from headrace.engine.snapshot import EngineSnapshot
from headrace.engine.step_cost import StepWork
from headrace.errors import PipelineError
from headrace.protocol.messages import Timeline

Setting = Literal["deferred", "blocking", "blocking_best"]
# gpt-oss-20b at pp=2, tp=2: 448 output tokens a second after the change, 338 before.
PUBLIC_RATIO = 1.325
PUBLIC_SOURCE = "public figure for comparison: vLLM pull request 51650, 448 / 338 tokens/s"

# Tokens of the warm-up and of the trials, as a part of those of a measured run.
_WARM_UP, _TRIAL = 1 / 2, 1 / 4
# Speed by which splitting must promise to be faster, or it is said not to help.
_WORTH_IT = 0.05
# Activities asked of a stage, more than any remembers, and seconds it has to answer.
_EVERYTHING, _ANSWER_S = 2**31, 10.0


@dataclass(frozen=True)
class Overlap:
    """What was measured. trials: the better of two tokens a second of each number of microbatches
    with blocking feedback. ideal_step_s: a step of the median deferred run on the slowest stage
    alone, None if that is on another host or has several shards. outlook: why microbatches cannot
    help, if so. timelines: the ranks' in the last deferred and the last blocking run, if they were
    wanted."""

    config: EngineConfig
    batch: Batch
    dtype: str
    runs: dict[Setting, list[BatchRun]]
    trials: dict[int, float]
    ideal_step_s: float | None
    outlook: str | None
    timelines: dict[Setting, list[Timeline]]

    @property
    def label(self) -> str | None:
        """What makes the figures those of no real model; None if nothing does."""
        if not self.config.model.startswith(SYNTHETIC):
            return None
        fixed, per_row = self.config.model.removeprefix(SYNTHETIC).split("+")
        return f"synthetic: stages sleep {fixed} ms a step and {per_row} ms a row, no model runs"

    @property
    def title(self) -> str:
        """What ran, in a line."""
        links = ""
        if self.config.link_emulation is not None:
            links = f", emulated links of {self.config.link_latency_ms:g} ms"
            if self.config.link_bandwidth_mbps is not None:
                links += f" and {self.config.link_bandwidth_mbps:g} Mbit/s"
        return (
            f"{self.label or self.config.model}; pp={self.config.pipeline_parallel_size}, "
            f"tp={self.config.tensor_parallel_size}, "
            f"{self.batch.num_prompts} requests{links}"
        )

    @property
    def panels(self) -> list[Panel]:
        """The middle of the last blocking and the last deferred run, to be drawn."""
        settings: tuple[Setting, ...] = ("blocking", "deferred")
        return [
            Panel(
                f"{setting} token feedback: {runs[-1].tokens_per_s:.0f} tokens/s",
                self.timelines[setting],
                runs[-1].plans[len(runs[-1].plans) // 2].step,
            )
            for setting in settings
            for runs in [self.runs[setting]]
        ]

    def as_json(self) -> dict[str, Any]:
        """The figures, times in the units that the keys say."""
        config, batch = self.config, self.batch
        median = {setting: median_run(runs) for setting, runs in self.runs.items()}
        deferred = median["deferred"]
        speed = {setting: run.tokens_per_s for setting, run in median.items()}
        answer: dict[str, Any] = {"model": config.model}
        if self.label is not None:
            answer["label"] = self.label
        if config.link_emulation is not None:
            answer["emulated_link"] = {
                "latency_ms": config.link_latency_ms,
                "bandwidth_mbps": config.link_bandwidth_mbps,
            }
        answer |= {
            "pp": config.pipeline_parallel_size,
            "tp": config.tensor_parallel_size,
            "dtype": self.dtype,
            "num_prompts": batch.num_prompts,
            "input_len": batch.input_len,
            "output_len": batch.output_len,
            "rounds": len(self.runs["deferred"]),
        }
        answer |= {setting: _figures(runs) for setting, runs in self.runs.items()}
        answer["blocking_best"]["trials_tokens_per_s"] = self.trials
        answer |= {
            "ratio": speed["deferred"] / speed["blocking"],
            "ratio_best": speed["deferred"] / speed["blocking_best"],
            "measured_step_ms": deferred.step_s * 1e3,
            "slowest_stage": config.ranks.stage_of(deferred.slowest_rank),
            "vllm_pr_51650_ratio": PUBLIC_RATIO,
            "vllm_pr_51650_note": PUBLIC_SOURCE,
        }
        if self.ideal_step_s is not None:
            answer["ideal_step_ms"] = self.ideal_step_s * 1e3
            answer["efficiency"] = self.ideal_step_s / deferred.step_s
        if self.outlook is not None:
            answer["note"] = self.outlook
        return answer


def measure_overlap(
    config: EngineConfig,
    batch: Batch,
    rounds: int,
    say: Callable[[str], None],
    *,
    timelines: bool = False,
) -> Overlap:
    """Run the batch `rounds` times in each setting. say: told what runs. timelines: keep them.

    config: of the deferred pipeline, at least two stages. The blocking pipeline lives at the same
    time, so that the rounds can be interleaved; the one that is not at work sleeps. Raises what
    launch() and the engine raise.
    """
    pp = config.pipeline_parallel_size
    runs: dict[Setting, list[BatchRun]] = {setting: [] for setting in get_args(Setting)}
    noted, noted_blocking = RunRecorder(), RunRecorder()
    with running_engine(config, say, "deferred", noted) as deferred:
        say("warm-up: deferred")
        warm_up = run_batch(deferred.engine, noted, _shortened(batch, _WARM_UP))
        settled = warm_up.num_microbatches
        candidates = range(1, min(2 * pp, deferred.deployment.max_num_seqs) + 1)
        # With room for every number of microbatches that is to be run.
        most = max(deferred.deployment.most_microbatches, *candidates)
        blocking_config = replace(
            config,
            token_feedback="blocking",
            num_microbatches=most,
            master_port=_port_after(config),
        )
        with running_engine(blocking_config, say, "blocking", noted_blocking) as blocking:

            def run_blocking(num_microbatches: int, batch: Batch) -> BatchRun:
                blocking.engine.set_microbatches(num_microbatches)
                return run_batch(blocking.engine, noted_blocking, batch)

            say("warm-up: blocking")
            run_blocking(settled, _shortened(batch, _TRIAL))
            trials: dict[int, float] = dict.fromkeys(candidates, 0.0)
            # Twice, the other way round the second time: the first run of all is often the slowest.
            for count in [*candidates, *reversed(candidates)]:
                say(f"trial: blocking, {count} microbatch{'es' * (count > 1)}")
                trial = run_blocking(count, _shortened(batch, _TRIAL))
                trials[count] = max(trials[count], trial.tokens_per_s)
            best = max(trials, key=lambda count: trials[count])
            lines: dict[Setting, list[Timeline]] = {}
            for number in range(1, rounds + 1):
                at = f"round {number} of {rounds}"
                last = timelines and number == rounds
                say(f"{at}: deferred")
                runs["deferred"].append(run_batch(deferred.engine, noted, batch))
                if last:
                    lines["deferred"] = _timelines(deferred, runs["deferred"][-1])
                say(f"{at}: blocking")
                same = runs["deferred"][-1].num_microbatches
                runs["blocking"].append(run_blocking(same, batch))
                if last:
                    lines["blocking"] = _timelines(blocking, runs["blocking"][-1])
                say(f"{at}: blocking, best number of microbatches")
                runs["blocking_best"].append(run_blocking(best, batch))
    # The trials were short: should they have misjudged, the best is what did best.
    if median_run(runs["blocking"]).tokens_per_s > median_run(runs["blocking_best"]).tokens_per_s:
        runs["blocking_best"] = runs["blocking"]
    median = median_run(runs["deferred"])
    rank = median.slowest_rank
    alone: list[float] = []
    if config.ranks.num_shards == 1 and deferred.deployment.hosts[rank] == 0:
        say(f"the same plans on {config.ranks.name(rank)} alone")
        alone = seconds_alone(
            rank_config(deferred.deployment, rank),
            deferred.deployment.cpus[rank],
            deferred.card.num_blocks,
            warm_up.plans,
            median.plans,
        )
    return Overlap(
        config=config,
        batch=batch,
        dtype=deferred.card.dtype,
        runs=runs,
        trials=trials,
        ideal_step_s=sum(alone) / len(alone) if alone else None,
        outlook=_outlook(
            deferred.engine.snapshot, deferred.deployment, batch, median.num_microbatches
        ),
        timelines=lines,
    )


def _port_after(config: EngineConfig) -> int:
    """Where ranks or hosts of a second engine meet, beside those of the config's."""
    if config.nnodes == 1 and config.master_port == 0:
        return 0
    return (config.master_port or DEFAULT_PORT) + 1


def _shortened(batch: Batch, part: float) -> Batch:
    return replace(batch, output_len=max(1, int(batch.output_len * part)))


def _timelines(running: RunningEngine, run: BatchRun) -> list[Timeline]:
    """What every stage did in the run, which was the last; the newest of it if that is too much.

    Raises PipelineError if a stage does not answer.
    """
    lines = running.processes.timelines(_EVERYTHING, _ANSWER_S)
    silent = set(range(running.card.ranks.count)) - {line.rank for line in lines}
    if silent:
        raise PipelineError(f"ranks {sorted(silent)} sent no time line within {_ANSWER_S:g} s")
    return [
        Timeline(
            line.rank,
            line.now,
            [a for a in line.activities if a.began >= run.began and a.ended is not None],
        )
        for line in lines
    ]


def _figures(runs: list[BatchRun]) -> dict[str, Any]:
    """Of one setting: those of the median run, and the spread."""
    run = median_run(runs)
    return {
        "output_tokens_per_s": run.tokens_per_s,
        "output_tokens_per_s_min": min(r.tokens_per_s for r in runs),
        "output_tokens_per_s_max": max(r.tokens_per_s for r in runs),
        "num_microbatches": run.num_microbatches,
        "step_ms_p50": run.step_s_p50 * 1e3,
        "ranks": [
            {
                "busy_fraction": usage.busy_fraction,
                "feedback_wait_s": usage.feedback_wait_s,
                "activation_wait_s": usage.activation_wait_s,
            }
            for usage in run.usage
        ],
    }


def _outlook(
    engine: EngineSnapshot, deployment: Deployment, batch: Batch, count: int
) -> str | None:
    """Why one step for all is as good as any splitting, by the costs and the link time that the
    engine measured; None if it is not. count: what the engine ran with."""
    rows = min(batch.num_prompts, deployment.max_num_seqs)
    context = batch.input_len + batch.output_len // 2
    everyone = StepWork(tokens=rows, attended=rows * context, sampled=rows)
    single = StepWork(tokens=1, attended=context, sampled=1)
    costs, link_s = engine.costs, engine.link_s
    best = best_count(everyone, costs, link_s, deployment.most_microbatches)
    together, split = (round_seconds(n, everyone, costs, link_s) for n in (1, best))
    if together > split * (1 + _WORTH_IT):
        return None
    found = f"; auto found {count}" if deployment.config.num_microbatches is None else ""
    return (
        f"microbatches cannot help here: a step of all {rows} rows takes the slowest stage "
        f"{max(cost.seconds(everyone) for cost in costs) * 1e3:.1f} ms, one of a single row "
        f"{max(cost.seconds(single) for cost in costs) * 1e3:.1f} ms, and a link "
        f"{link_s * 1e3:.2f} ms{found}"
    )
