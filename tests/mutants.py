"""Faults planted in the real engine and the real stages, to see whether the simulation finds them.

`python tests/mutants.py` prints a table: the fault, how many seeds it took from seed 0 up, and what
caught it.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from simulator import simulate

# A fault that so many seeds do not find is not found.
MOST_SEEDS = 200


@dataclass(frozen=True)
class Mutant:
    """One fault: a function or method, `module:name`, and what in its source is put for what.

    seed: where to look first, as that seed found it when this was written.
    """

    fault: str
    target: str
    changes: tuple[tuple[str, str], ...]
    seed: int

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Everybody calls the faulty function meanwhile."""
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        owner = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        original = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(original))
        for old, new in self.changes:
            assert source.count(old) == 1, f"{self.fault}: {old!r} is not in {self.target} (once)"
            source = source.replace(old, new)
        made: dict[str, object] = {}
        exec(compile(source, f"<{self.fault}>", "exec"), original.__globals__, made)
        setattr(owner, name, made[name])
        try:
            yield
        finally:
            setattr(owner, name, original)


def _mutant(fault: str, target: str, *changes: tuple[str, str], seed: int = 0) -> Mutant:
    return Mutant(fault, f"headrace.{target}", changes, seed)


MUTANTS = [
    _mutant(
        "wait skipped",
        "pipeline.stage_loop:_Stage._complete_feedback",
        ("yield Wait(self._feedback_in, step)", "yield from ()"),
    ),
    _mutant(
        "reference resolved to the step before",
        "pipeline.feedback:FeedbackRing.gather",
        ("self.buffer(step).tolist()", "self.buffer(step - 1).tolist()"),
    ),
    _mutant(
        "row index off by one",
        "pipeline.feedback:FeedbackRing.gather",
        ("fed[step][row]", "fed[step][max(0, row - 1)]"),
    ),
    _mutant(
        "feedback to the first of several shards alone",
        "pipeline.stage_loop:_Stage._feed_back",
        ("in self._feedback_out:", "in self._feedback_out[:1]:"),
    ),
    _mutant(
        "each shard of the last stage tells its result",
        "pipeline.stage_loop:_Stage.run",
        ("if role.speaks:", "if role.last:"),
    ),
    _mutant(
        "all shards of the last stage are told how tokens are chosen",
        "protocol.codec:encode_plan",
        ("rank == ranks.sampler", "rank >= ranks.sampler"),
    ),
    _mutant(
        "feedback ring one place too short",
        "pipeline.feedback:FeedbackRing.__init__",
        ("2 * window - 1", "2 * window - 2"),
        seed=131,
    ),
    _mutant(
        "stale epoch accepted",
        "pipeline.stage_loop:_Stage.take_plans",
        ("message.epoch != self._role.epoch", "False"),
    ),
    _mutant(
        "feedback sent for a chunk-only step",
        "pipeline.stage_loop:_Stage._sample",
        (
            "sampled = None\n",
            "sampled = None\n"
            "    if feedback is None:\n"
            "        nothing = torch.zeros(len(plan.rows), 2, dtype=torch.int32)\n"
            "        yield from self._feed_back(plan.step, nothing)\n",
        ),
    ),
    _mutant(
        "block given out one plan early",
        "engine.scheduler:Scheduler._stop_running",
        (
            "self._releasing.append(sequence)",
            "self._releasing.append(sequence)\n"
            "    self._room._pool.give_back(sequence.running.blocks)\n"
            "    sequence.running.blocks = []",
        ),
        seed=59,
    ),
    _mutant(
        "result applied twice",
        "engine.engine:Engine.take_result",
        ("in self.scheduler.take_result(result)", "in 2 * self.scheduler.take_result(result)"),
    ),
    _mutant(
        "receive posted on the wrong edge",
        "pipeline.stage_loop:_Stage.post_receives",
        ("PostReceive(self._feedback_in,", "PostReceive(role.activations_out,"),
    ),
    _mutant(
        "prefix block shared before it is written",
        "engine.prefix_cache:PrefixCache.chunk_planned",
        ("run.planned_positions // self._block_size", "len(run.blocks)"),
    ),
    _mutant(
        "slot released before its step has run",
        "pipeline.stage_loop:_Stage.run",
        ("executor.begin(plan)\n", "executor.begin(plan)\n    executor.end(plan)\n"),
        ("executor.end(plan)\n    if role.speaks", "if role.speaks"),
        seed=44,
    ),
    _mutant(
        "random index not advanced after preemption",
        "sampling.slot:SlotSampling.__init__",
        ("list(admission.outputs)", "[]"),
        seed=12,
    ),
    _mutant(
        "preempted sequence admitted again while results are missing",
        "engine.scheduler:Scheduler._plan_chunks",
        (
            "if closed or sequence.in_flight or sequence.run is not None",
            "if closed or sequence.run is not None",
        ),
        seed=100,
    ),
    _mutant(
        "sequence that changes groups loses its token",
        "engine.microbatches:Microbatches.leave",
        ("run.microbatch = None", "run.microbatch = run.newest_sample = None"),
    ),
    _mutant(
        "sequence forgotten on a change of num_microbatches",
        "engine.microbatches:Microbatches.resize",
        ("for sequence in moving:\n        sizes", "for sequence in moving[1:]:\n        sizes"),
    ),
    _mutant(
        "one step more in flight than the window",
        "engine.scheduler:Scheduler.plan",
        (">= self._window", "> self._window"),
        seed=132,
    ),
    _mutant(
        "surplus tokens after a stop reach the client",
        "engine.scheduler:Scheduler.take_result",
        ("if sequence.finish_reason is not None:", "if sequence.finish_reason == 'abort':"),
    ),
    _mutant(
        "one buffer for the activations of all steps of a size",
        "execution.model_executor:ModelExecutor._new_activations",
        ("return torch.empty(", "return self.__dict__.setdefault(tokens, torch.empty("),
        ("device=self.device\n    )", "device=self.device\n    ))"),
    ),
    _mutant(
        "ledger gives a buffer up without waiting for its handle",
        "pipeline.ledger:Ledger.wait",
        ("entry.handle.wait(timeout_s)", "0.0"),
    ),
    _mutant(
        "feedback of a step that nobody refers to never completed",
        "pipeline.stage_loop:_Stage.post_receives",
        ("yield from self._complete_feedback(self._ring.occupant(plan.step))", "pass"),
    ),
    _mutant(
        "rules dropped when the first of several completions ends",
        "engine.shared_rules:RulesOnStage.leave",
        ("if not rules.users and", "if"),
    ),
    _mutant(
        "rules never dropped",
        "engine.shared_rules:RulesOnStage.drop_unused",
        ("return unused", "return []"),
    ),
    _mutant(
        "every stage is told how tokens are chosen",
        "protocol.codec:encode_plan",
        ("without_choice(plan)", "plan"),
    ),
    _mutant(
        "end of the output not followed after an admission",
        "sampling.slot:SlotSampling.__init__",
        ("for token in self.outputs:", "for token in ():"),
    ),
    _mutant(
        "end of the output not followed after a token",
        "sampling.slot:SlotSampling.record",
        ("self._bad_words.step(self._word_state, token)", "self._word_state"),
    ),
    _mutant(
        "waiting sequences are never admitted",
        "engine.room:Room.fits",
        ("return needed", "return 10_000 + needed"),
    ),
    _mutant(
        "message of a lost epoch taken",
        "engine.engine:Engine._take",
        ("message.epoch != self.scheduler.epoch", "False"),
    ),
    _mutant(
        "steps of a new epoch numbered on from the lost one's",
        "engine.scheduler:Scheduler._begin",
        ("self._next_step = 0", "self._next_step = self.__dict__.get('_next_step', 0)"),
    ),
    _mutant(
        "prefix cache of a lost epoch kept",
        "engine.scheduler:Scheduler.new_epoch",
        (
            "    for sequence in [*unfinished, *self._releasing]:\n",
            "    pool = self._room._pool\n"
            "    for sequence in [*unfinished, *self._releasing]:\n"
            "        pool.give_back(sequence.run.blocks if sequence.run else [])\n",
        ),
        (
            "self._begin(epoch, self._groups.count)",
            "self._begin(epoch, self._groups.count)\n"
            "    self._room._pool = self._room.cache._pool = pool",
        ),
    ),
    _mutant(
        "rules that the lost epoch's last stage had taken for the new one's",
        "engine.scheduler:Scheduler._begin",
        (
            "self._rules = RulesOnStage()",
            "self._rules = self.__dict__.get('_rules') or RulesOnStage()",
        ),
    ),
    _mutant(
        "slots released that a lost epoch was to release",
        "engine.scheduler:Scheduler._begin",
        (
            "self._releasing: list[Sequence] = []",
            "self._releasing = self.__dict__.get('_releasing') or []",
        ),
    ),
    _mutant(
        "sequence that waited forgotten with the lost epoch",
        "engine.scheduler:Scheduler.new_epoch",
        ("*self._groups.all(), *waiting]", "*self._groups.all()]"),
    ),
    _mutant(
        "rows of a lost epoch waited for",
        "engine.scheduler:Scheduler.new_epoch",
        ("sequence.in_flight = 0", "pass"),
    ),
    _mutant(
        "run of a lost epoch kept, with references to its tokens",
        "engine.scheduler:Scheduler.new_epoch",
        ("sequence.run = None", "pass"),
    ),
    _mutant(
        "token of a lost epoch referred to",
        "engine.scheduler:Scheduler._plan_decode_rows",
        (
            "token, start = run.newest_sample, None",
            "kept = self.__dict__.setdefault('_kept', {})\n"
            "            token = kept.setdefault((sequence, index), run.newest_sample)\n"
            "            start = None",
        ),
        seed=12,
    ),
    _mutant(
        "accepted tokens computed again after a lost epoch",
        "engine.scheduler:Scheduler.new_epoch",
        ("sequence.in_flight = 0", "sequence.in_flight = 0\n        sequence.outputs.clear()"),
    ),
    _mutant(
        "rank that lives on keeps the slots of the lost epoch",
        "execution.model_executor:ModelExecutor.forget",
        ("self._slots.clear()", "pass"),
    ),
    _mutant(
        "rank that lives on keeps the positions of the lost epoch",
        "execution.model_executor:ModelExecutor.forget",
        ("self._next_positions.fill(-1)\n    self._slots.clear()", "pass"),
    ),
    _mutant(
        "rank that lives on keeps the rules of the lost epoch",
        "execution.model_executor:ModelExecutor.forget",
        ("self._rules.clear()", "pass"),
    ),
    _mutant(
        "suspects run together after a stage died of one",
        "engine.engine:Engine._run_apart",
        ("request_id == self._apart", "True"),
    ),
    _mutant(
        "whatever ran when a stage died blamed",
        "engine.suspects:Suspects.died",
        ("if len(requests) == 1:\n        (only,) = requests", "for only in requests:"),
        ("self._marks[only].blamed", "self._marks[only].weight >= _APART"),
    ),
]


@dataclass(frozen=True)
class Catch:
    """seeds: how many it took. error: what was raised then."""

    seeds: int
    error: Exception


def catch(mutant: Mutant, first: int = 0) -> Catch | None:
    """The first seed that finds the fault, from `first` up and then from 0; None if none of
    MOST_SEEDS does.

    Without the fault that seed passes, or its error is raised; test_simulation.py runs them all.
    """
    for number in range(MOST_SEEDS):
        seed = (first + number) % MOST_SEEDS
        with mutant.planted():
            try:
                simulate(seed)
                continue
            except Exception as error:
                caught = error
        simulate(seed)
        return Catch(number + 1, caught)
    return None


def table() -> Iterator[str]:
    """A line for each fault."""
    width = max(len(mutant.fault) for mutant in MUTANTS)
    yield f"{'planted fault':{width}}  seeds  caught by"
    for mutant in MUTANTS:
        found = catch(mutant)
        if found is None:
            yield f"{mutant.fault:{width}}  NOT CAUGHT by {MOST_SEEDS} seeds"
        else:
            what = f"{type(found.error).__name__}: {found.error}"
            yield f"{mutant.fault:{width}}  {found.seeds:5}  {' '.join(what.split())[:70]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in table():
        print(line, flush=True)
