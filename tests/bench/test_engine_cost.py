from dataclasses import asdict

from headrace.bench.engine_cost import engine_cost


def test_the_cost_of_a_plan_is_measured_with_every_sequence_decoding() -> None:
    cost = asdict(engine_cost(running=5, context_len=40, steps=8))
    assert cost.keys() == {
        "running",
        "context_len",
        "plan_us_p50",
        "plan_us_p99",
        "encode_us_p50",
        "result_us_p50",
        "total_us_p50",
        "plan_bytes",
    }
    assert (cost["running"], cost["context_len"]) == (5, 40)
    assert all(value > 0 for value in cost.values())
    assert cost["plan_us_p50"] <= cost["plan_us_p99"]


def test_a_plan_of_decode_rows_has_no_more_bytes_for_longer_contexts() -> None:
    short, long = (engine_cost(running=8, context_len=n, steps=8) for n in (16, 640))
    assert long.plan_bytes <= 1.2 * short.plan_bytes
