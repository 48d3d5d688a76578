"""GGUF files whose quantized weights stay as they are: against transformers, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from greedy import run_stages
from headrace.checkpoint.locate import locate_model
from headrace.kernels import path
from headrace.kernels.linear import Linear
from headrace.kernels.quantized_form import FORMS
from headrace.kernels.quantized_linear import QuantizedLinear
from headrace.protocol.model_config import StageShare
from model.test_architectures import load_reference
from quantized_checkpoints import rounds_activations, write_quantized
from stage_models import load_stage, read_model
from tiny_checkpoints import write_tiny_gguf

pytestmark = pytest.mark.skipif(not path.has_native(), reason="native kernels are not built")

LAYOUTS = {"pp=1": ([2], 1), "pp=2": ([1, 1], 1), "tp=2": ([2], 2)}
PROMPT = [5, 117, 23, 250, 88, 41, 7, 190, 33, 12, 276]


def mixed(name: str) -> str:
    """As files that mix kinds do; the output projection of attention is a float's."""
    kinds = {"v_proj": "Q6_K", "up_proj": "Q8_0", "embed": "Q5_K", "o_proj": "F16"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_K")


def assert_equals_transformers(file: Path, model: Path, layers: list[int], shards: int) -> None:
    """Logits are no further from those of transformers than twice what it moves them that linear
    layers round activations as the kernels do; so are the tokens' from the best.

    It moves them by a twentieth of their size at most. Not nearer: what rounds to a neighbour in
    one layer, by a last bit, moves all that comes after by as much as rounding does.
    """
    reference = load_reference(model)
    tokens, logits = run_stages(file, layers, PROMPT, 8, 16, shards, stored=True)
    inputs = torch.tensor([PROMPT + tokens])
    with torch.inference_mode():
        plain = reference(inputs).logits[0, len(PROMPT) - 1 : -1]
        for module in reference.modules():
            if isinstance(module, nn.Linear):
                rounds_activations(module)
        rounded = reference(inputs).logits[0, len(PROMPT) - 1 : -1]
    moved = float((rounded - plain).std())
    assert moved < 0.05 * float(plain.std())
    assert float((logits - plain).std()) < 2 * moved
    chosen = plain.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float((plain.amax(-1) - chosen).max()) < 10 * moved


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", FORMS)
def test_logits_and_greedy_tokens_of_each_kind_are_transformers(
    tmp_path: Path, kind: str, layout: str
) -> None:
    file, model = write_quantized(tmp_path, lambda name: kind)
    assert_equals_transformers(file, model, *LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=["untied", "tied", "biases"],
)
def test_mixed_kinds_ties_and_biases_give_transformers_logits(
    tmp_path: Path, options: dict[str, Any], layout: str
) -> None:
    file, model = write_quantized(tmp_path, mixed, **options)
    assert_equals_transformers(file, model, *LAYOUTS[layout])


def stage(file: Path, shard: tuple[int, int] = (0, 1), **ends: bool) -> Any:
    files = locate_model(str(file))
    model = read_model(files)
    share = StageShare(0, 2, **({"embeds": True, "samples": True} | ends))
    return load_stage(files, model, share, shard=shard, stored=True)


def test_a_table_that_is_also_the_output_projection_is_held_once(tmp_path: Path) -> None:
    file, _ = write_quantized(tmp_path, lambda name: "Q8_0", tie_word_embeddings=True)
    whole = stage(file)
    (table,) = whole.weights.tables.values()
    assert table in whole.weights.matrices.values()
    assert whole.weights.nbytes == stage(file, samples=False).weights.nbytes + 4 * 256
    # What the file takes for it, and the panels' last outputs.
    assert table.nbytes == 300 * 256 // 32 * 34
    assert table.nbytes <= table.parts[0].packed.nbytes < 1.1 * table.nbytes


def test_one_part_of_a_product_in_another_kind_has_all_of_it_dequantized(tmp_path: Path) -> None:
    file, _ = write_quantized(tmp_path, lambda name: "F16" if "up_proj" in name else "Q4_0")
    held = {m.parts[0].name: type(w) for m, w in stage(file).weights.matrices.items()}
    assert held["blk.0.ffn_gate.weight"] is Linear
    assert held["blk.0.attn_q.weight"] is QuantizedLinear


def test_columns_that_are_no_whole_blocks_are_dequantized(tmp_path: Path) -> None:
    """Each of two shards has two heads of 8: half a block of the 32 columns."""
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    file, model = write_quantized(tmp_path, lambda name: "Q4_0", **sizes)
    held = {m.parts[0].name: w for m, w in stage(file, (1, 2)).weights.matrices.items()}
    assert isinstance(held["blk.0.attn_output.weight"], Linear)
    assert isinstance(held["blk.0.ffn_down.weight"], QuantizedLinear)
    assert isinstance(held["blk.0.attn_q.weight"], QuantizedLinear)
    tokens, logits = run_stages(file, [2], PROMPT, 8, 16, 2, stored=True)
    with torch.inference_mode():
        expected = load_reference(model)(torch.tensor([PROMPT + tokens])).logits[0, 10:-1]
    assert float((logits - expected).std()) < 0.2 * float(expected.std())


def test_whether_a_file_has_weights_that_could_stay_is_known(tmp_path: Path) -> None:
    files = locate_model(str(write_tiny_gguf(tmp_path / "model.gguf")))
    assert not read_model(files).sizes.has_stored
    assert read_model(locate_model("smollm2")).sizes.has_stored
