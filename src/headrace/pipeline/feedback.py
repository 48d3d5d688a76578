"""Token feedback: the last steps' sampled tokens, where references are looked up."""

import torch

from headrace.protocol.plan import Plan, TokenRef

# Contract 2: count, then `width` tokens.
WIDTH = 1


class FeedbackRing:
    """Feedback of the last steps, int32 [2 * window - 1, max_rows, 1 + WIDTH].

    A step's place is its number modulo the number of places. A plan p refers at most window - 1
    steps back: older results were with the engine, which then sends ids. While p has not run, its
    own result is missing, so the newest plan held is at most p + window - 1. A place claimed for
    that one must not be a place p still reads: hence 2 * window - 1 places.
    """

    def __init__(self, window: int, max_rows: int, device: torch.device) -> None:
        places = 2 * window - 1
        self._places = torch.zeros(places, max_rows, 1 + WIDTH, dtype=torch.int32, device=device)
        self._step_at: list[int | None] = [None] * places

    def buffer(self, step: int, rows: int) -> torch.Tensor:
        """The part of the ring that step's feedback goes to, int32 [rows, 1 + WIDTH]."""
        return self._places[step % len(self._step_at), :rows]

    def occupant(self, step: int) -> int | None:
        """The step whose feedback holds the place that `step` would take."""
        return self._step_at[step % len(self._step_at)]

    def claim(self, step: int) -> None:
        """Give step its place; what was there can no longer be looked up."""
        self._step_at[step % len(self._step_at)] = step
        self._places[step % len(self._step_at)] = 0

    def input_ids(self, plan: Plan) -> torch.Tensor:
        """The plan's input tokens in row order, int64 [tokens], references looked up.

        Raises LookupError if a reference names a step that is not in the ring or a row that sampled
        nothing; the caller has waited for all steps it names.
        """
        ids: list[int] = []
        positions, places, rows = [], [], []
        for row in plan.rows:
            for token in row.inputs:
                if isinstance(token, TokenRef):
                    if self.occupant(token.step) != token.step:
                        raise LookupError(
                            f"step {plan.step} refers to step {token.step}, which is not held"
                        )
                    positions.append(len(ids))
                    places.append(token.step % len(self._step_at))
                    rows.append(token.row)
                    ids.append(0)
                else:
                    ids.append(token)
        device = self._places.device
        result = torch.tensor(ids, dtype=torch.int64, device=device)
        if positions:
            found = self._places[places, rows]
            if not (found[:, 0] == 1).all():
                raise LookupError(f"step {plan.step} refers to a row that sampled nothing")
            result[positions] = found[:, 1].to(torch.int64)
        return result


def encode_feedback(tokens: torch.Tensor, yielding: list[int], rows: int) -> torch.Tensor:
    """Feedback of one step, int32 [rows, 1 + WIDTH]: count 0 for rows that sampled nothing.

    tokens: int64 [len(yielding)], what the rows listed in yielding sampled.
    """
    feedback = torch.zeros(rows, 1 + WIDTH, dtype=torch.int32, device=tokens.device)
    feedback[yielding, 0] = 1
    feedback[yielding, 1] = tokens.to(torch.int32)
    return feedback
