"""Tokenizers of directories equal transformers' own; chats go through the model's template."""

import json
import threading
import time
from pathlib import Path

import pytest

from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import locate_model
from headrace.checkpoint.tokenizer import tokenizer_from_huggingface, tokenizer_of_gguf
from headrace.errors import ModelError, UsageError
from headrace.prompts import tokenized_chat
from tiny_checkpoints import write_byte_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, 12 é"},
]


def test_a_directorys_tokenizer_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_byte_tokenizer(tmp_path)
    ours, theirs = tokenizer_from_huggingface(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ["", "hello", "naïve 東京<end>", "x" * 500]:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokenized_chat(CHAT, ours, 1000).token_ids == expected


def test_other_threads_run_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    """Longer and longer texts, until one takes long enough to tell: if it held Python's lock,
    others would run before it and after it, however long it is."""
    write_byte_tokenizer(tmp_path)
    tokenizer = tokenizer_from_huggingface(tmp_path)
    turns, size = 0, 2**17
    while turns < 20 and size <= 2**26:
        turns, size = 0, 2 * size
        encoding = threading.Thread(target=tokenizer.encode, args=["a" * size])
        encoding.start()
        while encoding.is_alive():
            turns += 1
            time.sleep(0.001)
    assert turns >= 20


def test_truncation_stored_with_a_tokenizer_does_not_cut_prompts(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    file.write_text(json.dumps(content), encoding="utf-8")
    assert len(tokenizer_from_huggingface(tmp_path).encode("ten letter")) == 10


def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="has no chat template"):
        tokenized_chat(CHAT, tokenizer_from_huggingface(tmp_path), 1000)
    file = read_gguf(locate_model("smollm2").path)
    file.metadata.pop("tokenizer.chat_template")
    with pytest.raises(UsageError, match="has no chat template"):
        tokenized_chat(CHAT, tokenizer_of_gguf(file), 1000)


def test_a_template_that_refuses_the_messages_says_why() -> None:
    file = read_gguf(locate_model("smollm2").path)
    file.metadata["tokenizer.chat_template"] = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="roles must alternate"):
        tokenized_chat(CHAT, tokenizer_of_gguf(file), 1000)
    file.metadata["tokenizer.chat_template"] = "{{ ''.__class__.__mro__ }}"
    with pytest.raises(UsageError, match="refuses"):
        tokenized_chat(CHAT, tokenizer_of_gguf(file), 1000)


def test_a_directory_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        tokenizer_from_huggingface(tmp_path)


def test_a_tokenizers_own_code_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_tokenizer(tmp_path)
    mark = tmp_path / "it-ran"
    (tmp_path / "own.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class T(PreTrainedTokenizerFast): pass\n"
    )
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings |= {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["own.T", None]}}
    file.write_text(json.dumps(settings), encoding="utf-8")
    asked = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    with pytest.raises(
        ModelError, match=r"code of the directory's own \(auto_map\), which is never"
    ):
        tokenizer_from_huggingface(tmp_path)
    assert not mark.exists()
    assert asked == []
