"""What a scheduler has done so far: figures that only grow, whatever becomes of the pipeline."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Over all epochs.

    steps: plans made. preemptions: how often a running sequence lost slot and blocks to another.
    prefix_cache_queries: tokens of all sequences that looked in the prefix cache at their first
    admission; prefix_cache_hits: how many of those were found; as vLLM counts them.
    """

    steps: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
