"""Write a model's tokenizer as a directory that transformers reads.

usage: python export_tokenizer.py MODEL FOLDER    (MODEL: a GGUF file or smollm2)
"""

import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import locate_model
from headrace.checkpoint.tokenizer import tokenizer_of_gguf
from headrace.model.read import model_from_gguf


def main(model: str, folder: Path) -> None:
    file = read_gguf(locate_model(model).path)
    core = tokenizer_of_gguf(file).core
    end = core.id_to_token(model_from_gguf(file).sizes.eos_token_ids[0])
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(str(__doc__))
    main(sys.argv[1], Path(sys.argv[2]))
