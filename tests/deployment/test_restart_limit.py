import pytest

from headrace.deployment.restart_limit import RestartLimit
from headrace.errors import HeadraceError, ModelError, PipelineError, StartError


def test_so_many_in_the_window_and_then_no_more() -> None:
    now = 0.0
    limit = RestartLimit(2, 10.0, clock=lambda: now)
    assert limit.count(PipelineError("a")) == "restart 1 of 2 in 10 s"
    now = 6.0
    assert limit.count(PipelineError("b")) == "restart 2 of 2 in 10 s"
    with pytest.raises(PipelineError, match=r"^c; gave up after 2 restarts in 10 s \(--max-rest"):
        limit.count(PipelineError("c"))
    # The first is over ten seconds ago, the second is not.
    now = 11.0
    assert limit.count(PipelineError("d")) == "restart 2 of 2 in 10 s"
    assert limit.restarts == 3


@pytest.mark.parametrize(
    ("error", "kind"),
    [(StartError("a"), StartError), (ModelError("a"), PipelineError)],
)
def test_what_was_wrong_stays_told_when_it_gives_up(
    error: HeadraceError, kind: type[HeadraceError]
) -> None:
    limit = RestartLimit(1, 10.0)
    error.add_note("where")
    limit.count(error)
    with pytest.raises(kind, match="a; gave up after 1") as caught:
        limit.count(error)
    assert caught.value.__notes__ == ["where"]


def test_none_at_all_is_the_error_itself() -> None:
    error = PipelineError("a")
    with pytest.raises(PipelineError) as caught:
        RestartLimit(0, 10.0).count(error)
    assert caught.value is error
