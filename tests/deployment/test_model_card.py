"""What a card says of a model that was started."""

from headrace.config import EngineConfig
from headrace.deployment.virtual import launch_virtual


def test_a_card_tells_people_in_a_line_how_the_model_is_served() -> None:
    config = EngineConfig(
        model="synthetic:1+0", pipeline_parallel_size=2, max_num_seqs=3, max_model_len=64
    )
    card = launch_virtual(config).card
    assert card.name == "synthetic:1+0"
    assert [stage.layers for stage in card.stages] == [1, 1]
    assert card.num_blocks * card.block_size == 3 * 64
    assert card.line == (
        f"{card.dtype}, 2 stages with 1 and 1 layers, no kernels, cache for 192 tokens "
        "(0 MiB a stage), at most 64 tokens a sequence, 3 sequences at once"
    )
