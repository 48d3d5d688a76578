"""Headrace: LLM inference split by layers, in which no stage waits for a token."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.async_llm import AsyncLLM
    from headrace.config import EngineConfig
    from headrace.engine.outputs import CompletionOutput, RequestOutput
    from headrace.errors import HeadraceError, PipelineError, UsageError
    from headrace.llm import LLM
    from headrace.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "HeadraceError",
    "PipelineError",
    "RequestOutput",
    "SamplingParams",
    "UsageError",
]

_HOME = {
    "AsyncLLM": "headrace.async_llm",
    "CompletionOutput": "headrace.engine.outputs",
    "EngineConfig": "headrace.config",
    "HeadraceError": "headrace.errors",
    "LLM": "headrace.llm",
    "PipelineError": "headrace.errors",
    "RequestOutput": "headrace.engine.outputs",
    "UsageError": "headrace.errors",
    "SamplingParams": "headrace.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are used: every stage process imports this package."""
    if name not in _HOME:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names, for completion."""
    return [*__all__, "__version__"]
