"""The program of a model that is none: nothing at all, on activations of its size."""

from headrace.checkpoint.synthetic import synthetic_sizes
from headrace.model.architecture import Blueprint
from headrace.protocol.program import Program


def synthetic_model(num_stages: int) -> Blueprint:
    """One layer a stage, of which nothing is computed."""
    sizes = synthetic_sizes(num_stages)
    program = Program(sizes.hidden_size, sizes.vocab_size, (), (), (), {})
    return Blueprint(sizes, lambda share: program)
