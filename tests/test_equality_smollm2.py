"""Greedy tokens of the real model equal those of Hugging Face transformers."""

import pytest
import torch

from conftest import Oracle
from headrace import LLM, SamplingParams
from headrace.checkpoint.locate import locate_model
from headrace.kernels import path
from headrace.kernels.batch import AttentionBatch
from headrace.prompts import tokenized_chat
from stage_models import load_stage, read_model

OUTPUT_LEN = 64


# One stage alone has no feedback to wait for. The longest answers first: what transformers says of
# them it says of their beginnings too.
@pytest.mark.parametrize(
    ("stages", "feedback"),
    [(2, "deferred"), (1, "deferred"), (3, "deferred"), (3, "blocking")],
)
def test_float32_tokens_equal_transformers(
    smollm2_oracle: Oracle, stages: int, feedback: str
) -> None:
    # What the others could get wrong shows in the first tokens.
    length = OUTPUT_LEN if (stages, feedback) == (2, "deferred") else OUTPUT_LEN // 3
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    prompts = smollm2_oracle.prompts
    # A budget of 100 tokens a step makes chunks of the long prompts.
    with LLM(
        "smollm2",
        dtype="float32",
        pipeline_parallel_size=stages,
        token_feedback=feedback,
        max_model_len=512,
        max_num_seqs=14,
        max_num_batched_tokens=100,
    ) as llm:
        answers = llm.generate(prompts, params)
        # Alone, its first steps are chunks that sample nothing.
        longest = max(prompts, key=len)
        assert len(longest) > 100
        (alone,) = llm.generate([longest], SamplingParams(temperature=0, max_tokens=8))
    assert len(alone.outputs[0].token_ids) == 8
    assert all(len(answer.outputs[0].token_ids) == length for answer in answers)
    for prompt, answer in zip([*prompts, longest], [*answers, alone], strict=True):
        tokens = answer.outputs[0].token_ids
        assert tokens == smollm2_oracle.greedy(prompt, tokens)


@pytest.mark.skipif(not path.has_native(), reason="native kernels are not built")
def test_logits_of_stored_weights_are_within_a_sixteenth_of_transformers(
    smollm2_oracle: Oracle,
) -> None:
    """That much rounding activations to 8 bits in each of 30 layers moves them, and no more."""
    files = locate_model("smollm2")
    stage = load_stage(files, read_model(files), max_model_len=512, stored=True)
    stage.allocate(num_blocks=32, block_size=16)
    prompt = torch.tensor(max(smollm2_oracle.prompts, key=len)[:512])
    count, places = len(prompt), torch.arange(len(prompt))
    batch = AttentionBatch(
        places, places, torch.arange(32)[None], torch.tensor([0, count]), torch.tensor([count]),
        [count], [count],
    )  # fmt: skip
    with torch.inference_mode():
        found = stage.logits(stage.forward(prompt, batch))
        expected = smollm2_oracle.model(prompt[None]).logits[0]
    assert float((found - expected).std()) < float(expected.std()) / 16
    likeliest = found.argmax(-1) == expected.argmax(-1)
    assert float(likeliest.float().mean()) > 0.8


def test_bfloat16_chat_knows_the_capital_of_france() -> None:
    with LLM("smollm2", dtype="bfloat16", pipeline_parallel_size=2, max_model_len=512) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenized_chat(question, llm.tokenizer, 1000).token_ids
        answer = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=32))[0]
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"
