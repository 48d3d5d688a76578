"""Published chat templates: a file and a directory render them as transformers does.

The templates are those that models were published with, llama3.2's and smollm3's shortened.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.tokenizer import Tokenizer, tokenizer_from_huggingface, tokenizer_of_gguf
from headrace.conversation import render_conversation
from headrace.errors import UsageError
from tiny_checkpoints import write_byte_tokenizer, write_tiny_gguf

DATA = Path(__file__).parent / "data" / "chat_templates"
TEMPLATES = sorted(path.stem for path in DATA.iterdir())
TOKENS = {"bos": 257, "eos": 299, "unknown": 258, "padding": 259}

SYSTEM = {"role": "system", "content": " Be brief, say 'you' & <b>.\n"}
USER = {"role": "user", "content": '  Wie wird\'s in Köln? <3 & "5°C"\n'}
ANSWER = {"role": "assistant", "content": " It's\n<think>hm</think>\n\nsunny & 20°C "}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": {"where": "Köln <Dom> & 'Rhein'", "days": [1, 2]}},
}
OTHER_CALL = {**CALL, "id": "call23456", "function": {"name": "time", "arguments": {}}}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "{'sky': \"<blue>\"} für 2 €"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, USER, ANSWER, USER],
    "system and turns": [SYSTEM, USER, ANSWER, USER],
    "ends with an answer": [SYSTEM, USER, ANSWER],
    "a call": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT, USER],
    "a call and words": [USER, {**ANSWER, "tool_calls": [CALL]}, RESULT],
    "two calls": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL, OTHER_CALL]},
        RESULT,
        {**RESULT, "tool_call_id": "call23456"},
    ],
    "thoughts": [
        USER,
        {**ANSWER, "reasoning_content": "hm & <so>"},
        USER,
        {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "well"},
        RESULT,
    ],
    "two users": [USER, USER],
}
OPTIONS: list[dict[str, Any]] = [{}, {"enable_thinking": False, "date_string": "1 Jan 2026"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory and a file with the same special tokens, and no template."""
    folder = tmp_path_factory.mktemp("models")
    write_byte_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = {"bos": "bos", "unknown": "unk", "padding": "pad"}
    config |= {f"{names[name]}_token": f"<extra{TOKENS[name]}>" for name in names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    write_tiny_gguf(folder / "model.gguf")
    return folder


def both(models: Path, template: str) -> tuple[Tokenizer, Tokenizer, PreTrainedTokenizerBase]:
    """The file's tokenizer, the directory's, and transformers' own of the directory."""
    file = read_gguf(models / "model.gguf")
    for name, token in TOKENS.items():
        file.metadata[f"tokenizer.ggml.{name}_token_id"] = token
    file.metadata["tokenizer.chat_template"] = template
    (models / "chat_template.jinja").write_text(template)
    theirs: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(models)
    return tokenizer_of_gguf(file), tokenizer_from_huggingface(models), theirs


@lru_cache
def published(name: str) -> str:
    return (DATA / f"{name}.jinja").read_text().removesuffix("\n")


def as_sent(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat as OpenAI's clients send it: arguments are texts, and nothing is left out."""
    sent: list[dict[str, Any]] = json.loads(json.dumps(chat))
    for message in sent:
        message.setdefault("content", None)
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


def rendered(tokenizer: Tokenizer, chat: list[dict[str, Any]], begin: bool, options: Any) -> str:
    try:
        return render_conversation(chat, tokenizer, 10_000, begin, options)
    except UsageError as error:
        return f"refused: {error}"


def transformers_says(
    theirs: PreTrainedTokenizerBase, chat: list[dict[str, Any]], begin: bool, options: Any
) -> str:
    try:
        return str(
            theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=begin, **options)
        )
    except Exception as error:
        return f"refused: the chat template refuses the messages: {error}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_files_and_directories_render_as_transformers_does(models: Path, name: str) -> None:
    file, directory, theirs = both(models, published(name))
    shown = 0
    for title, chat in CHATS.items():
        for begin in (True, False):
            for options in OPTIONS:
                found = rendered(file, as_sent(chat), begin, options)
                assert rendered(directory, as_sent(chat), begin, options) == found, title
                expected = transformers_says(theirs, chat, begin, options)
                if "no attribute 'content'" in expected:
                    # Those templates are given empty contents.
                    filled = [{"content": "", **message} for message in chat]
                    expected = transformers_says(theirs, filled, begin, options)
                if expected.startswith("refused"):
                    assert found == expected, title
                    continue
                if "has no calls of tools" in found:
                    # What transformers renders does not have them.
                    assert '"days": [1, 2]' not in expected, title
                    continue
                assert found == expected, title
                shown += 1
    assert shown > 4


def test_templates_that_know_calls_of_tools_show_them(models: Path) -> None:
    for name in ("llama3.1", "llama3.2", "mistral-v0.3", "qwen2.5", "qwen3"):
        file, _, _ = both(models, published(name))
        found = rendered(file, as_sent(CHATS["a call and words"]), True, {})
        assert '{"where": "Köln <Dom> & \'Rhein\'", "days": [1, 2]}' in found


SMALL_TEMPLATES = {
    "tojson": "{{ messages | tojson }} {{ messages | tojson(indent=2) }}"
    "{{ messages | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
    "joined": "{{ '<a>' + (messages[0] | tojson) + '<b>' ~ messages[0].content | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "spaces": "{% for m in messages %}\n    {% if true %}\n  {{ m.content }}\n  {% endif %}\n"
    "{% endfor %}\n\n",
    "none": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}"
    "{{ other is defined }}",
    "tokens": "{{ bos_token + eos_token + unk_token + pad_token }}{{ sep_token is defined }}"
    "{{ eot_token is defined }}",
    "dict": "{% set d = dict(a=1, **{'b': 2}) %}{{ d | tojson }}{{ dict.fromkeys(['a']) }}",
    "namespace": "{% set n = namespace(x=1) %}{% set n.x = n.x * 3 + 2 ** 3 %}{{ n.x }}"
    "{{ '-' * 5 }}",
    "macro": "{% macro f(m) %}<{{ m.content }}>{% endmacro %}{% for m in messages %}{{ f(m) }}"
    "{% endfor %}{% set all %}{{ messages[0].content }}!{% endset %}{{ all }}{{ all | length }}",
    "year": "{{ strftime_now('%Y') }}",
    "numbers": "{{ 7 / 2 }} {{ 7 // 2 }} {{ 1.0 }} {{ true }} {{ none }} {{ [1, 'a'] }}",
}


@pytest.mark.parametrize("source", SMALL_TEMPLATES.values(), ids=SMALL_TEMPLATES)
def test_what_templates_may_use_means_what_it_means_to_transformers(
    models: Path, source: str
) -> None:
    file, directory, theirs = both(models, source)
    chat = CHATS["system and turns"]
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered(file, chat, True, {}) == expected
    assert rendered(directory, chat, True, {}) == expected


NAMED = {"tool_use": "tools: {{ messages[0].tool_calls }}", "rag": "{{ documents }}"}


def test_of_several_templates_a_chat_gets_the_default_one(models: Path) -> None:
    (models / "chat_template.jinja").unlink(missing_ok=True)
    config = models / "tokenizer_config.json"
    before = config.read_text()
    file = read_gguf(models / "model.gguf")
    for name, template in NAMED.items():
        file.metadata[f"tokenizer.chat_template.{name}"] = template
    try:
        listed = [{"name": name, "template": template} for name, template in NAMED.items()]
        config.write_text(json.dumps({**json.loads(before), "chat_template": listed}))
        for tokenizer in (tokenizer_of_gguf(file), tokenizer_from_huggingface(models)):
            assert "rag, tool_use, but no default" in rendered(tokenizer, [USER], True, {})
        listed.append({"name": "default", "template": "[{{ messages[0].content }}]"})
        config.write_text(json.dumps({**json.loads(before), "chat_template": listed}))
        file.metadata["tokenizer.chat_template"] = "[{{ messages[0].content }}]"
        for tokenizer in (tokenizer_of_gguf(file), tokenizer_from_huggingface(models)):
            assert rendered(tokenizer, [USER], True, {}) == f"[{USER['content']}]"
            assert "has no calls of tools" in rendered(tokenizer, CHATS["a call"], True, {})
    finally:
        config.write_text(before)


def test_additional_templates_of_a_directory_are_no_default(models: Path) -> None:
    extra = models / "additional_chat_templates"
    extra.mkdir()
    try:
        (extra / "tool_use.jinja").write_text(NAMED["tool_use"])
        (models / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
        tokenizer = tokenizer_from_huggingface(models)
        assert rendered(tokenizer, [USER], True, {}) == f"<{USER['content']}>"
    finally:
        (extra / "tool_use.jinja").unlink()
        extra.rmdir()


def test_a_start_token_is_named_as_the_tokenizer_puts_it(models: Path) -> None:
    source = "{{ bos_token is defined }}{{ bos_token }}"
    file = read_gguf(models / "model.gguf")
    file.metadata["tokenizer.chat_template"] = source
    assert rendered(tokenizer_of_gguf(file), [USER], True, {}) == "False"
    # llama.cpp's, where the file asks for one and does not name it.
    file.metadata["tokenizer.ggml.add_bos_token"] = True
    tokenizer = tokenizer_of_gguf(file)
    (begin,) = tokenizer.encode("")
    assert rendered(tokenizer, [USER], True, {}) == f"True{tokenizer.core.id_to_token(begin)}"
