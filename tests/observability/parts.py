"""Every kind of process, as small as can be, and what it shows; a real Prometheus; what the files in docker
say.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.bus.telemetry.metrics import exposition, process_registry
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.live.metrics import ConductorMetrics, Tally
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.policy import Layout
from halfmoon.store.agent.agent import StoreAgent
from halfmoon.store.agent.metrics import StoreMetrics
from halfmoon.store.config import StoreConfig
from halfmoon.workers.adapters.engines.words import VllmWords
from halfmoon.workers.adapters.metrics import AdapterMetrics
from halfmoon.workers.adapters.mirror import EngineMirror
from halfmoon.workers.adapters.state import AdapterState
from halfmoon.workers.decode.worker import DecodeWorker
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.log_health import LogHealth
from halfmoon.workers.frontend.metrics import FrontendMetrics, LogDisk
from halfmoon.workers.machines import WorkerFacts
from halfmoon.workers.model.loading.files import load_config
from halfmoon.workers.model.null_engine import NullEngine
from halfmoon.workers.prefill.worker import PrefillWorker
from halfmoon.workers.worker import WorkerConfig
from tests.guardian import cluster_name

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docker" / "observability"
MODEL = "smollm2-135m-instruct"
NULL = Layout(
    model=MODEL, model_fingerprint="n", layers=0, kv_heads=0, head_dim=0, block_tokens=256, dtype="none"
)
SMALL = Layout(
    model=MODEL, model_fingerprint="f", layers=2, kv_heads=1, head_dim=16, block_tokens=16, dtype="float32"
)
#: A metric's name in a query.
NAME = re.compile(r"\b(?:halfmoon|vllm|process)[a-z0-9_]*(?::[a-z0-9_]+)*\b")


def shown(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample by its name and labels, as Prometheus would read it."""
    text = exposition(registry).decode()
    return {
        f"{sample.name}{{{','.join(f'{k}={v}' for k, v in sorted(sample.labels.items()))}}}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def families(registry: CollectorRegistry) -> dict[str, str]:
    """Every family by its name in Prometheus (counters end in _total), with its type."""
    found = {}
    for family in text_string_to_metric_families(exposition(registry).decode()):
        found[f"{family.name}_total" if family.type == "counter" else family.name] = family.type
    return found


def samples(found: dict[str, str]) -> set[str]:
    """Names that a query may use."""
    return {
        f"{name}{end}"
        for name, kind in found.items()
        for end in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }


@asynccontextmanager
async def processes(url: str, scratch: Path) -> AsyncIterator[dict[str, CollectorRegistry]]:
    """The registry of one process of each role."""
    async with AsyncExitStack() as stack:

        async def bus(name: str) -> Bus:
            made = await Bus.connect(BusConfig(url=url), name=name)
            stack.push_async_callback(made.close)
            return made

        registries = {}
        registries["conductor"] = process_registry(one := await bus("c"), role="conductor", process_id="c")
        conductor = ConductorMetrics(one, Core(), Tally())
        await conductor.refresh()
        registries["conductor"].register(conductor)
        config = StoreConfig(
            cluster=cluster_name(),
            node_id="n",
            layout=SMALL,
            slots=4,
            cluster_secret="a secret of the tests",
            ssd=str(scratch / "tier"),
            ssd_bytes=1 << 20,
        )
        agent = StoreAgent(one := await bus("s"), config)
        store = StoreMetrics(agent.context)
        store.follow()
        await agent.start()
        stack.push_async_callback(agent.stop)
        registries["store"] = process_registry(one, role="store", process_id="store-n", node_id="n")
        registries["store"].register(store)
        for kind in (PrefillWorker, DecodeWorker):
            engine = NullEngine(load_config(MODEL), num_blocks=8, block_tokens=256)
            one = await bus(kind.role)
            worker = kind(
                one,
                engine,
                None,
                WorkerConfig(
                    worker_id=kind.role,
                    node_id="n",
                    layout=NULL,
                    profile=CostProfile(),
                    kv_blocks=8,
                    context_tokens_max=1024,
                ),
            )
            await worker.start()
            stack.push_async_callback(worker.stop)
            registries[kind.role] = process_registry(one, role=kind.role, process_id=kind.role, node_id="n")
            registries[kind.role].register(worker.metrics)
        # A mixed worker's are no other than theirs, but for an adapter's.
        mirror = EngineMirror(
            block_tokens=256, cache_tokens=1024, cache_blocks=64, events="", replay="", topic=""
        )
        registries["mixed"] = process_registry(await bus("a"), role="mixed", process_id="a", node_id="a")
        facts = WorkerFacts(worker_id="a", incarnation="i", layout=NULL, kv_blocks=8, eos_ids=frozenset())
        state = AdapterState(facts, CostProfile(), words=VllmWords("e"))
        registries["mixed"].register(AdapterMetrics(mirror, state))
        of_frontend = process_registry(one := await bus("f"), role="frontend", process_id="f")
        registries["frontend"] = FrontendMetrics(MODEL, {}, of_frontend).registry
        seeing = FrontendConfig(frontend_id="f", model=MODEL, log_directory=str(scratch))
        of_frontend.register(LogDisk(LogHealth(one, seeing), seeing))
        yield registries


# --- what the files say -------------------------------------------------------------------------------------


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Title and target of every query of the dashboard."""
    dashboard = json.loads((FILES / "grafana" / "dashboards" / "halfmoon.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target


def rules(file: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FILES / file).read_text())["groups"] for rule in group["rules"]]
