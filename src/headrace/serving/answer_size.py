"""How many log-probabilities an answer may hold."""

from collections.abc import Mapping, Sequence

from headrace.sampling_params import SamplingParams
from headrace.serving.api_errors import ApiError

# Some 80 MB of JSON; a batch of 64 prompts of 8,000 tokens with one likeliest token each has room.
MOST_ENTRIES = 2**20
# Of each position, in an answer that is as long as a sequence may be: what --max-logprobs is by
# default, and the token itself.
_ALWAYS = 21


def check_answer_size(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    report_shown: int,
    echoed: bool,
    max_model_len: int,
    vocab_size: int,
    fields: Mapping[str, str],
) -> None:
    """Raises ApiError, naming the field, if the answer could hold too much: it is all gathered, or
    waits for a slow reader, and is written for everybody's turn.

    report_shown: how often each prompt's log-probabilities are in it. echoed: each choice begins
    with its prompt, without any: tokens of it count like one. fields: SamplingParams' names,
    with what the request calls them; "prompt_logprobs" is what asked for the report.
    """

    def entries(count: int | None) -> int:
        if count is None:
            return 0
        return 1 + (vocab_size if count == -1 else min(count, vocab_size))

    prompt_tokens = sum(map(len, prompts))
    positions = sum(
        min(max_model_len - len(prompt), params.max_tokens or max_model_len) for prompt in prompts
    )
    of_prompts = prompt_tokens * entries(params.prompt_logprobs) * report_shown
    of_answers = positions * entries(params.logprobs) * params.n
    of_echo = prompt_tokens * params.n if echoed else 0
    most = max(MOST_ENTRIES, _ALWAYS * max_model_len)
    total = of_prompts + of_answers + of_echo
    if total <= most:
        return
    n = fields["n"]
    if of_prompts >= max(of_answers, of_echo):
        field, lower = fields["prompt_logprobs"], f"{n}, {fields['prompt_logprobs']}"
        reason = f"{prompt_tokens} prompt tokens, each shown {report_shown} times"
        reason += f" with {entries(params.prompt_logprobs)}"
    elif of_answers >= of_echo:
        field, lower = (
            fields["logprobs"],
            f"{fields['max_tokens']}, {n}, {fields['logprobs']}",
        )
        reason = f"up to {positions} tokens, {params.n} times, with {entries(params.logprobs)} each"
    else:
        field, lower = "echo", n
        reason = f"{prompt_tokens} prompt tokens, each shown {params.n} times"
    raise ApiError(
        400,
        f"{field}: the answer could hold {total} log-probabilities ({reason}), more than the "
        f"{most} that one answer may: lower {lower}, or ask for fewer prompts at once",
        param=field,
    )
