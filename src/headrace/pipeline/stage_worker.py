"""Inside a stage's process: sets the stage up, then drives its loop with real links."""

import os
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import zmq

from headrace.checkpoint.locate import ModelFiles
from headrace.errors import HeadraceError, PipelineError, StartError
from headrace.model.llama import LlamaStage, load_llama
from headrace.model.weights import open_tensors
from headrace.pipeline.effects import (
    Compute,
    Effect,
    EmitResult,
    PostReceive,
    Send,
    StepDone,
    TakePlans,
    Wait,
)
from headrace.pipeline.executor import ModelExecutor, cache_bytes_per_block
from headrace.pipeline.ledger import Channel, Ledger, Tensors
from headrace.pipeline.links import Link, LinkError, Rendezvous, connect, disconnect
from headrace.pipeline.stage_loop import Executor, StageRole, stage_loop
from headrace.pipeline.synthetic import SyntheticExecutor
from headrace.pipeline.timeline import Activity, StepTimes
from headrace.protocol import codec
from headrace.protocol.messages import (
    CacheConfig,
    Failure,
    FromStage,
    Loaded,
    Loading,
    Ready,
    StageConfig,
    Stop,
    ToStage,
)
from headrace.protocol.plan import Plan

_WAIT_OF: dict[Tensors, Activity] = {
    Tensors.FEEDBACK: "feedback_wait",
    Tensors.ACTIVATIONS: "activation_wait",
}


class ControlSocket:
    """The stage's end of its ordered socket to the engine."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.bind(address)

    def send(self, message: FromStage) -> None:
        """Queue a message to the engine."""
        self._socket.send(codec.encode(message))

    def receive(self) -> ToStage:
        """The next message; blocks."""
        return codec.decode_to_stage(self._socket.recv())

    def take_plans(self, wait: bool) -> list[Plan | Stop]:
        """All plans that have arrived; wait: block until there is one."""
        messages: list[Plan | Stop] = []
        while self._socket.poll(None if wait and not messages else 0):
            message = self.receive()
            if not isinstance(message, Plan | Stop):
                raise PipelineError(f"unexpected {type(message).__name__} among the plans")
            messages.append(message)
        return messages

    def close(self) -> None:
        """Deliver what is queued (for up to two seconds) and close."""
        self._socket.close()
        self._context.term()


def drive(
    loop: Generator[Effect, Any, None],
    control: ControlSocket,
    links: dict[Channel, Link],
    times: StepTimes,
    link_timeout: float,
) -> None:
    """Carry out a stage loop's effects until it ends."""
    ledger = Ledger()
    value: Any = None
    while True:
        try:
            effect = loop.send(value)
        except StopIteration:
            return
        value = None
        started = time.monotonic()
        match effect:
            case TakePlans(wait):
                value = control.take_plans(wait)
                if wait:
                    times.add("plan_wait", started, time.monotonic())
            case PostReceive(channel, step, buffer):
                ledger.open(channel, step, links[channel].receive(buffer), buffer)
            case Send(channel, step, tensor):
                times.sent(started)
                ledger.open(channel, step, links[channel].send(tensor), tensor)
            case Wait(channel, step):
                value, at = ledger.wait(channel, step, link_timeout)
                incoming = channel.target == times.stage
                if incoming:
                    times.arrived(step, at)
                activity = _WAIT_OF[channel.tensors] if incoming else "send_wait"
                times.add(activity, started, time.monotonic())
            case Compute(kind, _, work):
                value = work()
                times.add(kind, started, time.monotonic())
            case EmitResult(result):
                control.send(result)
            case StepDone(step):
                control.send(times.finish(step))


def run_stage(config: StageConfig, control: ControlSocket) -> None:
    """Load, meet the other stages, run the loop to its end."""
    device = torch.device("cpu")
    executor = _executor(config, control, device)
    rendezvous = Rendezvous(config.master_addr, config.master_port, config.store_fd)
    links = connect(
        rendezvous,
        config.stage,
        config.num_stages,
        device,
        config.start_timeout,
        config.link_emulation,
    )
    control.send(Ready(config.stage))
    role = StageRole(
        stage=config.stage,
        num_stages=config.num_stages,
        epoch=config.epoch,
        window=config.window,
        max_rows=config.max_num_seqs,
        blocking_feedback=config.blocking_feedback,
    )
    with torch.inference_mode():
        drive(
            stage_loop(role, executor),
            control,
            links,
            StepTimes(config.epoch, config.stage),
            config.link_timeout,
        )
    disconnect()


def _executor(config: StageConfig, control: ControlSocket, device: torch.device) -> Executor:
    """What computes this stage's steps, with its weights and its cache."""
    if config.synthetic is not None:
        control.send(Loaded(config.stage, weight_bytes=0, cache_bytes_per_block=1))
        _receive_cache_config(control)
        return SyntheticExecutor(
            config.synthetic, config.model_config.hidden_size, getattr(torch, config.dtype), device
        )
    model = _load(config, control, device)
    control.send(
        Loaded(config.stage, model.weight_bytes, cache_bytes_per_block(model, config.block_size))
    )
    cache = _receive_cache_config(control)
    try:
        return ModelExecutor(
            model=model,
            max_num_seqs=config.max_num_seqs,
            num_blocks=cache.num_blocks,
            block_size=config.block_size,
            max_blocks=-(-config.max_model_len // config.block_size),
            device=device,
        )
    except (RuntimeError, MemoryError) as error:
        raise StartError(
            f"not enough memory for {cache.num_blocks} cache blocks: "
            "lower --kv-cache-memory or --max-model-len"
        ) from error


def _receive_cache_config(control: ControlSocket) -> CacheConfig:
    message = control.receive()
    if not isinstance(message, CacheConfig):
        raise PipelineError(f"expected the cache's size, got {type(message).__name__}")
    return message


def _load(config: StageConfig, control: ControlSocket, device: torch.device) -> LlamaStage:
    assert config.model_kind != "synthetic"
    source = open_tensors(
        ModelFiles(Path(config.model_path), config.model_kind), config.model_config
    )
    with torch.inference_mode():
        return load_llama(
            config.model_config,
            config.share,
            source,
            getattr(torch, config.dtype),
            device,
            config.max_model_len,
            lambda done: control.send(Loading(config.stage, "weights", done)),
        )


def run(address: str) -> int:
    """Run one stage, controlled over the socket at address; 0 only after an ordered stop."""
    control = ControlSocket(address)
    config = control.receive()
    assert isinstance(config, StageConfig)
    try:
        run_stage(config, control)
    except Exception as error:
        expected = isinstance(error, HeadraceError | LinkError)
        message = str(error) if expected else f"internal error: {type(error).__name__}: {error}"
        failure = Failure(
            stage=config.stage,
            kind=type(error).__name__ if isinstance(error, HeadraceError) else "PipelineError",
            message=" ".join(message.split()),
            lost_peer=error.peer if isinstance(error, LinkError) else None,
            details=traceback.format_exc(),
        )
        control.send(failure)
        control.close()
        # Not a return: a broken link's threads may hold the interpreter's exit back for ever.
        os._exit(1)
    control.close()
    return 0
