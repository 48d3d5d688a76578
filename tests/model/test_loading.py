"""What loading takes besides the weights, and that it says how far it is."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch

from gguf_conversion import convert
from tiny_checkpoints import write_tiny_llama

# In a process of its own: the most that it ever had, before and after, and what it was told.
_LOAD = """
import json, resource, sys, torch
from pathlib import Path
from headrace.checkpoint.locate import locate_model
from headrace.model.bind import bind
from headrace.model.weights import gguf_file, open_tensors
from headrace.model.shards import shard_program
from headrace.protocol.model_config import StageShare
from stage_models import read_model, whole

def most():
    # What the files' pages take in the page cache is not this process's.
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmHWM"].split()[0]) * 1024

torch.set_num_threads(1)
path, shard, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
stays = len(sys.argv) > 4
files = locate_model(path)
model, source = read_model(files), open_tensors(files)

def load(program, progress):
    with torch.inference_mode():
        cut = shard_program(program, shard, count)
        stored = gguf_file(source) if stays else None
        cpu = torch.device("cpu")
        return bind(cut, source, torch.bfloat16, cpu, 64, progress, stored=stored)

# What is made once, with the first layers.
first = load(model.program(StageShare(0, 2, embeds=True, samples=True)), lambda _: None)
del first
Path("/proc/self/clear_refs").write_text("5")
before, told = most(), []
weights = load(whole(model), told.append)
print(json.dumps({"extra": most() - before, "weights": weights.nbytes, "told": told}))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Some 100 million weights, none of whose matrices is more than a twentieth."""
    folder = tmp_path_factory.mktemp("loading")
    path = write_tiny_llama(
        folder / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=24,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=3000, dtype=torch.bfloat16,
    )  # fmt: skip
    file = convert(path, folder / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    return {"safetensors": path, "GGUF": file}


@pytest.mark.parametrize("kind", ["safetensors", "GGUF", "GGUF stored"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_stage_takes_little_more_than_its_weights_while_it_loads(
    checkpoints: dict[str, Path], kind: str, count: int
) -> None:
    name, *stays = kind.split()
    arguments = [str(checkpoints[name]), "0", str(count), *stays]
    answer = subprocess.run(
        [sys.executable, "-c", _LOAD, *arguments],
        stdout=subprocess.PIPE,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    said = json.loads(answer.stdout)
    assert said["extra"] < 1.2 * said["weights"]
    assert said["told"] == sorted(said["told"])
    assert said["told"][-1] == 1
    # The layers come evenly.
    assert max(b - a for a, b in zip(said["told"], said["told"][1:], strict=False)) < 0.1
