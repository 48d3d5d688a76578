"""What a real host says of itself."""

import msgspec

from headrace.checkpoint.locate import locate_model
from headrace.deployment.host_facts import read_host_facts
from headrace.protocol.hosts import HostFacts


def test_a_host_tells_its_speed_its_memory_and_the_models_digest() -> None:
    facts = read_host_facts("10.0.0.1", locate_model("smollm2"))
    assert facts.address == "10.0.0.1"
    assert facts.name
    assert set(facts.cores) <= facts.allowed_cpus
    assert facts.free_memory > 2**20
    assert facts.speed is not None
    assert facts.speed.kernels
    for dtype in ("float32", "bfloat16", "float16"):
        rates = facts.speed.rates[dtype]
        assert rates.read_bytes_per_s > 0
        assert rates.operations_per_s > 0
    assert facts.weights is not None
    assert len(facts.weights.tensors) == 272
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=HostFacts) == facts
