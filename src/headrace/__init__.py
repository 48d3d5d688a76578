"""Headrace: LLM inference split by layers, in which no stage waits for a token."""

from headrace.config import EngineConfig
from headrace.llm import LLM
from headrace.protocol.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams"]
