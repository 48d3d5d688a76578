"""What /metrics shows, of made-up deltas and of a real engine on stages in virtual time."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headrace.config import EngineConfig
from headrace.deployment.machine import read_machine
from headrace.deployment.model import read_model
from headrace.deployment.resolve import resolve
from headrace.deployment.virtual import launch_virtual, start_virtual
from headrace.engine.engine import Engine
from headrace.engine.outputs import OutputDelta
from headrace.engine.rank_usage import RankUsage
from headrace.engine.request import FinishReason
from headrace.protocol.ranks import Ranks
from headrace.sampling_params import SamplingParams
from headrace.serving.metrics import ServerMetrics
from headrace.serving.metrics_requests import RequestWatch

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana-dashboard.json"


def shown(metrics: ServerMetrics) -> dict[str, float]:
    """Every sample, by name and by what labels it has besides the model's name."""
    body, _ = metrics.render()
    values = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            name = sample.name.removeprefix("headrace:")
            values[name + "".join(f" {k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return values


def delta(
    index: int, at: float, token: int | None = 1, reason: FinishReason | None = None
) -> OutputDelta:
    """Of a request that came at 100 and had its slots at 101."""
    return OutputDelta(0, index, token, "", reason, None, None, None, 0, at, 100.0, 101.0)


def many(n: int, **fields: Any) -> SamplingParams:
    return SamplingParams(n=n, temperature=1.0, **fields)


def test_a_request_is_timed_by_what_its_deltas_say() -> None:
    metrics = ServerMetrics("m")
    watch = metrics.begin(7, SamplingParams(max_tokens=3))
    watch.take([delta(0, 102.0)])
    watch.take([delta(0, 102.25), delta(0, 104.0, reason="length")])
    watch.close()
    values = shown(metrics)
    assert {name: values[name] for name in values if name.endswith("_sum")} == {
        "time_to_first_token_seconds_sum": 2.0,
        "inter_token_latency_seconds_sum": 2.0,
        "request_time_per_output_token_seconds_sum": 1.0,
        "e2e_request_latency_seconds_sum": 4.0,
        "request_queue_time_seconds_sum": 1.0,
        "request_prompt_tokens_sum": 7.0,
        "request_generation_tokens_sum": 3.0,
        "request_params_n_sum": 1.0,
        "request_params_max_tokens_sum": 3.0,
    }
    assert (values["prompt_tokens_total"], values["generation_tokens_total"]) == (7.0, 3.0)
    assert values["inter_token_latency_seconds_bucket le=0.2"] == 0.0
    assert values["inter_token_latency_seconds_bucket le=0.3"] == 1.0
    assert values["inter_token_latency_seconds_count"] == 2.0


def test_a_request_that_never_had_a_token_counts_as_aborted_and_in_no_other_figure() -> None:
    metrics = ServerMetrics("m")
    metrics.begin(7, many(2)).close()
    values = shown(metrics)
    assert values.pop("request_success_total finished_reason=abort") == 2.0
    assert values["prompt_tokens_total"] == 0.0
    histograms = {name for name in values if name.endswith("_count")}
    assert {name for name in histograms if values[name]} == {"request_generation_tokens_count"}


def test_an_abort_that_the_engine_reports_is_counted_once_and_is_no_latency() -> None:
    metrics = ServerMetrics("m")
    watch = metrics.begin(7, many(2))
    watch.take([delta(0, 102.0), delta(1, 102.0, reason="stop")])
    watch.take([delta(0, 103.0, token=None, reason="abort")])
    watch.close()
    values = shown(metrics)
    assert values["request_success_total finished_reason=abort"] == 1.0
    assert values["request_success_total finished_reason=stop"] == 1.0
    assert values["e2e_request_latency_seconds_count"] == 0.0


@dataclass
class Request:
    """By completion: how many deltas come, and why it ends; None: its client leaves before."""

    lengths: list[int]
    reasons: list[FinishReason | None]

    @property
    def tokens(self) -> list[int]:
        """By completion; an abort brings none."""
        ends = zip(self.lengths, self.reasons, strict=True)
        return [deltas - (reason == "abort") for deltas, reason in ends]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    n = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    known: list[FinishReason | None] = ["stop", "length", "abort", None]
    return Request(lengths, draw(st.lists(st.sampled_from(known), min_size=n, max_size=n)))


@settings(max_examples=60, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=4), st.data())
def test_sums_are_right_however_the_deltas_of_completions_come(
    load: list[Request], data: st.DataObject
) -> None:
    metrics = ServerMetrics("m")
    watches: list[RequestWatch] = [metrics.begin(10, many(len(r.lengths))) for r in load]
    left = {(r, c): n for r, request in enumerate(load) for c, n in enumerate(request.lengths)}
    now = 102.0
    while left:
        number, completion = data.draw(st.sampled_from(sorted(left)))
        batch = []
        for _ in range(data.draw(st.integers(1, left[number, completion]))):
            now += 0.5
            left[number, completion] -= 1
            last = left[number, completion] == 0
            reason = load[number].reasons[completion] if last else None
            token = None if reason == "abort" else 1
            batch.append(delta(completion, now, token, reason))
        if not left[number, completion]:
            del left[number, completion]
        watches[number].take(batch)
    for watch in watches:
        watch.close()
        watch.take([delta(0, now, token=None, reason="abort")])
        watch.close()
    values = shown(metrics)
    ends = [reason for request in load for reason in request.reasons]
    tokens = [count for request in load for count in request.tokens]
    begun = [request for request in load if any(request.tokens)]
    whole = [r for r in load if not {"abort", None} & set(r.reasons)]
    assert values["generation_tokens_total"] == sum(tokens)
    assert values["request_generation_tokens_sum"] == sum(tokens)
    assert values["request_generation_tokens_count"] == len(ends)
    assert values["inter_token_latency_seconds_count"] == sum(max(0, n - 1) for n in tokens)
    assert values["request_time_per_output_token_seconds_count"] == sum(n > 1 for n in tokens)
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "request_params_n"):
        assert values[f"{name}_count"] == len(begun)
    assert values["prompt_tokens_total"] == values["request_prompt_tokens_sum"] == 10 * len(begun)
    assert values["e2e_request_latency_seconds_count"] == len(whole)
    for reason in ("stop", "length"):
        counted = values[f"request_success_total finished_reason={reason}"]
        assert counted == ends.count(reason)
    aborted = values["request_success_total finished_reason=abort"]
    assert aborted == ends.count("abort") + ends.count(None)


@dataclass
class Served:
    """A real engine on two stages in virtual time, and the metrics that watch it."""

    engine: Engine
    metrics: ServerMetrics

    def run(self, *requests: tuple[list[int], SamplingParams]) -> Iterator[None]:
        """Serve them, with a stop after each step."""
        watches = {
            self.engine.add(prompt, params): self.metrics.begin(len(prompt), params)
            for prompt, params in requests
        }
        while not self.engine.settled:
            for new in self.engine.step():
                watches[new.request_id].take([new])
            yield


@pytest.fixture
def served() -> Served:
    config = EngineConfig(
        model="synthetic:2+0", pipeline_parallel_size=2, max_num_seqs=2, max_model_len=64
    )
    virtual = launch_virtual(config)
    metrics = ServerMetrics("m", lambda: virtual.clock.now)
    metrics.attach(virtual.card, lambda: virtual.engine.snapshot)
    return Served(virtual.engine, metrics)


def test_the_engines_state_is_shown_while_it_runs_and_comes_back_to_nothing(
    served: Served,
) -> None:
    idle = shown(served.metrics)
    seen = []
    prompt = list(range(2, 40))
    for _ in served.run((prompt, many(3, max_tokens=9)), (prompt, SamplingParams(max_tokens=9))):
        seen.append(shown(served.metrics))
    # Four completions, two slots, 47 positions each, of which two blocks are shared.
    first = seen[0]
    assert (first["num_requests_running"], first["num_requests_waiting"]) == (2.0, 2.0)
    assert (first["slots_used"], first["slots_total"]) == (2.0, 2.0)
    assert first["kv_cache_usage_perc"] == first["kv_blocks_used"] / first["kv_blocks_total"] > 0
    assert first["steps_in_flight"] > 0
    last = seen[-1]
    for name in ("num_requests_running", "num_requests_waiting", "slots_used", "kv_blocks_used"):
        assert last[name] == idle[name] == 0.0
    assert last["steps_in_flight"] == 0.0
    assert last["steps_total"] == served.engine.scheduler.newest_step + 1
    assert last["prefix_cache_queries_total"] == 4 * len(prompt)
    assert last["prefix_cache_hits_total"] == 3 * 32
    assert last["generation_tokens_total"] == 4 * 9
    assert last["request_success_total finished_reason=length"] == 4.0
    for before, after in pairwise(seen):
        for name in before:
            if re.search(r"_(total|bucket|count|sum)\b", name) and "_blocks_" not in name:
                assert before[name] <= after[name], f"{name} went backwards"


def test_stages_show_how_long_they_computed_and_waited(served: Served) -> None:
    for _ in served.run(([1, 2, 3], SamplingParams(max_tokens=10))):
        pass
    served.metrics.sample()
    values = shown(served.metrics)
    for stage in ("0", "1"):
        assert values[f"stage_busy_seconds_total shard=0 stage={stage}"] == pytest.approx(
            10 * 0.002
        )
        assert values[f"stage_peak_memory_bytes shard=0 stage={stage}"] >= 0
    # Each token goes through both stages before the next: half of the time, less at the edges.
    assert 0.4 < values["stage_busy_fraction shard=0 stage=0"] < 0.6
    assert values["stage_feedback_wait_seconds_total shard=0 stage=0"] > 0
    assert values["stage_activation_wait_seconds_total shard=0 stage=1"] > 0


def test_a_rank_is_shown_as_a_shard_of_its_stage() -> None:
    config = EngineConfig(model="synthetic:2+0", pipeline_parallel_size=2)
    decided = resolve(config, read_model(config), read_machine())
    virtual = start_virtual(replace(decided, ranks=Ranks(num_stages=2, num_shards=2)))
    metrics = ServerMetrics("m")
    metrics.attach(virtual.card, lambda: virtual.engine.snapshot)
    labels = {
        name.removeprefix("stage_busy_fraction ")
        for name in shown(metrics)
        if name.startswith("stage_busy_fraction")
    }
    assert labels == {f"shard={shard} stage={stage}" for shard in (0, 1) for stage in (0, 1)}


def test_the_busy_fraction_is_of_the_last_ten_seconds() -> None:
    now = 0.0
    metrics = ServerMetrics("m", lambda: now)
    virtual = launch_virtual(EngineConfig(model="synthetic:2+0"))
    snapshot = virtual.engine.snapshot
    metrics.attach(virtual.card, lambda: snapshot)
    fractions, busy_s = [], 0.0
    for second in range(1, 41):
        now = float(second)
        # Busy half of the time, then not at all.
        busy_s += 0.5 if second <= 20 else 0.0
        snapshot = msgspec.structs.replace(snapshot, usage=(RankUsage(busy_s=busy_s),))
        metrics.sample()
        fractions.append(shown(metrics)["stage_busy_fraction shard=0 stage=0"])
    assert fractions[:20] == [0.5] * 20
    assert fractions[24] == 0.25
    assert fractions[29:] == [0.0] * 11


def test_before_there_is_an_engine_the_rest_is_shown() -> None:
    metrics = ServerMetrics("m")
    metrics.sample()
    values = shown(metrics)
    assert values["process_cpu_seconds_total"] > 0
    assert values["request_success_total finished_reason=stop"] == 0.0
    assert "num_requests_running" not in values


def test_names_keep_their_colon_and_the_media_type_is_that_of_the_text() -> None:
    body, media_type = ServerMetrics("m").render()
    assert media_type == "text/plain; version=0.0.4; charset=utf-8"
    assert b'headrace:request_success_total{finished_reason="stop",model_name="m"} 0.0' in body
    assert b"headrace_" not in body


def test_a_models_name_may_be_anything() -> None:
    name = 'a "model"\\\nof mine'
    body, _ = ServerMetrics(name).render()
    labels = [
        sample.labels.get("model_name")
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name.startswith("headrace:")
    ]
    assert set(labels) == {name}


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(served: Served) -> None:
    body, _ = served.metrics.render()
    families = text_string_to_metric_families(body.decode())
    labels = {s.name: {*s.labels, "instance"} for family in families for s in family.samples}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"]]
    assert len(queries) > 20
    for query in queries:
        asked = re.findall(r"\b((?:headrace:|process_)\w+)(?:\{([^}]*)\})?", query)
        assert asked, query
        for name, matchers in asked:
            assert name in labels, f"{name} is in no answer: {query}"
            assert set(re.findall(r"(\w+)=", matchers)) <= labels[name], query
        grouped = re.findall(r"by \((\w+)\)", query)
        assert all(any(label in labels[name] for name, _ in asked) for label in grouped), query
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
