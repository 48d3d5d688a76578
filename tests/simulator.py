"""The whole engine and all its stages in one process and in virtual time, driven by one seed.

The seed draws the engine's settings, the requests, what happens to them and when, and how long
everything takes, so a failure replays from its seed. Engine, scheduler and stage loops are the real
ones; the model is the toy one, whose answers are known.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headrace.deployment.partition import stage_shares
from headrace.engine.engine import Engine
from headrace.engine.limits import SchedulerConfig
from headrace.engine.microbatch_count import MicrobatchTuner, window_of
from headrace.engine.outputs import CompletionOutput, OutputDelta
from headrace.engine.pace import Pace
from headrace.engine.scheduler import Scheduler
from headrace.errors import PipelineError
from headrace.execution.model_executor import ModelExecutor
from headrace.pipeline.links import edges
from headrace.protocol.fault import RankFault
from headrace.protocol.plan import Plan
from headrace.protocol.ranks import Ranks
from headrace.sampling_params import SamplingParams
from headrace.simulation.virtual_links import VirtualClock, VirtualNetwork
from headrace.simulation.virtual_stages import VirtualStages
from toy_model import VOCAB, ToyModel, expected_answer, toy_tokenizer
from watched_pipeline import SimulationError, Watched, in_one_line

MAX_MODEL_LEN = 36
# Seconds that everything takes at most, but for a stage that stalls.
_SCALE_S = 0.01
_STALL_S = 5.0
_DEADLINE_S = 60.0
_TOKENIZER = toy_tokenizer()


class Deadlock(SimulationError):
    """Nothing can happen any more although work is left."""


@dataclass
class Request:
    """One request and what came of it, by completion."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    id: int | None = None
    aborted: bool = False
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)

    def take(self, delta: OutputDelta) -> None:
        output = self.outputs[delta.index]
        if output.finished():
            raise SimulationError(f"request {self.id} got something after its end")
        if delta.token is not None:
            output.token_ids.append(delta.token)
        output.text += delta.text
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        for entry in delta.prompt_logprobs or ():
            self.prompt_logprobs.append(entry.ids[0])


class Poisoned(Exception):
    """A rank raised because of a request that it computed. step: which that was, if it told."""

    def __init__(self, rank: int, step: int | None) -> None:
        super().__init__(f"rank {rank} raised")
        self.rank, self.step = rank, step


class _Executor(ModelExecutor):
    """One that is told how tokens are chosen if it chooses them, and nothing of it otherwise.

    poison: a prompt that it cannot compute beyond its first so many positions; what it raises then.
    """

    poison: tuple[list[int], int, Callable[[int], Exception]] | None = None

    def forward(self, plan: Plan, inputs: torch.Tensor) -> torch.Tensor:
        if self.poison is not None:
            prompt, positions, raised = self.poison
            for row in plan.rows:
                beyond = self._next_positions[row.slot] + len(row.inputs) > positions
                if beyond and self._slots[row.slot].admission.prompt == prompt:
                    raise raised(plan.step)
        return super().forward(plan, inputs)

    def begin(self, plan: Plan) -> None:
        told = plan.rules or plan.dropped or any(a.sampling or a.rules for a in plan.admitted)
        if told and not (self.model.program.head and self.samples):
            raise SimulationError(f"step {plan.step} tells a rank how to choose that does not")
        super().begin(plan)


class _DeviceExecutor(_Executor):
    """One whose stage goes on while it computes, as on a device."""

    @property
    def asynchronous(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Simulation:
    """One run of one seed: build it, run() it, and have it checked."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = self._rng = random.Random(seed)
        self.clock = VirtualClock(random.Random(rng.random()))
        self.num_stages = rng.choice([1, 2, 2, 3, 3, 4])
        # Drawn apart from all else.
        shards = random.Random(f"shards {seed}").choice([1, 1, 1, 2, 2, 3])
        self.ranks = Ranks(self.num_stages, shards)
        most = rng.randint(1, self.num_stages + 2)
        self._most_microbatches = most
        tuned = rng.random() < 0.3
        # The most plans in flight that the stages are made for.
        least = window_of(most, self.num_stages) if tuned else most + 1
        self.window = least + rng.randint(0, 2)
        # Short prompts and long answers in few blocks: sequences are preempted all the time.
        self._crowded = rng.random() < 0.4
        self.requests = self._requests()
        config = self._config()
        self._shares = stage_shares([rng.choice([1, 1, 2]) for _ in range(self.num_stages)])
        self.reached: Counter[str] = Counter()
        self._draw_poison()
        self._victims: list[int] = []
        self._deaths = 0
        self.stages = self._stages(config, rng, epoch=0, living={})
        stray = rng.random() < 0.3
        self._stray = lambda: stray and rng.random() < 0.1
        self.pipeline = self._watched(epoch=0)
        # All that was sent, in all epochs.
        self.plans = list[Plan]()
        self.engine = Engine(
            scheduler=Scheduler(config, clock=lambda: self.clock.now),
            pipeline=self.pipeline,
            tokenizer=_TOKENIZER,
            vocab_size=VOCAB,
            pace=Pace(
                self.ranks,
                window_of(most, self.num_stages),
                MicrobatchTuner(most) if tuned else None,
            ),
            seed=seed,
            stall_timeout=_DEADLINE_S,
            max_logprobs=5,
            clock=lambda: self.clock.now,
        )
        self._orders = self._draw_orders()
        self._pause = self._times(rng, mostly_none=True)
        # Drawn apart from all else, as are the stages after a kill.
        self._kill_rng = random.Random(f"kill {seed}")
        self._draw_kills()
        self._cut_rng = random.Random(f"cut {seed}")
        self._draw_cuts()
        # Of the engine alone, longer than it would wait for stages. Drawn apart from all else.
        self._sleep_rng = random.Random(f"sleep {seed}")
        self._sleepiness = self._sleep_rng.choice([0.0, 0.0, 0.0, 0.0, 0.05])

    def run(self) -> None:
        """Until every request ended and every stage drained; then everything is checked."""
        turn = 0
        # Stages that were killed may have sent all that was missing: they are followed even so.
        while self._orders or not self.engine.scheduler.idle or self.stages.killed:
            while self._orders and (self._orders[0][0] <= turn or self.engine.scheduler.idle):
                self._orders.popleft()[1]()
            pause = self._pause()
            if self._sleep_rng.random() < self._sleepiness:
                self.reached["the engine slept"] += 1
                pause += 2 * _DEADLINE_S
            if pause:
                self._let_pass(pause)
            seen = len(self.pipeline.plans), self.pipeline.messages
            groups = self.engine.scheduler.num_microbatches
            if not self._step():
                continue
            self.reached["change by the tuner"] += groups != self.engine.scheduler.num_microbatches
            turn += 1
            stuck = seen == (len(self.pipeline.plans), self.pipeline.messages) and self.clock.idle
            if stuck and not self.engine.scheduler.idle:
                if not self._orders:
                    raise Deadlock(f"{self.engine.scheduler.steps_in_flight} steps in flight")
                turn = max(turn, self._orders[0][0])
        while not self._stopped():
            self._restart([])
        self.plans += self.pipeline.plans
        self._check()

    def _step(self) -> bool:
        """One of the engine's; whether its pipeline did not break."""
        try:
            self._take(self.engine.step())
        except PipelineError:
            if not (self.stages.killed or self.stages.cut_off):
                raise
            self._restart([])
        except Poisoned as error:
            self._end_by_poison(error)
        else:
            return True
        return False

    def _stopped(self) -> bool:
        """Whether the stages did all that was left to do, and ended: a cut link may keep them."""
        if not self.stages.cut_off:
            while not self.engine.settled:
                self._step()
            try:
                self.stages.stop()
                return True
            except PipelineError:
                if not self.stages.cut_off:
                    raise
        return False

    # What the seed draws

    def _config(self) -> SchedulerConfig:
        rng = self._rng
        block_size = rng.choice([1, 1, 2, 4] if self._crowded else [1, 2, 4, 8])
        longest = max(len(r.prompt) + (r.params.max_tokens or 0) for r in self.requests)
        max_num_seqs = rng.randint(4 if self._crowded else 1, 6)
        microbatches = rng.choice([1, rng.randint(1, self._most_microbatches)])
        return SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_seqs, rng.choice([1, 1, 8, 64])),
            block_size=block_size,
            num_blocks=int(
                -(-longest // block_size) * rng.choice([1, 1.5] if self._crowded else [1, 2, 4])
            ),
            num_microbatches=microbatches,
            window=rng.choice([rng.randint(1, self.window), self.window]),
            # A few tokens end a sequence, so stops come at unforeseen moments.
            eos_token_ids=frozenset(rng.sample(range(VOCAB), 3)),
            prefix_caching=rng.random() < 0.7,
            prefill_policy=rng.choice(["even", "budget"]),
        )

    def _stages(
        self,
        config: SchedulerConfig,
        rng: random.Random,
        epoch: int,
        living: dict[int, _Executor],
    ) -> VirtualStages:
        """living: by rank, what computes on those that live on."""
        link_delay, socket_delay, compute = (self._times(rng) for _ in range(3))
        hold_up = self._times(rng, mostly_none=True)
        slow = [rng.choice([1.0, 1.0, 1.0, 8.0]) for _ in range(self.ranks.count)]
        stalls = {
            (rng.randrange(self.ranks.count), rng.randint(0, 40)) for _ in range(rng.choice([0, 1]))
        }

        executor = _DeviceExecutor if self.seed % 3 == 0 else _Executor

        def compute_s(rank: int, plan: Plan, kind: str) -> float:
            if kind == "forward" and (rank, plan.step) in stalls:
                self.reached["stall"] += 1
                return _STALL_S
            return compute() * slow[rank]

        network = VirtualNetwork(
            self.clock,
            self.ranks,
            delay=lambda channel: link_delay(),
            bytes_per_s=rng.choice([None, 1e4]),
        )
        self._executors = [
            living.get(rank)
            or executor(
                model=ToyModel(self._shares[self.ranks.stage_of(rank)]),
                max_num_seqs=config.max_num_seqs,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                max_blocks=-(-MAX_MODEL_LEN // config.block_size),
                device=torch.device("cpu"),
                samples=rank == self.ranks.sampler,
            )
            for rank in range(self.ranks.count)
        ]
        for rank, own in enumerate(self._executors):
            own.poison = self._poison_of(rank)
        return VirtualStages(
            self.clock,
            network,
            list(self._executors),
            self.window,
            config.max_num_seqs,
            num_shards=self.ranks.num_shards,
            epoch=epoch,
            blocking_feedback=rng.random() < 0.3,
            compute_s=compute_s,
            socket_delay=lambda stage: socket_delay(),
            hold_up=lambda stage: hold_up(),
            link_timeout=_DEADLINE_S,
        )

    def _watched(self, epoch: int, killed: VirtualStages | None = None) -> Watched:
        return Watched(
            self.stages,
            epoch,
            self.ranks.count,
            self.window,
            self._stray,
            self.reached,
            killed,
        )

    def _times(self, rng: random.Random, mostly_none: bool = False) -> Callable[[], float]:
        """How long something takes, each time."""
        scale = _SCALE_S * rng.choice([0.1, 1.0])
        kinds: list[Callable[[], float]] = [
            lambda: 0.0,
            lambda: 10 * scale if rng.random() < 0.1 else 0.0,
            lambda: scale,
            lambda: scale * rng.random(),
        ]
        return rng.choice(kinds[:2] if mostly_none else kinds)

    def _requests(self) -> list[Request]:
        rng = self._rng
        shared = [rng.randrange(VOCAB) for _ in range(12)]
        requests = []
        for number in range(rng.randint(4 if self._crowded else 1, 6)):
            from_shared = 0 if self._crowded or rng.random() < 0.3 else rng.randint(1, 12)
            own = rng.randint(not from_shared, 9 if self._crowded else 6)
            prompt = shared[:from_shared] + [rng.randrange(VOCAB) for _ in range(own)]
            temperature = rng.choice([0.0, 0.0, 1.0])
            count = rng.choice([1, 2]) if temperature else 1
            params = SamplingParams(
                n=count,
                temperature=temperature,
                max_tokens=rng.randint(8 if self._crowded else 1, 16),
                ignore_eos=rng.random() < 0.5,
                seed=self.seed * 100 + number * 10,
                stop=rng.choice([[], [], ["t1"], [f"t{rng.randrange(VOCAB)}", "7 t"]]),
                stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 0, 2])),
                prompt_logprobs=rng.choice([None, None, None, None, 0]),
                **self._lists(number),
            )
            outputs = [CompletionOutput(index) for index in range(count)]
            priority = rng.choice([0, 1] if self._crowded else [0, 0, 0, 1])
            requests.append(Request(prompt, params, priority, outputs=outputs))
        return requests

    def _lists(self, number: int) -> dict[str, Any]:
        """Bad words and biases of some requests, drawn apart: they change no other draw."""
        rng = random.Random(f"{self.seed} {number}")
        if rng.random() < 0.6:
            return {}
        # Three tokens come about far more often than others, and bad words are made of those.
        favoured = rng.sample(range(VOCAB), 3)
        words = [
            rng.choices(favoured, k=rng.choice([1, 2, 2, 3, 3])) for _ in range(rng.randint(0, 6))
        ]
        return {
            "bad_words": [" ".join(f"t{token}" for token in word) for word in words],
            "logit_bias": {token: rng.choice([9.0, 9.0, 9.5]) for token in favoured},
        }

    def _draw_orders(self) -> deque[tuple[int, Callable[[], None]]]:
        """What the engine is told, and how many of its steps must have been taken before."""
        rng = self._rng
        span = rng.choice([0, 10, 40])
        orders: list[tuple[int, Callable[[], None]]] = []
        for request in self.requests:
            due = rng.randint(0, span)
            orders.append((due, partial(self._add, request)))
            if rng.random() < 0.3:
                # Soon: while its prompt is computed. Late: in the middle of its answer.
                later = due + rng.randint(0, rng.choice([3, 40]))
                orders.append((later, partial(self._abort, request)))
        for _ in range(rng.choice([0, 0, 2, 6])):
            count = rng.randint(1, self._most_microbatches)
            window = rng.choice([rng.randint(1, self.window), self.window])
            due = rng.randint(0, span + 40)
            orders.append((due, partial(self._change, count, window)))
        orders.sort(key=lambda order: order[0])
        return deque(orders)

    def _draw_kills(self) -> None:
        """Moments at which all stages are killed; after some soon again."""
        rng = self._kill_rng
        for _ in range(rng.choice([0, 0, 0, 1, 2, 3])):
            due = rng.randint(0, 60)
            for kill_at in [due, due + rng.randint(0, 2)][: rng.choice([1, 1, 2])]:
                self._orders.append((kill_at, self._kill))
        self._orders = deque(sorted(self._orders, key=lambda order: order[0]))

    def _draw_cuts(self) -> None:
        """Moments at which a link between two ranks is lost, while both live."""
        rng = self._cut_rng
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            self._orders.append((rng.randint(0, 60), self._cut))
        self._orders = deque(sorted(self._orders, key=lambda order: order[0]))

    # What happens

    def _add(self, request: Request) -> None:
        request.id = self.engine.add(request.prompt, request.params, request.priority)

    def _abort(self, request: Request) -> None:
        assert request.id is not None
        request.aborted = self.engine.is_running(request.id)
        self.reached["abort"] += request.aborted
        self._take(self.engine.abort(request.id))

    def _change(self, count: int, window: int) -> None:
        if window == self.window and window_of(count, self.num_stages) <= window:
            self.engine.set_microbatches(count)
        else:
            self.engine.scheduler.set_microbatches(count, window)
        self.reached["change with steps in flight"] += self.engine.scheduler.steps_in_flight > 0

    def _kill(self) -> None:
        if self.stages.killed:
            # Nobody has noticed the last time yet.
            self._restart([])
        rng, ranks = self._kill_rng, range(self.ranks.count)
        self._victims = list(ranks) if rng.random() < 0.4 else [rng.choice(ranks)]
        self.reached["one rank of several lost"] += len(self._victims) < len(ranks)
        if len(self._victims) == len(ranks):
            self.stages.kill()
            return
        self.stages.kill(*self._victims)
        # The others go on until somebody notices.
        self._let_pass(rng.choice([0.0, 1.0, 3.0]) * _SCALE_S)

    def _cut(self) -> None:
        """Soon, in the middle of whatever the stages do then."""
        rng, stages = self._cut_rng, self.stages
        if channels := edges(self.ranks):
            cut = partial(stages.cut, rng.choice(channels))
            self.clock.schedule(rng.choice([0.0, 5.0]) * _SCALE_S * rng.random(), cut)

    def _restart(self, faults: list[RankFault]) -> None:
        """What whoever runs an engine does about a pipeline that is gone."""
        scheduler = self.engine.scheduler
        self.reached["epoch lost"] += 1
        self.reached["epoch lost before its first result"] += not self.pipeline.messages
        self.reached["epoch lost with steps in flight"] += scheduler.steps_in_flight > 0
        if not self.stages.killed:
            # Nobody but a link is gone.
            self._victims = self._victims if faults else []
            self.reached["a link lost, no rank"] += self.stages.cut_off
        self.plans += self.pipeline.plans
        epoch = self.pipeline.epoch + 1
        self.stages.kill()
        living = {
            rank: own for rank, own in enumerate(self._executors) if rank not in self._victims
        }
        for own in living.values():
            own.forget()
        killed = self.stages
        self.stages = self._stages(scheduler.config, self._kill_rng, epoch, living)
        self.pipeline = self._watched(epoch, killed)
        self._take(self.engine.lose(faults))
        self.engine.restart(self.pipeline, epoch)

    def _draw_poison(self) -> None:
        """Of some seeds a request cannot be computed, or not beyond some position."""
        rng = random.Random(f"poison {self.seed}")
        self._poison: tuple[Request, int, int] | None = None
        if rng.random() < 0.2:
            request = rng.choice(self.requests)
            alone = [other.prompt for other in self.requests].count(request.prompt) == 1
            if alone:
                position = rng.choice([0, 0, len(request.prompt) + rng.randint(0, 3)])
                self._poison = request, rng.randrange(self.ranks.count), position
        self._poison_rng = rng

    def _poison_of(self, rank: int) -> tuple[list[int], int, Callable[[int], Exception]] | None:
        if self._poison is None or self._poison[1] != rank:
            return None
        request, _, position = self._poison
        told = self._poison_rng.random() < 0.5
        return request.prompt, position, lambda step: Poisoned(rank, step if told else None)

    def _let_pass(self, seconds: float) -> None:
        """Have time pass, without the engine."""
        until = self.clock.now + seconds
        try:
            while self.clock.run_next(until):
                pass
        except Poisoned as error:
            self._end_by_poison(error)

    def _end_by_poison(self, error: Poisoned) -> None:
        """A rank raised: it is gone, as if it had been killed, but for whose fault that is."""
        self._deaths += 1
        if self._deaths > 2:
            raise SimulationError("a request was not found by its second death") from error
        self.reached["a stage died of a request"] += 1
        self._victims = [error.rank]
        self._restart([RankFault(error.rank, error.step, outside=False)])

    def _take(self, deltas: list[OutputDelta]) -> None:
        by_id = {request.id: request for request in self.requests}
        for delta in deltas:
            by_id[delta.request_id].take(delta)

    # What must be true at the end

    def _check(self) -> None:
        for request in self.requests:
            for index, output in enumerate(request.outputs):
                self._check_output(request, index, output)
            ended_early = request.aborted or request.outputs[0].finish_reason == "error"
            if request.params.prompt_logprobs is not None and not ended_early:
                _equal("prompt logprobs", request.prompt_logprobs, request.prompt[1:])
        scheduler = self.engine.scheduler
        _equal("free blocks", scheduler.free_blocks, scheduler.config.num_blocks)
        _equal("slots used", scheduler.slots_used, 0)
        _equal("requests that the engine remembers", len(self.engine._requests), 0)
        _equal(
            "rules on the stages",
            [len(own._rules) for own in self._executors],
            [0] * self.ranks.count,
        )
        _equal("rules that the engine keeps", self.pipeline.rules, {})
        self.reached["preemption"] += scheduler.counters.preemptions

    def _check_output(self, request: Request, index: int, output: CompletionOutput) -> None:
        name = f"request {request.id}, completion {index}: "
        seed, eos = request.params.seed, self.engine.scheduler.config.eos_token_ids
        assert seed is not None
        layers = self._shares[-1].end_layer
        expected = expected_answer(request.prompt, layers, request.params, seed + index, eos)
        poisoned = self._poison is not None and self._poison[0] is request
        if output.finish_reason == "error":
            _equal(name + "poison", poisoned, True)
            self.reached["request blamed"] += 1
            return
        if output.finish_reason == "abort":
            _equal(name + "aborted", request.aborted, True)
            had = expected.tokens[: len(output.token_ids)]
            _equal(name + "tokens", output.token_ids, had)
            _equal(name + "text", output.text, "".join(f" t{token}" for token in had))
            return
        _equal(name + "tokens", output.token_ids, expected.tokens)
        _equal(name + "text", output.text, expected.text)
        _equal(name + "finish reason", output.finish_reason, expected.finish_reason)
        _equal(name + "stop reason", output.stop_reason, expected.stop_reason)
        self.reached["stop"] += expected.finish_reason == "stop"
        self.reached["stop string"] += isinstance(expected.stop_reason, str)


def _equal(name: str, found: object, expected: object) -> None:
    if found != expected:
        raise SimulationError(f"{name}: {found}, not {expected}")


def simulate(seed: int) -> Simulation:
    """Build, run and check one seed. An error of any kind carries the seed and the last events."""
    simulation = None
    try:
        with torch.inference_mode():
            simulation = Simulation(seed)
            simulation.run()
    except Exception as error:
        error.add_note(f"seed {seed}")
        if simulation is not None:
            for moment, who, what in simulation.stages.events:
                error.add_note(f"  {moment:9.6f}  {who}: {in_one_line(what)}")
        raise
    return simulation
