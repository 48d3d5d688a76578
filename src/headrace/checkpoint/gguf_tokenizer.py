"""The tokenizer that a GGUF file describes, built with the `tokenizers` library.

llama.cpp defines what these metadata mean, in code alone: src/llama-vocab.cpp (pre-tokenizer
names, their patterns, defaults, which tokens are atomic) and src/unicode.cpp (how patterns are
applied: each splits what the one before left, and what it doesn't match is a word too). Those two
files are the source of every table here, and of nothing but the facts in them.

Known differences, all in texts or files that hardly occur:
- where special tokens overlap in the text, llama.cpp takes the longest first, this the leftmost;
- between different SentencePiece pieces of equal score, llama.cpp merges the leftmost first, this
  the smaller id; and this needs every character of a piece to be a piece or bytes of its own;
- characters that Unicode assigned lately may be cut differently, as the two Unicode tables differ.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreSequence
from tokenizers.processors import TemplateProcessing

from headrace.checkpoint.gguf_file import GgufFile
from headrace.errors import ModelError


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, of the kinds that matter here."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True)
class _Rule:
    """How a byte-level vocabulary cuts text into words before it merges.

    With `ignore_merges`, a word that is a token is taken whole; `add_bos` holds when the file
    doesn't say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# llama.cpp writes this one without its last alternative and has it in the hand-written matcher.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _PUNCTUATION
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _PUNCTUATION
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _SPACES
)
# Words that end in, or begin with, letters that aren't ASCII capitals; llama.cpp approximates
# the letter cases of the original so, and files are tokenized as llama.cpp does it.
_LOWER_ENDED = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
_UPPER_BEGUN = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_TEKKEN = rf"{_LOWER_ENDED}|{_UPPER_BEGUN}|\p{{N}}|{_SLASHED}"
_GPT4O = rf"{_LOWER_ENDED}{_CONTRACTION}?|{_UPPER_BEGUN}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SLASHED}"
# DeepSeek's letters that have cases, its punctuation, and what it takes for Chinese, Japanese and
# Korean. llama.cpp matches these classes against a text in which every space is the same, so U+3000
# and its like are spaces, although they lie in the ranges.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002"
_DEEPSEEK_CJK = "(?:(?!\\s)[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff])+"
# The names of `tokenizer.ggml.pre` that llama.cpp knows, by what they mean.
_NAMES_BY_RULE = [
    (
        _Rule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "default",
    ),
    (
        _Rule((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (_Rule((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (
        _Rule((r"\p{N}", _GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b",
    ),
    (
        _Rule((_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
    ),
    (
        _Rule((_QWEN2,)),
        "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez solar-open grok-2",
    ),
    (_Rule((_QWEN35,)), "qwen35"),
    (_Rule((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (_Rule((_GPT4O,)), "gpt-4o llama4 kanana2 minimax-m2"),
    (_Rule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (
        _Rule(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
                r"\s+\z",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (
        _Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
        "deepseek-coder",
    ),
]
_RULES = {name: rule for rule, names in _NAMES_BY_RULE for name in names.split()}

# llama.cpp takes these for special by their text, whatever type the file gives them: what ends
# a turn or a text, and the parts of fill-in-the-middle prompts (U+FF5C is DeepSeek's bar).
_END_TEXTS = (
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> "
    "<end_of_turn> <|endoftext|> <|end_of_text|> </s> <EOT> _<EOT> [EOT] [EOS] "
    "<\uff5cend▁of▁sentence\uff5c> <end_of_utterance>"
)
_SPECIAL_TEXTS = (
    f"{_END_TEXTS} "
    "<|channel|> <|message|> <|start|> <|constrain|> "
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> <PRE> ▁<PRE> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> <SUF> ▁<SUF> "
    "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> <MID> ▁<MID> "
    "<|code_prefix|> <|code_suffix|> <|code_middle|> "
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] "
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
)
_SPECIAL_BY_TEXT = frozenset(_SPECIAL_TEXTS.split())
_END_BY_TEXT = frozenset(_END_TEXTS.split())
_SPECIAL_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding")
_META_SPACE = "▁"
# SentencePiece's own limit is 16 unless set otherwise, and 32,000 pieces have some 60,000 merges.
_MAX_PIECE = 512
_MAX_MERGES_PER_TOKEN = 32


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file in the order of their ids, and which of them are atomic in text."""

    tokens: list[str]
    ids: dict[str, int]
    atomic: dict[str, _TokenType]


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """The tokenizer of `file`; `encode` gives llama.cpp's ids, special tokens parsed and added.

    Control tokens are the special ones that `decode` skips on request; user-defined ones are as
    atomic in text but stay. Raises ModelError if the file's tokenizer metadata are missing, at
    odds with each other, or of a kind that is not supported.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        vocabulary = _read_vocabulary(file)
        rule = _read_rule(file)
        tokenizer = _byte_level(file, vocabulary, rule)
        bos, eos, add_bos = 11, 11, rule.add_bos
    elif kind == "llama":
        vocabulary = _read_vocabulary(file)
        tokenizer = _sentencepiece(file, vocabulary)
        bos, eos, add_bos = 1, 2, True
    else:
        _fail(
            file,
            f"tokenizer.ggml.model is {kind!r}, which is not supported; "
            "supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)",
        )
    _add_atomic_tokens(file, tokenizer, vocabulary)
    special = special_ids(file)
    begin = special.get("bos", bos) if _flag(file, "add_bos_token", add_bos) else None
    end = special.get("eos", eos) if _flag(file, "add_eos_token", False) else None
    _add_begin_and_end(file, tokenizer, vocabulary.tokens, begin, end)
    return tokenizer


def special_ids(file: GgufFile) -> dict[str, int]:
    """The ids that the file gives for "bos", "eos", "eot", "eom", "unknown" and
    "padding".

    Absent is what the file doesn't name, or names by an id beyond its vocabulary: llama.cpp
    ignores such ids, and converters write them for models that have no such token. Raises
    ModelError if an id is not a number or the file has no list of tokens.
    """
    count = len(_strings(file, "tokens"))
    found = {}
    for name in _SPECIAL_NAMES:
        key = f"tokenizer.ggml.{name}_token_id"
        number = file.metadata.get(key)
        if number is None:
            continue
        if not isinstance(number, int) or isinstance(number, bool):
            _fail(file, f"{key} is {number!r}, but it must be a token id; convert the model again")
        if 0 <= number < count:
            found[name] = number
    return found


def template_tokens(file: GgufFile, tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that chat templates may ask for, by transformers' names: bos_token,
    eos_token, unk_token and pad_token.

    Where the file does not name them they are llama.cpp's for SentencePiece, and for byte-level
    vocabularies a start token only if `tokenizer`, the file's, puts one before texts.
    """
    ids = {"bos": 1, "eos": 2, "unknown": 0}
    if file.metadata.get("tokenizer.ggml.model") != "llama":
        starts = _flag(file, "add_bos_token", _read_rule(file).add_bos)
        ids = {"bos": tokenizer.encode("").ids[0]} if starts else {}
    ids |= special_ids(file)
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {
        f"{names[name]}_token": tokenizer.id_to_token(ids[name])
        for name in names.keys() & ids.keys()
    }
    return {name: text for name, text in found.items() if text is not None}


def end_ids(file: GgufFile) -> tuple[int, ...]:
    """All tokens that end a generation, ascending: those named, and those known by their text.

    Files often name one although the model has several; llama.cpp finds the others as this does.
    In GPT-OSS's harmony <|end|> ends a message, of which an answer may have several.
    """
    specials = special_ids(file)
    named = {specials[key] for key in ("eos", "eot", "eom") if key in specials}
    by_text = {text: i for i, text in enumerate(_strings(file, "tokens")) if text in _END_BY_TEXT}
    ends = named | set(by_text.values())
    if {"<|return|>", "<|call|>"} <= by_text.keys():
        ends.discard(by_text.get("<|end|>", -1))
    return tuple(sorted(ends))


def _fail(file: GgufFile, what: str) -> NoReturn:
    raise ModelError(f"{file.path}: {what}")


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        _fail(file, f"tokenizer.ggml.{name} is {value!r}, but it must be true or false")
    return value


def _list(file: GgufFile, name: str, kinds: type | tuple[type, ...]) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    values = file.metadata.get(key)
    if values is None:
        _fail(file, f"{key} is missing; convert the model again, with its tokenizer")
    if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
        _fail(file, f"{key} is not a list of the right type; convert the model again")
    return values


def _strings(file: GgufFile, name: str) -> list[str]:
    return _list(file, name, str)


def _same_length(file: GgufFile, name: str, values: list[Any], tokens: list[str]) -> None:
    if len(values) != len(tokens):
        _fail(
            file,
            f"tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens; "
            "convert the model again",
        )


def _read_vocabulary(file: GgufFile) -> _Vocabulary:
    given = _strings(file, "tokens")
    # An empty token can't occur in text; the name keeps several of them apart.
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(given)]
    ids = {token: number for number, token in enumerate(tokens)}
    if not tokens:
        _fail(file, "tokenizer.ggml.tokens is empty; convert the model again, with its tokenizer")
    if len(ids) != len(tokens):
        number, token = next((n, t) for n, t in enumerate(tokens) if ids[t] != n)
        _fail(
            file,
            f"tokenizer.ggml.tokens has {token!r} twice, as {number} and {ids[token]}; "
            "convert the model again",
        )
    types: list[int] = [_TokenType.NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in file.metadata:
        types = _list(file, "token_type", int)
        _same_length(file, "token_type", types, tokens)
    atomic = {}
    for token, kind in zip(tokens, types, strict=True):
        if kind == _TokenType.USER_DEFINED:
            atomic[token] = _TokenType.USER_DEFINED
        elif kind in (_TokenType.CONTROL, _TokenType.UNKNOWN) or token in _SPECIAL_BY_TEXT:
            atomic[token] = _TokenType.CONTROL
    return _Vocabulary(tokens, ids, atomic)


def _read_rule(file: GgufFile) -> _Rule:
    name = file.metadata.get("tokenizer.ggml.pre") or "default"
    rule = _RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        _fail(
            file,
            f"tokenizer.ggml.pre is {name!r}, which is not supported; "
            f"supported are {', '.join(sorted(_RULES))}",
        )
    return rule


def _byte_level(file: GgufFile, vocabulary: _Vocabulary, rule: _Rule) -> Tokenizer:
    ids = vocabulary.ids
    merges: dict[tuple[str, str], None] = {}
    for number, merge in enumerate(_strings(file, "merges")):
        # The first half may itself begin with the separator.
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or left not in ids or right not in ids or left + right not in ids:
            _fail(
                file,
                f"entry {number} of tokenizer.ggml.merges, {merge!r}, does not join two tokens "
                "to a third; convert the model again",
            )
        # A pair's first rank is the one that counts, and a dict keeps its first place.
        merges[left, right] = None
    model = models.BPE(ids, list(merges), ignore_merges=rule.ignore_merges)
    tokenizer = Tokenizer(model)
    splits = [Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    bytes_only = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = PreSequence([*splits, bytes_only])
    # The decoder takes an atomic token of nothing but byte letters for bytes: undo that first.
    letters = set(ByteLevel.alphabet())
    plain = [token for token in vocabulary.atomic if letters.issuperset(token)]
    undo = [
        decoders.Replace(
            Regex(rf"\A{re.escape(token)}\z"), bytes_only.pre_tokenize_str(token)[0][0]
        )
        for token in plain
        if not token.isascii()
    ]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.ByteLevel()])
    return tokenizer


def _sentencepiece(file: GgufFile, vocabulary: _Vocabulary) -> Tokenizer:
    scores = _list(file, "scores", (int, float))
    _same_length(file, "scores", scores, vocabulary.tokens)
    if len(set(scores)) == 1:
        _fail(
            file,
            "tokenizer.ggml.scores are all the same, so no order of merging follows from them; "
            "convert the model again, from its tokenizer.model",
        )
    unknown = special_ids(file).get("unknown", 0)
    # Every cut of every token is tried, so the work is in proportion to the file only if tokens are
    # short; and where most cuts join two tokens, as in no real vocabulary, merges fill the memory.
    longest = max(vocabulary.tokens, key=len)
    if len(longest) > _MAX_PIECE:
        _fail(
            file,
            f"tokenizer.ggml.tokens has a piece of {len(longest)} characters, and more than "
            f"{_MAX_PIECE} are not plausible; convert the model again",
        )
    most = _MAX_MERGES_PER_TOKEN * len(vocabulary.tokens)
    merges = list(islice(_merges_by_score(vocabulary, scores), most + 1))
    if len(merges) > most:
        _fail(
            file,
            f"tokenizer.ggml.tokens can be joined in more than {most} ways, which is not "
            "plausible; convert the model again",
        )
    model = models.BPE(
        vocabulary.ids,
        merges,
        unk_token=vocabulary.tokens[unknown],
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefixed = _flag(file, "add_space_prefix", True)
    to_meta = normalizers.Replace(" ", _META_SPACE)
    # The normalizer sees each stretch between atomic tokens, and each gets the prefix.
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_META_SPACE), to_meta]) if prefixed else to_meta
    )
    back = [decoders.Replace(_META_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([*back, *strip])
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> Iterable[tuple[str, str]]:
    """Every way to join two tokens to a third, the best score first.

    SentencePiece joins, again and again, the neighbours whose union has the best score. Of
    several ways to the same piece, the one with the longest left half comes first: where two of
    them overlap in the text, that one is further left, which is what SentencePiece prefers.
    """
    ids = vocabulary.ids
    for number in sorted(range(len(scores)), key=lambda each: -scores[each]):
        token = vocabulary.tokens[number]
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                yield left, right


def _add_atomic_tokens(file: GgufFile, tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    model_name = str(file.metadata.get("general.name", "")).lower()
    # The file can't say that Phi 3's special tokens swallow the space after them; llama.cpp goes
    # by the model's name.
    strips = "phi-3" in model_name or "phi3" in model_name
    keeps_space = ("<unk>", "<s>", "<|endoftext|>")
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                rstrip=strips and token not in keeps_space,
                normalized=False,
                special=kind == _TokenType.CONTROL,
            )
            for token, kind in vocabulary.atomic.items()
        ]
    )


def _add_begin_and_end(
    file: GgufFile, tokenizer: Tokenizer, tokens: list[str], begin: int | None, end: int | None
) -> None:
    """Make `encode` put these tokens around each text."""
    parts = {"bos": begin, "eos": end}
    special: list[dict[str, Any]] = []
    for name, number in parts.items():
        if number is None:
            continue
        if number >= len(tokens):
            _fail(
                file,
                f"tokenizer.ggml.add_{name}_token is on, but tokenizer.ggml.{name}_token_id "
                "names no token; convert the model again",
            )
        special.append({"id": name, "ids": [number], "tokens": [tokens[number]]})
    if special:
        before = ["bos"] if begin is not None else []
        after = ["eos"] if end is not None else []
        tokenizer.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=special,
        )
