"""Chat templates are programs of strangers: each rendering ends, and takes only so much."""

import threading

import pytest

from headrace.checkpoint import chat_template
from headrace.checkpoint.chat_template import ChatTemplate, Message, TooMuchTextError
from headrace.errors import UsageError

CHAT: list[Message] = [{"role": "user", "content": "x" * 100} for _ in range(50)]
LOOP = "{% for a in range(99999) %}"


def render(source: str, most_characters: int = 10_000) -> str:
    return ChatTemplate(source, {}).render(CHAT, most_characters)


def test_what_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(chat_template, "TIME_LIMIT", 0.2)
    for endless in (
        LOOP * 5 + "{% endfor %}" * 5,
        LOOP * 3 + "{% set x = a %}" + "{% endfor %}" * 3,
    ):
        with pytest.raises(UsageError, match=r"^messages: .* had not rendered them after 0\.2 s"):
            render(endless)
    for thread in set(threading.enumerate()) - before:
        # It stops at the next step of the template.
        thread.join(120)
        assert not thread.is_alive()


def test_recursion_ends() -> None:
    with pytest.raises(UsageError, match="recursion"):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for b in messages * 20 %}{{ b.content }}{% endfor %}{% endmacro %}"
        "{{ f() | length }}",
        "{% set x %}{% for a in range(9999) %}abc{% endfor %}{% endset %}{{ x | length }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * 'a' }}",
        "{{ [1] * 10 ** 9 }}",
    ],
)
def test_text_cannot_outgrow_what_could_fit(source: str) -> None:
    with pytest.raises(TooMuchTextError):
        render(source)


def test_numbers_stay_small() -> None:
    with pytest.raises(UsageError, match="number is too large"):
        render("{{ 10 ** (10 ** 10) }}")
    assert render("{{ 2 ** 10 }}") == "1024"


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a", "{% unknown %}", "{{ x | unknown }}"])
def test_a_template_that_is_none_is_told(source: str) -> None:
    with pytest.raises(UsageError, match="is no valid template"):
        render(source)


def test_the_machine_is_out_of_reach() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ lipsum.__globals__['os'] }}",
    ):
        with pytest.raises(UsageError, match="refuses the messages"):
            render(source)
    assert render("{{ strftime_now.__globals__ }}") == ""
