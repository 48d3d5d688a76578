"""Token feedback: the last steps' sampled tokens, where references are looked up."""

import numpy as np
import torch

from headrace.protocol.plan import Plan, TokenRef, row_samples

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

    def gather(self, inputs: "InputIds") -> torch.Tensor:
        """The plan's input tokens in row order, int64 [tokens], references looked up.

        Raises LookupError if a reference names a step that is not in the ring or a row that sampled
        nothing; the caller has waited for all steps it names.
        """
        # As lists: for so few numbers torch takes several times as long to gather them.
        fed = {step: self.buffer(step).tolist() for step in inputs.steps}
        ids = inputs.ids
        for place, step, row in inputs.references:
            count, ids[place] = fed[step][row]
            if count != 1:
                raise LookupError(f"a reference names row {row} of step {step}: it sampled nothing")
        return torch.tensor(ids, dtype=torch.int64, device=self._places.device)


class InputIds:
    """A plan's input tokens, prepared so that little is left to do once the feedback is there.

    ids: in row order, 0 for references; references: place among them, step and row of each. steps:
    those that they name, ascending.
    """

    def __init__(self, plan: Plan) -> None:
        self.ids: list[int] = []
        self.references: list[tuple[int, int, int]] = []
        for row in plan.rows:
            for token in row.inputs:
                if isinstance(token, TokenRef):
                    self.references.append((len(self.ids), token.step, token.row))
                    self.ids.append(0)
                else:
                    self.ids.append(token)
        self.steps = sorted({step for _, step, _ in self.references})


class Feedback:
    """A step's feedback on the last stage, prepared before its tokens are there.

    rows: those that sample.
    """

    def __init__(self, plan: Plan) -> None:
        self.rows = [number for number, row in enumerate(plan.rows) if row_samples(row)]
        self._encoded = np.zeros((len(plan.rows), 1 + WIDTH), dtype=np.int32)
        self._encoded[self.rows, 0] = 1

    def encode(self, tokens: list[int], device: torch.device) -> torch.Tensor:
        """int32 [rows, 1 + WIDTH] with the tokens of the rows that sample, in row order; count 0
        for the others."""
        if len(tokens) != len(self.rows):
            raise ValueError(f"{len(tokens)} tokens were sampled for {len(self.rows)} rows")
        self._encoded[self.rows, 1] = tokens
        return torch.from_numpy(self._encoded).to(device)
