"""vLLM's OpenAI-compatible server, as much of it as an adapter asks for."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from halfmoon.workers.adapters.engines.api import EngineApi, EngineFacts, EngineUnfit
from halfmoon.workers.adapters.engines.words import VllmWords

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


class VllmApi(EngineApi):
    """See `EngineApi`."""

    events_options = """--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", \
"endpoint": "tcp://*:5557"}'"""
    reset_needs = "vLLM has it with VLLM_SERVER_DEV_MODE=1"
    _alive_path = "/health"

    async def facts(self, model: str) -> EngineFacts:
        name, context = await self._served(model)
        info = next(iter(await self._samples("vllm:cache_config_info")), ({}, 0.0))[0]
        blocks, size = info.get("num_gpu_blocks", ""), info.get("block_size", "")
        if not blocks.isdecimal() or not size.isdecimal() or int(size) < 1:
            raise EngineUnfit(
                f"--url {self.url}: /metrics has no vllm:cache_config_info with num_gpu_blocks and block_size"
            )
        if info.get("enable_prefix_caching") == "False":
            raise EngineUnfit(f"--url {self.url}: the engine runs with --no-enable-prefix-caching")
        sources: Any = None
        with contextlib.suppress(EngineUnfit):  # an older release
            sources = await self._json("/kv_event_sources")
        source = sources.get("0", {}) if isinstance(sources, dict) else {}
        on = isinstance(source, dict) and source.get("enable_kv_cache_events")
        return EngineFacts(
            model=name,
            context_tokens=context,
            cache_blocks=int(blocks),
            block_tokens=int(size),
            events=self._there(source.get("endpoint")) if on else "",
            replay=self._there(source.get("replay_endpoint")) if on else "",
            topic=str(source.get("topic") or "") if on else "",
        )

    def words_of(self, facts: EngineFacts) -> VllmWords:
        return VllmWords(facts.model)

    def _there(self, endpoint: object) -> str:
        """Where an endpoint is that the engine has bound, as seen from here."""
        return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\]):", f"tcp://{self.host}:", str(endpoint or ""))

    async def cache_percent(self) -> float:
        used = await self._samples("vllm:kv_cache_usage_perc")
        return 100 * sum(value for _, value in used)

    async def reset_prefix_cache(self) -> None:
        await self._read("/reset_prefix_cache", {})

    async def _samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample of a name in `/metrics`. Raises EngineAway, EngineUnfit."""
        found: list[tuple[dict[str, str], float]] = []
        for line in (await self._read("/metrics", None)).decode(errors="replace").splitlines():
            # A real engine says 80 KB each second, and to read all of it takes 20 times as long.
            if not line.startswith(name):
                continue
            sample = _SAMPLE.match(line)
            if sample is None or sample["name"] != name:
                continue
            try:
                value = float(sample["value"])
            except ValueError:
                continue
            found.append((dict(_LABEL.findall(sample["labels"] or "")), value))
        return found
