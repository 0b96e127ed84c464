"""SGLang's OpenAI-compatible server, as much of it as an adapter asks for.

Source: SGLang 0.5.23, `entrypoints/http_server.py`, and `describe_kv_events_publisher` for where its events come from.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from halfmoon.schemas.roles import WorkerRole
from halfmoon.workers.adapters.engines.api import LOOK_S, EngineApi, EngineFacts, EngineUnfit
from halfmoon.workers.adapters.engines.words import SglangWords

#: A host that a publisher binds and nobody can connect to.
_WILDCARDS = frozenset(("*", "0.0.0.0", "::", "[::]"))  # noqa: S104
#: Of a hierarchical cache whose host part is given in bytes: so many times the device's blocks are believed.
_HOST_BLOCKS_MAX = 16


class _Mode(NamedTuple):
    """`bootstraps`: it has a server at which decode engines ask for the KV of a prompt."""

    role: WorkerRole
    halved: bool = True
    caches: bool = True
    bootstraps: bool = False


#: By `--disaggregation-mode`. One that decodes has no prefix cache, unless by an experimental option, and computes no
#: prompt.
_MODES = {
    "null": _Mode("mixed", halved=False),
    "prefill": _Mode("prefill", bootstraps=True),
    "decode": _Mode("decode", caches=False),
}


class SglangApi(EngineApi):
    """See `EngineApi`."""

    events_options = (
        """--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557"}' --page-size 64"""
    )
    reset_needs = "SGLang drops it where no request runs, and with --admin-api-key for that key alone"
    # `/health` computes a token and takes a second at least.
    _alive_path = "/model_info"

    async def facts(self, model: str) -> EngineFacts:
        name, context = await self._served(model)
        info = await self._json("/server_info")
        if not isinstance(info, dict):
            raise EngineUnfit(f"--url {self.url}: /server_info is no JSON object")
        page, tokens = _number(info, "page_size"), _number(info, "max_total_num_tokens")
        if not page or not tokens:
            raise EngineUnfit(f"--url {self.url}: /server_info tells no page_size and max_total_num_tokens")
        name_of_mode = str(info.get("disaggregation_mode") or "null")
        mode = _MODES.get(name_of_mode)
        if mode is None:
            raise EngineUnfit(f"--url {self.url}: the engine runs with --disaggregation-mode {name_of_mode}")
        if mode.caches and info.get("disable_radix_cache"):
            raise EngineUnfit(f"--url {self.url}: the engine runs with --disable-radix-cache")
        bootstrap_port = _number(info, "disaggregation_bootstrap_port") if mode.bootstraps else 0
        if mode.bootstraps and not bootstrap_port:
            raise EngineUnfit(f"--url {self.url}: /server_info tells no disaggregation_bootstrap_port")
        source = info.get("kv_events") if mode.caches else None
        source = source if isinstance(source, dict) else {}
        if max(_number(info, "dp_size"), _number(source, "dp_size")) > 1:
            raise EngineUnfit(
                f"--url {self.url}: the engine runs with --dp-size; each rank needs a server of its own"
            )
        block = _number(source, "block_size") or page
        return EngineFacts(
            model=name,
            context_tokens=context,
            cache_blocks=tokens // block,
            block_tokens=block,
            events=self._there(source, "endpoint_port_base"),
            replay=self._there(source, "replay_endpoint_port_base"),
            topic=str(source.get("topic") or ""),
            blocks_kept=_blocks_kept(info, tokens // block),
            batch_max=_number(info, "max_running_requests"),
            token_budget=_number(info, "chunked_prefill_size"),
            role=mode.role,
            halved=mode.halved,
            bootstrap_port=bootstrap_port,
            caches=mode.caches,
        )

    def words_of(self, facts: EngineFacts) -> SglangWords:
        host = self.reached_at.rpartition(":")[0]
        return SglangWords(facts.model, halved=facts.halved, host=host, bootstrap_port=facts.bootstrap_port)

    def _there(self, source: dict[str, Any], port: str) -> str:
        """Where it publishes, as seen from here; "": it does not."""
        number = _number(source, port)
        host = str(source.get("endpoint_host") or "*")
        if host in _WILDCARDS:
            host = self.host
        return f"tcp://{host}:{number}" if number else ""

    async def cache_percent(self) -> float:
        said = await self._json("/v1/loads?include=core")
        try:
            return 100 * max(float(one["token_usage"]) for one in said["loads"])
        except (KeyError, TypeError, ValueError):
            raise EngineUnfit(f"--url {self.url}: /v1/loads tells no token_usage") from None

    async def reset_prefix_cache(self) -> None:
        # It waits so long for requests to end, and refuses while there are some.
        await self._read(f"/flush_cache?timeout={LOOK_S / 2}", {})


def _number(info: dict[str, Any], field: str) -> int:
    """0 where it is no positive whole number."""
    value = info.get(field)
    return value if isinstance(value, int) and value > 0 else 0


def _blocks_kept(info: dict[str, Any], blocks: int) -> int:
    """Those of the device and, in a hierarchical cache, of the host."""
    if not info.get("enable_hierarchical_cache"):
        return blocks
    ratio = info.get("hicache_ratio")
    if info.get("hicache_size") or not isinstance(ratio, int | float):
        return blocks * _HOST_BLOCKS_MAX
    return blocks * (1 + math.ceil(min(ratio, _HOST_BLOCKS_MAX)))
