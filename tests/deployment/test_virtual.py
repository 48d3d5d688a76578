from dataclasses import replace

import pytest

from headrace.config import EngineConfig
from headrace.deployment.machine import read_machine
from headrace.deployment.model import read_model
from headrace.deployment.resolve import resolve
from headrace.deployment.virtual import launch_virtual, start_virtual
from headrace.errors import UsageError
from headrace.protocol.ranks import Ranks
from headrace.sampling_params import SamplingParams


def test_stages_of_two_shards_serve_as_those_of_one_do() -> None:
    config = EngineConfig(
        model="synthetic:2+0.1", pipeline_parallel_size=2, max_model_len=64, link_latency_ms=1.0
    )
    decided = resolve(config, read_model(config), read_machine())
    outputs = []
    for num_shards in (1, 2):
        virtual = start_virtual(replace(decided, ranks=Ranks(2, num_shards)))
        engine = virtual.engine
        for prompt in range(3):
            engine.add([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        tokens = []
        while not engine.settled:
            tokens += [(delta.request_id, delta.token) for delta in engine.step()]
        outputs.append((sorted(tokens), virtual.clock.now))
        now = engine.snapshot
        assert len(now.usage) == 2 * num_shards
        assert {usage.newest_step for usage in now.usage} == {now.steps - 1}
        assert len(now.costs) == 2
        assert now.link_s == pytest.approx(0.001)
    assert outputs[0] == outputs[1]


def test_a_real_model_cannot_run_in_virtual_time() -> None:
    with pytest.raises(UsageError, match="only synthetic models can"):
        launch_virtual(EngineConfig(model="smollm2"))
