"""Token feedback: the last steps' sampled tokens, where references are looked up."""

import numpy as np
import torch

from headrace.protocol.plan import Plan, TokenRef, referenced_steps

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
        # By place: whose it is, and the part of it that this step's rows take.
        self._step_at: list[int | None] = [None] * places
        self._buffer_at: list[torch.Tensor] = list(self._places)

    def occupant(self, step: int) -> int | None:
        """The step whose feedback holds the place that `step` would take."""
        return self._step_at[step % len(self._step_at)]

    def claim(self, step: int, rows: int) -> torch.Tensor:
        """Give step its place, int32 [rows, 1 + WIDTH], for its feedback.

        What was there can no longer be looked up.
        """
        place = step % len(self._step_at)
        self._step_at[place] = step
        self._buffer_at[place] = self._places[place, :rows]
        return self._buffer_at[place]

    def buffer(self, step: int) -> torch.Tensor:
        """The place of a step that has one; LookupError otherwise."""
        if self.occupant(step) != step:
            raise LookupError(f"the feedback of step {step} is not held")
        return self._buffer_at[step % len(self._step_at)]

    def input_ids(self, plan: Plan) -> torch.Tensor:
        """The plan's input tokens in row order, int64 [tokens], references looked up.

        Raises LookupError if a reference names a step that is not in the ring or a row that sampled
        nothing; the caller has waited for all steps it names.
        """
        # As lists: for so few numbers torch takes several times as long to gather them.
        fed = {step: self.buffer(step).tolist() for step in referenced_steps(plan)}
        ids: list[int] = []
        for row in plan.rows:
            for token in row.inputs:
                if isinstance(token, TokenRef):
                    count, value = fed[token.step][token.row]
                    if count != 1:
                        raise LookupError(f"step {plan.step} refers to a row that sampled nothing")
                    ids.append(value)
                else:
                    ids.append(token)
        return torch.tensor(ids, dtype=torch.int64, device=self._places.device)


def encode_feedback(tokens: torch.Tensor, yielding: list[int], rows: int) -> torch.Tensor:
    """Feedback of one step, int32 [rows, 1 + WIDTH]: count 0 for rows that sampled nothing.

    tokens: int64 [len(yielding)], what the rows listed in yielding sampled.
    """
    feedback = np.zeros((rows, 1 + WIDTH), dtype=np.int32)
    feedback[yielding, 0] = 1
    feedback[yielding, 1] = tokens.tolist()
    return torch.from_numpy(feedback).to(tokens.device)
