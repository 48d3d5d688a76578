"""Who is found not to get on while an epoch begins, and when: on a clock of the test's own."""

from dataclasses import dataclass
from typing import cast

import pytest

from headrace.errors import StallError, StartError
from headrace.pipeline.epoch_start import EpochStart
from headrace.pipeline.rank_process import RankProcess


@dataclass(eq=False)
class Rank:
    """What is looked at of a RankProcess. answers: how it takes questions, if it can."""

    number: int
    answers: bool = True
    stopped: bool = False
    has_answered: bool = True
    was_ready: bool = False
    heard_at: float = 0.0
    asked: int = 0
    _unread: bool = False

    @property
    def name(self) -> str:
        return f"stage {self.number}"

    def ask_for_answer(self) -> None:
        self.asked += 1
        self._unread = self.answers and not self.stopped

    def take_answers(self) -> bool:
        answered, self._unread = self._unread, False
        self.heard_at += answered
        return answered


def start(*ranks: Rank, kept: set[int] | None = None) -> tuple[EpochStart, list[RankProcess]]:
    return EpochStart([], None, kept or set()), cast(list[RankProcess], list(ranks))


def wait(begun: EpochStart, ranks: list[RankProcess], seconds: int) -> None:
    for _ in range(seconds):
        begun.waited(ranks, 1.0, in_vain=True)
        assert begun.stuck(ranks) is None


def test_a_process_that_was_stopped_is_found_long_before_one_without_progress() -> None:
    begun, ranks = start(Rank(0), Rank(1, stopped=True, has_answered=False))
    wait(begun, ranks, 6)
    begun.waited(ranks, 1.0, in_vain=True)
    stuck = begun.stuck(ranks)
    assert stuck is not None
    error, who = stuck
    assert isinstance(error, StallError)
    assert str(error) == "stage 1 has been stopped by a signal for 6 s while starting"
    assert who == [ranks[1]]


def test_one_that_went_on_in_time_is_left_alone() -> None:
    rank = Rank(0, stopped=True)
    begun, ranks = start(rank)
    wait(begun, ranks, 5)
    rank.stopped = False
    wait(begun, ranks, 100)


def test_one_that_answers_no_more_is_found_also_where_nobody_can_see_it_stopped() -> None:
    rank = Rank(0)
    begun, ranks = start(rank)
    wait(begun, ranks, 10)
    rank.answers = False
    wait(begun, ranks, 20)
    begun.waited(ranks, 2.0, in_vain=True)
    stuck = begun.stuck(ranks)
    assert stuck is not None
    assert str(stuck[0]).startswith("stage 0 has given no sign of life for 2")


def test_one_that_never_answered_may_still_be_importing() -> None:
    begun, ranks = start(Rank(0, answers=False, has_answered=False))
    wait(begun, ranks, 119)


def test_one_that_answers_may_read_from_a_slow_disk_until_the_long_deadline() -> None:
    begun, ranks = start(Rank(0), Rank(1))
    begun.loaded[0] = None  # type: ignore[assignment]
    wait(begun, ranks, 120)
    begun.waited(ranks, 1.0, in_vain=True)
    stuck = begun.stuck(ranks)
    assert stuck is not None
    error, who = stuck
    assert isinstance(error, StartError)
    assert str(error) == "stage 1 showed no progress for 120 s while starting"
    assert who == [ranks[1]]


def test_ranks_are_asked_about_once_a_second_and_seldom_if_they_do_not_answer() -> None:
    lively, silent = Rank(0), Rank(1, answers=False, has_answered=False)
    begun, ranks = start(lively, silent)
    for _ in range(400):
        begun.waited(ranks, 0.1, in_vain=True)
    assert 30 <= lively.asked <= 41
    assert 7 <= silent.asked <= 9


@pytest.mark.parametrize(("was_ready", "deaf"), [(True, {1}), (False, set())])
def test_one_that_lives_on_and_takes_no_note_is_deaf_unless_it_still_loads(
    was_ready: bool, deaf: set[int]
) -> None:
    begun, ranks = start(Rank(0), Rank(1, was_ready=was_ready), kept={1})
    wait(begun, ranks, 5)
    assert begun.deaf(ranks) == set()
    wait(begun, ranks, 1)
    assert begun.deaf(ranks) == deaf
    assert begun.deaf(ranks) == set()
