"""Token feedback: the last steps' sampled tokens, where references are looked up."""

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
        fed = {step: self._tokens_of(step, plan) for step in referenced_steps(plan)}
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

    def _tokens_of(self, step: int, plan: Plan) -> list[list[int]]:
        """Counts and tokens of the step's rows, as far as the plan refers to them.

        As lists: for so few numbers torch takes several times as long to gather them.
        """
        if self.occupant(step) != step:
            raise LookupError(f"step {plan.step} refers to step {step}, which is not held")
        rows = max(
            token.row
            for row in plan.rows
            for token in row.inputs
            if isinstance(token, TokenRef) and token.step == step
        )
        held: list[list[int]] = self.buffer(step, rows + 1).tolist()
        return held


def encode_feedback(tokens: torch.Tensor, yielding: list[int], rows: int) -> torch.Tensor:
    """Feedback of one step, int32 [rows, 1 + WIDTH]: count 0 for rows that sampled nothing.

    tokens: int64 [len(yielding)], what the rows listed in yielding sampled.
    """
    feedback = [[0, 0] for _ in range(rows)]
    for row, token in zip(yielding, tokens.tolist(), strict=True):
        feedback[row] = [1, token]
    return torch.tensor(feedback, dtype=torch.int32, device=tokens.device)
