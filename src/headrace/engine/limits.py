"""What the scheduler is held to, and which sequences could never run within it."""

from dataclasses import dataclass

from headrace.engine.prefill_policy import PrefillPolicyName
from headrace.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler; tokens and sequences are counts, window is in steps.

    num_microbatches and window are those at the start. max_itl_s: the most seconds that may lie
    between two tokens of a sequence because others are prefilled; None for what the prefill policy
    finds right.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_microbatches: int
    window: int
    eos_token_ids: frozenset[int]
    prefix_caching: bool
    prefill_policy: PrefillPolicyName
    num_stages: int = 1
    max_itl_s: float | None = None
    epoch: int = 0

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-positions // self.block_size)

    def most_outputs(self, prompt_length: int, wanted: int) -> int:
        """How many of the wanted tokens there is room for after a prompt; UsageError as check()."""
        self.check(prompt_length, wanted)
        return min(wanted, self.max_model_len - prompt_length)

    def check(self, prompt_length: int, max_outputs: int) -> None:
        """Raises UsageError, with the reason, for a sequence that could never run."""
        limit = self.max_model_len
        if prompt_length == 0:
            raise UsageError("the prompt is empty: give it at least one token")
        if prompt_length >= limit:
            raise UsageError(
                f"the prompt has {prompt_length} tokens, which leaves no room for output: "
                f"--max-model-len is {limit}"
            )
        needed = self.blocks_for(min(limit, prompt_length + max_outputs) - 1)
        if needed > self.num_blocks:
            raise UsageError(
                f"the request needs {needed} cache blocks, the whole cache has "
                f"{self.num_blocks}: lower max_tokens or raise --kv-cache-memory"
            )
