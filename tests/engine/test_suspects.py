"""Which request ends a stage, when it has several completions and some of them have ended."""

from headrace.engine.request import Request, Sequence
from headrace.engine.suspects import Suspects
from headrace.protocol.plan import Sampling
from headrace.sampling_params import SamplingParams


def _completions(request_id: int, count: int) -> list[Sequence]:
    params = SamplingParams(n=count, temperature=1.0, seed=1)
    request = Request(request_id, [1, 2, 3], params, max_outputs=16)
    return [Sequence(request, index, Sampling(seed=index)) for index in range(count)]


def _accept(suspects: Suspects, sequence: Sequence, tokens: int) -> None:
    for _ in range(tokens):
        sequence.outputs.append(7)
        suspects.got_on(sequence)


def test_a_completion_that_ends_before_the_point_does_not_clear_its_request() -> None:
    suspects = Suspects()
    first, second = _completions(4, 2)
    first.outputs, first.in_flight = [7, 7], 3
    assert suspects.died([first], {4: [first, second]}, outside=False) is None
    _accept(suspects, first, 1)
    first.finish_reason = "stop"
    suspects.ended(first, [second])
    assert suspects.apart == 4
    _accept(suspects, second, 4)
    assert suspects.died([second], {4: [second]}, outside=False) == 4


def test_a_row_of_a_completion_that_has_ended_has_its_request_suspected() -> None:
    suspects = Suspects()
    first, second = _completions(4, 2)
    first.outputs, first.in_flight, first.finish_reason = [7], 2, "stop"
    assert suspects.died([first], {4: [second]}, outside=False) is None
    assert suspects.apart == 4
    assert suspects.died([second], {4: [second]}, outside=False) == 4


def test_a_request_is_trusted_again_once_all_that_go_on_are_past_the_point() -> None:
    suspects = Suspects()
    first, second = _completions(4, 2)
    first.outputs, first.in_flight, first.finish_reason = [7], 2, "stop"
    suspects.died([first], {4: [second]}, outside=False)
    _accept(suspects, second, 3)
    assert suspects.apart == 4
    _accept(suspects, second, 1)
    assert not suspects


def test_an_end_that_lay_behind_all_that_go_on_leaves_no_suspicion() -> None:
    suspects = Suspects()
    first, second = _completions(4, 2)
    first.outputs, first.in_flight, first.finish_reason = [7], 2, "stop"
    second.outputs = [7] * 9
    assert suspects.died([first], {4: [second]}, outside=False) is None
    assert not suspects


def test_a_request_that_ended_whole_is_not_suspected() -> None:
    suspects = Suspects()
    (only,) = _completions(4, 1)
    only.outputs, only.in_flight, only.finish_reason = [7], 2, "stop"
    assert suspects.died([only], {}, outside=False) is None
    assert not suspects


def test_the_end_of_a_request_ends_its_suspicion() -> None:
    suspects = Suspects()
    first, second = _completions(4, 2)
    suspects.died([first, second], {4: [first, second]}, outside=False)
    suspects.ended(first, [second])
    assert suspects.apart == 4
    suspects.ended(second, [])
    assert not suspects


def test_kills_after_a_fault_of_its_own_do_not_tell_but_another_fault_does() -> None:
    suspects = Suspects()
    (only,) = _completions(4, 1)
    going_on = {4: [only]}
    assert suspects.died([only], going_on, outside=False) is None
    for _ in range(3):
        assert suspects.died([only], going_on, outside=True) is None
    assert suspects.apart == 4
    assert suspects.died([only], going_on, outside=False) == 4


def test_a_fourth_kill_at_the_same_point_tells() -> None:
    suspects = Suspects()
    (only,) = _completions(4, 1)
    told = [suspects.died([only], {4: [only]}, outside=True) for _ in range(4)]
    assert told == [None, None, None, 4]
