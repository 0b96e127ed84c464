"""The engines of others that have an adapter."""

from __future__ import annotations

from halfmoon.workers.adapters.engines.api import EngineApi
from halfmoon.workers.adapters.engines.sglang import SglangApi
from halfmoon.workers.adapters.engines.vllm import VllmApi

#: By the names of `ENGINE_TITLES`.
ENGINE_APIS: dict[str, type[EngineApi]] = {"vllm": VllmApi, "sglang": SglangApi}
