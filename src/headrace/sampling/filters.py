"""min_p, top_k and top_p: which tokens may be drawn."""

import torch

from headrace.sampling.slot import SlotSampling


def leave_out(weights: torch.Tensor, scores: torch.Tensor, slots: list[SlotSampling]) -> None:
    """Set the weights of the tokens that each slot's filters leave out to 0, in place.

    scores: [R, vocab] logits over temperature; weights: exp(scores - the row's greatest score).
    Each filter keeps the tokens at or above some value: tokens that are equally likely stay or go
    together. vLLM and transformers do so too for min_p and top_k; for top_p, where they let the
    sorting decide which of several equals are the last to stay, all of them stay here. top_p comes
    last and looks at what min_p and top_k left.
    """
    if any(slot.min_p > 0 for slot in slots):
        least = torch.tensor([[slot.min_p] for slot in slots], dtype=weights.dtype)
        weights.masked_fill_(weights < least.to(weights.device), 0)
    _leave_out_beyond_top_k(weights, scores, [slot.top_k for slot in slots])
    rows = [row for row, slot in enumerate(slots) if slot.top_p < 1]
    if rows:
        totals = weights.cumsum(-1, dtype=torch.float64)[:, -1].tolist()
        for row in rows:
            _leave_out_beyond_top_p(weights[row], slots[row].top_p, totals[row])


def _leave_out_beyond_top_k(weights: torch.Tensor, scores: torch.Tensor, ks: list[int]) -> None:
    """ks: one a row; 0 leaves out nothing."""
    if not any(ks):
        return
    best = scores.topk(max(ks)).values
    least = torch.full_like(best[:, :1], -torch.inf)
    for row, k in enumerate(ks):
        if k:
            least[row] = best[row, k - 1]
    weights.masked_fill_(scores < least, 0)


def _leave_out_beyond_top_p(weights: torch.Tensor, top_p: float, total: float) -> None:
    """For one row, [vocab], whose weights sum up to total.

    vLLM and transformers drop tokens while the probabilities from the least likely up to and with
    them sum up to at most 1 - top_p. From the other end: a token stays while those likelier than
    it sum up to less than top_p.
    """
    # Sorting the heaviest tokens alone is far quicker. They are enough if the cut lies among them,
    # and where it lies depends on those above it only. All tokens lighter than the last bound go in
    # any case: they sum up to less than 1 - top_p, and the total is at least the likeliest's 1.
    for lightest in ((1 - top_p) / 16, (1 - top_p) / 512, (1 - top_p) / len(weights)):
        heaviest = weights[weights > lightest].sort(descending=True).values
        sums = heaviest.cumsum(-1, dtype=torch.float64)
        cut = int(torch.searchsorted(sums, top_p * total))
        if cut < len(heaviest):
            weights.masked_fill_(weights < heaviest[cut], 0)
            return
