"""Hosts and a model that nobody has, for what is decided before anything starts."""

from pathlib import Path

from msgspec.structs import replace

from headrace.checkpoint.locate import ModelFiles
from headrace.checkpoint.synthetic import synthetic_tokenizer
from headrace.deployment.machine import Cluster
from headrace.deployment.model import Model
from headrace.protocol.hosts import HostFacts, HostSpeed, KernelRates, LinkFigures
from headrace.protocol.model_config import LayerSize, ModelSizes, StageShare
from headrace.protocol.program import Program

FOUR_CORES = HostFacts(
    name="ada",
    address="",
    version="1",
    allowed_cpus=frozenset(range(8)),
    cores=(0, 2, 4, 6),
    free_memory=8 << 30,
    computes_bfloat16=False,
    native_kernels=True,
)
# SmolLM2-135M's.
SIZES = ModelSizes(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    layers=(LayerSize(products=3_538_944, cache_elements=2 * 3 * 64),) * 30,
    rotation_elements=64,
    embedding_products=576,
    head_products=49152 * 576,
    max_positions=8192,
    dtype="bfloat16",
    eos_token_ids=(2,),
)


def no_program(share: StageShare) -> Program:
    """Nothing is run."""
    raise AssertionError


MODEL = Model(
    files=ModelFiles(Path("model.gguf"), "gguf"),
    sizes=SIZES,
    program=no_program,
    sampling_defaults={},
    synthetic=None,
    read_tokenizer=synthetic_tokenizer,
)


def speed(times: float) -> HostSpeed:
    """So many times as fast as some host."""
    rates = KernelRates(times * 10e9, times * 100e9)
    return HostSpeed("avx2", {"bfloat16": rates, "float32": rates})


def unlike_hosts(slow_free: int = 8 << 30, fast_free: int = 8 << 30) -> Cluster:
    """ada, and bob who has half the cores, each of which is four times as fast."""
    bob = replace(FOUR_CORES, name="bob", allowed_cpus=frozenset({1, 3}), cores=(1, 3))
    return Cluster(
        hosts=(
            replace(FOUR_CORES, speed=speed(1), free_memory=slow_free),
            replace(bob, speed=speed(2), free_memory=fast_free),
        ),
        links={(0, 1): LinkFigures(2e-4, 125e6), (1, 0): LinkFigures(2.1e-4, 125e6)},
    )
