"""From logits to tokens, with random numbers that depend on seed and token index alone.

On a CPU a row's token is the same, bit for bit, alone or in any batch: every operation works on
elements, or along a row from its first element to its last, so that no sum depends on the batch's
shape or on the number of threads. Rows of float32 and bfloat16 go to a native kernel there, which
rounds differently from torch: the two may part where the first two tokens all but tie.

Tokens run a race: each draws an exponential waiting time at the rate of its own weight, and the
first to arrive is taken, which happens with its probability (the Gumbel-max trick, Gumbel 1954).
Inverting the cumulative distribution would need one random number instead of one for each token,
but then the last bits of the logits, which differ with what else is in the batch, would change
about one token in a thousand: every token's border is the sum of all before. In a race they matter
only where the first two arrive at the same moment.
"""

from collections.abc import Iterable

import numpy as np
import torch

from headrace.kernels.path import runs_native
from headrace.kernels.sampling import CHOICE, choose
from headrace.protocol.messages import TokenLogprobs
from headrace.sampling.filters import leave_out
from headrace.sampling.slot import SlotSampling

# Rows that are worked on together: few enough that what they need in between stays in the cache.
_ROWS_AT_ONCE = 16

# The largest float32 below 1.
_BELOW_ONE = 1 - 2.0**-24


def sample(logits: torch.Tensor, slots: list[SlotSampling]) -> torch.Tensor:
    """One token per row, int64 [R]; each slot takes note of its own.

    logits: [R, vocab] of any float dtype, left as they are; row r belongs to slots[r]. A row
    without any possible token (all -inf) gives token 0.
    """
    native = runs_native(logits.device, logits.dtype)
    tokens = _choose_natively(logits, slots) if native else choose_by_torch(logits, slots)
    for slot, token in zip(slots, tokens.tolist(), strict=True):
        slot.record(token)
    return tokens


def choose_by_torch(logits: torch.Tensor, slots: list[SlotSampling]) -> torch.Tensor:
    """As sample, but the slots take no note: the meaning of the native kernel, and its stand-in."""
    tokens = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
    greedy = [row for row, slot in enumerate(slots) if slot.greedy]
    if greedy:
        taken = adjusted_logits(_rows(logits, greedy), [slots[row] for row in greedy])
        tokens[greedy] = taken.argmax(dim=-1)
    drawing = [row for row, slot in enumerate(slots) if not slot.greedy]
    for start in range(0, len(drawing), _ROWS_AT_ONCE):
        rows = drawing[start : start + _ROWS_AT_ONCE]
        drawers = [slots[row] for row in rows]
        weights = draw_weights(_rows(logits, rows), drawers)
        tokens[rows] = _first_to_arrive(weights, drawers)
    return tokens


def waiting_times(seed: int, index: int, count: int) -> np.ndarray:
    """Exponential random numbers of mean 1, float32 [count], for token number `index` of a request.

    Philox is counter-based (Salmon, Moraes, Dror, Shaw 2011): the key is the seed, the counter the
    index, so they depend on nothing that ran before. Never 0, which would win every race, nor
    infinite, which would lose it even to tokens that are left out.
    """
    bits = np.random.Philox(key=seed, counter=[0, index, 0, 0]).random_raw(-(-count // 2))
    halves = bits.astype("<u8", copy=False).view("<u4")[:count].astype(np.float32)
    # In place, and the logarithm by torch, which computes several at a time.
    uniforms = torch.from_numpy(halves).add_(0.5).mul_(-(2.0**-32)).clamp_(min=-_BELOW_ONE)
    return uniforms.log1p_().neg_().numpy()


def adjusted_logits(logits: torch.Tensor, slots: list[SlotSampling]) -> torch.Tensor:
    """Logits [R, vocab] in float32 (or wider) after bad words, min_tokens, bias and penalties.

    The very same tensor if there is nothing to change.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    adjusting = [row for row, slot in enumerate(slots) if slot.adjusts]
    if adjusting and wide is logits:
        wide = logits.clone()
    for row in adjusting:
        slots[row].adjust(wide[row])
    return wide


def draw_weights(logits: torch.Tensor, slots: list[SlotSampling]) -> torch.Tensor:
    """What tokens are drawn by, [R, vocab] in float32 (or wider): 1 for each row's likeliest.

    Probabilities but for the factor that makes them sum up to 1; 0 for tokens that are left out.
    logits: [R, vocab] of any float dtype, left as they are. The slots are none of the greedy ones.
    """
    wide = adjusted_logits(logits, slots)
    temperatures = torch.tensor([[slot.temperature] for slot in slots], dtype=wide.dtype)
    scores = wide / temperatures.to(wide.device)
    # The bound makes the weights of a row of nothing but -inf 0; there would be NaNs without it.
    peaks = scores.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    if not any(slot.filters for slot in slots):
        return scores.sub_(peaks).exp_()
    weights = (scores - peaks).exp_()
    leave_out(weights, scores, slots)
    return weights


def token_logprobs(
    logits: torch.Tensor, tokens: list[int] | torch.Tensor, counts: list[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of each row's token and of its counts[r] likeliest tokens.

    logits: [R, vocab] as the model gave them, of any float dtype: the model's own distribution,
    as vLLM's raw_logprobs. counts: -1 for the whole vocabulary. Among equals lower ids come first.
    """
    vocab_size = logits.shape[-1]
    owns = torch.as_tensor(tokens, dtype=torch.int64, device=logits.device)
    reports = []
    for start in range(0, len(counts), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        logprobs = torch.log_softmax(logits[rows], dim=-1, dtype=torch.float32)
        own = logprobs.gather(1, owns[rows, None])
        ranks = (logprobs > own).sum(dim=-1) + 1
        wanted = [vocab_size if c == -1 else min(c, vocab_size) for c in counts[rows]]
        best = logprobs.topk(max((c for c in wanted if c < vocab_size), default=0)).values
        for row, count in enumerate(wanted):
            least = best[row, count - 1] if 0 < count < vocab_size else None
            ids, values = _likeliest(logprobs[row], count, least)
            reports.append(
                TokenLogprobs(
                    [int(owns[start + row]), *ids],
                    [float(own[row]), *values],
                    int(ranks[row]),
                )
            )
    return reports


def _likeliest(
    logprobs: torch.Tensor, count: int, least: torch.Tensor | None
) -> tuple[list[int], list[float]]:
    """The `count` likeliest tokens of one row, [vocab], best first, and their log-probabilities.

    least: the last one's log-probability; None if count is 0 or all. topk alone would not say in
    which order equals come.
    """
    if count == 0:
        return [], []
    floor = -torch.inf if least is None else least
    ids = (logprobs >= floor).nonzero().squeeze(-1)
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return ids[order[:count]].tolist(), values[:count].tolist()


def _choose_natively(logits: torch.Tensor, slots: list[SlotSampling]) -> torch.Tensor:
    adjusting = [row for row, slot in enumerate(slots) if slot.adjusts]
    if not adjusting:
        return choose(logits, _choices(slots, range(len(slots))))
    tokens = torch.empty(len(slots), dtype=torch.int64)
    adjusters = [slots[row] for row in adjusting]
    adjusted = adjusted_logits(_rows(logits, adjusting), adjusters)
    tokens[adjusting] = choose(adjusted, _choices(adjusters, range(len(adjusting))))
    others = [row for row, slot in enumerate(slots) if not slot.adjusts]
    if others:
        tokens[others] = choose(logits, _choices([slots[row] for row in others], others))
    return tokens


def _choices(slots: list[SlotSampling], rows: Iterable[int]) -> np.ndarray:
    """What the kernel is told of each slot and its row of the logits."""
    return np.array(
        [
            (own.seed, own.next_index, row, own.top_k, own.top_p, own.temperature, own.min_p)
            for row, own in zip(rows, slots, strict=True)
        ],
        dtype=CHOICE,
    )


def _first_to_arrive(weights: torch.Tensor, slots: list[SlotSampling]) -> torch.Tensor:
    """One token per row of weights [R, vocab], overwritten; logits that are not numbers still give
    a token id."""
    for row, slot in zip(weights, slots, strict=True):
        times = waiting_times(slot.seed, slot.next_index, len(row))
        row.div_(torch.from_numpy(times).to(row.device))
    return weights.argmax(dim=-1)


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some of the rows, ascending; without copying where it can be."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1]
    return logits[rows]
