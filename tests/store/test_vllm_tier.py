"""`HalfmoonTier` over classes that stand for vLLM's: what vLLM calls reaches a real store agent and comes back as it
reads it. `tests/vllm` has the same with a real vLLM.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
from fake_vllm import JobResult, LookupResult, TransferJob
from store_harness import PATIENT, Cluster, cluster

from halfmoon.schemas.policy import Layout
from tests.eventually import eventually_here

ROW, ROWS = 4096, 4
KEYS = [bytes([number]) * 36 for number in range(3)]
REQUEST = SimpleNamespace(req_id="r")


@pytest.fixture
def adapter() -> Iterator[ModuleType]:
    with fake_vllm.installed() as module:
        yield module


class Engine:
    """What vLLM's scheduler does with its tier. Its calls wait, so they run beside the agents."""

    def __init__(self, adapter: ModuleType, here: Cluster, spec: Any, **options: Any) -> None:
        view = memoryview(bytearray(ROWS * ROW)).cast("b", (ROWS, ROW))
        self.rows = np.asarray(view).view(np.uint8)
        given = {"nats": here.url, **PATIENT, **options}
        self.tier = adapter.HalfmoonTier(spec, view, "HalfmoonTier", node="n1", **given)

    def lookups(self, *keys: bytes) -> list[LookupResult]:
        answers: list[LookupResult] = []

        def known() -> bool:
            answers[:] = [self.tier.lookup(key, REQUEST) for key in keys]
            self.tier.on_schedule_end(None)
            return LookupResult.RETRY not in answers

        assert not known(), "a verdict before the store was asked"
        eventually_here(known, "the tier has verdicts")
        return answers

    def job(self, keys: list[bytes], rows: list[int], *, load: bool) -> JobResult:
        submit = self.tier.submit_load if load else self.tier.submit_store
        submit(TransferJob(7, tuple(keys), np.array(rows)))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        return result


@contextmanager
def engine(*given: Any, **options: Any) -> Iterator[Engine]:
    made = Engine(*given, **options)
    try:
        yield made
    finally:
        made.tier.shutdown()


async def test_what_one_engine_stores_another_of_the_same_configuration_loads(
    nats_url: str, adapter: ModuleType
) -> None:
    async with cluster(nats_url) as here:
        await here.agent("n1", layout=Layout.opaque(ROW), data_port=-1)

        def story() -> None:
            hit, miss = LookupResult.HIT, LookupResult.MISS
            with engine(adapter, here, fake_vllm.spec()) as first:
                assert first.lookups(KEYS[0]) == [miss]
                first.rows[1], first.rows[2] = 41, 42
                stored = first.job(KEYS[:2], [1, 2], load=False)
                assert (stored.job_id, stored.success, stored.transfer_bytes) == (7, True, 2 * ROW)
            with engine(adapter, here, fake_vllm.spec(), locality="REMOTE") as second:
                assert second.tier.locality is fake_vllm.Locality.REMOTE
                assert second.lookups(*KEYS) == [hit, hit, miss]
                came = second.job(KEYS, [3, 2, 1], load=True)
                assert (came.success, came.successful_keys) == (False, (KEYS[0], KEYS[1]))
                assert [int(row[-1]) for row in second.rows] == [0, 0, 42, 41]
                assert second.tier.lookup(KEYS[2], REQUEST) is miss
                events = {"blocks_loaded": 2, "blocks_missing": 1}
                stats = second.tier.get_stats()
                assert stats.counts == {(adapter.EVENTS, name): count for name, count in events.items()}
                assert second.tier.get_stats() is None
                assert set(second.tier.build_metric_definitions({})) == {adapter.EVENTS}
                second.tier.on_request_finished(REQUEST)
                assert len(second.tier._store._verdicts) == 0

        await asyncio.to_thread(story)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"model": SimpleNamespace(name="other", dtype="float32")}, {}),
        ({"model": SimpleNamespace(name="m", dtype="bfloat16")}, {}),
        ({"canonical_layout": False}, {}),
        ({"groups": [SimpleNamespace(tokens_per_block=16, layer_names=("layer.0",))]}, {}),
        ({}, {"weight_version": "2"}),
        ({}, {"tenant": "acme"}),
    ],
    ids=["model", "dtype", "layout", "block size", "weights", "tenant"],
)
async def test_engines_that_differ_in_anything_that_bytes_depend_on_share_nothing(
    nats_url: str, adapter: ModuleType, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    async with cluster(nats_url) as here:
        await here.agent("n1", layout=Layout.opaque(ROW), data_port=-1)

        def story() -> None:
            with engine(adapter, here, fake_vllm.spec()) as first:
                assert first.job(KEYS[:1], [0], load=False).success
            with engine(adapter, here, fake_vllm.spec(**changes), **options) as other:
                assert other.lookups(KEYS[0]) == [LookupResult.MISS]

        await asyncio.to_thread(story)


@pytest.mark.pure
def test_without_vllm_the_adapter_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="install halfmoon into the environment of a vLLM"):
        import halfmoon.store.adapters.vllm_tier  # noqa: F401
