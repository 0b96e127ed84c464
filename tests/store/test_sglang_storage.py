"""`HalfmoonStorage` over a class that stands for SGLang's: pages of a host pool reach a real store agent and come back.
`tests/sglang` has the same with SGLang's own class.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from store_harness import PATIENT, Cluster, cluster

from halfmoon.schemas.policy import Layout
from tests.sglang.host_pool import BLOCK_BYTES, PAGE, HostPool, indices

ADAPTER = "halfmoon.store.adapters.sglang_hicache"
KEYS = [f"{number:064x}" for number in range(4)]


class HiCacheStorage:
    """It keeps the pool, as SGLang's does."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    path = "sglang.srt.mem_cache.hicache_storage"
    for depth in range(1, 5):
        name = ".".join(path.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("HiCacheStorageConfig", "HiCacheStorageExtraInfo"):
        setattr(sys.modules[path], name, SimpleNamespace)
    sys.modules[path].HiCacheStorage = HiCacheStorage  # type: ignore[attr-defined]
    sys.modules.pop(ADAPTER, None)
    yield importlib.import_module(ADAPTER)
    del sys.modules[ADAPTER]


def storage(adapter: ModuleType, here: Cluster, pool: HostPool, in_place: bool, **changes: Any) -> Any:
    """A storage of one rank that has its pool."""
    options = {"node": "n1", "nats": here.url, **PATIENT, **changes.pop("options", {})}
    fields: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "dcp_rank": 0,
        "dcp_size": 1, "is_mla_model": False, "model_name": "m", "should_split_heads": False, "tp_lcm_size": None,
        "extra_config": {"interface_v1": int(in_place), "halfmoon": options}, **changes,
    }  # fmt: skip
    made = adapter.HalfmoonStorage(SimpleNamespace(**fields), None)
    made.register_mem_pool_host(pool)
    return made


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "flat"])
async def test_pages_come_back_to_engines_of_the_same_configuration_alone(
    nats_url: str, adapter: ModuleType, in_place: bool
) -> None:
    first, second, other = HostPool(1), HostPool(), HostPool()
    strangers: list[dict[str, Any]] = [
        {"tp_rank": 1, "tp_size": 2}, {"pp_rank": 1, "pp_size": 2}, {"model_name": "other"},
        {"options": {"weight_version": "2"}}, {"options": {"tenant": "acme"}},
    ]  # fmt: skip

    def story(here: Cluster) -> None:
        with ExitStack() as open_ones:

            def made(pool: HostPool, place: bool, **changes: Any) -> Any:
                return open_ones.enter_context(closing(storage(adapter, here, pool, place, **changes)))

            one, two = made(first, in_place), made(second, in_place)
            assert one.batch_exists(KEYS) == 0
            if in_place:
                assert one.batch_set_v1(KEYS[:3], indices(2, 1, 0)) == [True] * 3
                assert two.batch_get_v1([KEYS[0], KEYS[3], KEYS[2]], indices(5, 6, 7)) == [True, False, True]
            else:
                assert one.batch_set(KEYS[:3], [first.page(number) for number in (2, 1, 0)])
                for key, page in ((KEYS[0], 5), (KEYS[2], 7)):
                    second.set_from_flat_data_page(
                        page * PAGE, two.get(key, second.get_dummy_flat_data_page())
                    )
                assert two.get(KEYS[3], second.get_dummy_flat_data_page()) is None
            assert (two.batch_exists(KEYS), two.exists(KEYS[2]), two.exists(KEYS[3])) == (3, True, False)
            assert torch.equal(second.page(5), first.page(2))
            assert torch.equal(second.page(7), first.page(0))
            assert not second.page(6).any()
            found = [made(other, in_place, **changes).batch_exists(KEYS) for changes in strangers]
            assert [*found, made(other, not in_place).batch_exists(KEYS)] == [0] * 6
            # Ranks of an MLA model hold the same.
            ranks = [made(other, in_place, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1)]
            ranks[0].batch_set_v1(KEYS[:1], indices(0))
            assert ranks[1].batch_exists(KEYS) == 1

    async with cluster(nats_url) as here:
        await here.agent("n1", layout=Layout.opaque(BLOCK_BYTES), data_port=-1)
        await asyncio.to_thread(story, here)


@pytest.mark.pure
def test_a_storage_without_a_pool_has_nothing_and_a_wrong_option_is_named(adapter: ModuleType) -> None:
    made = adapter.HalfmoonStorage(SimpleNamespace(extra_config={"halfmoon": {"node": "n"}}))
    assert (made.batch_exists(KEYS), made.exists(KEYS[0]), made.get(KEYS[0], torch.zeros(1))) == (
        0,
        False,
        None,
    )
    assert made.batch_get_v1(KEYS, indices(0, 1, 2, 3)) == made.batch_set_v1(KEYS, indices(0, 1, 2, 3))
    assert made.set(KEYS[0], torch.zeros(1)) is False
    made.close()
    with pytest.raises(ValueError, match=r"extra-config: halfmoon: .*`nodes`"):
        adapter.HalfmoonStorage(SimpleNamespace(extra_config={"halfmoon": {"node": "n", "nodes": "x"}}))


@pytest.mark.pure
def test_without_sglang_the_adapter_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError, match="install halfmoon into the environment of an SGLang"):
        importlib.import_module(ADAPTER)
