"""halfmoon's store under SGLang's own storage class and factory, with a host pool of the tests, over real store agents.

HALFMOON_SGLANG_WHEEL names SGLang's wheel (`make test-sglang` has pip bring it); the classes are taken out of it for
the run. Without it this skips. SGLang itself does not run here: it needs a GPU.
"""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.eventually import BOUND_S, eventually_here
from tests.guardian import cluster_name
from tests.sglang.host_pool import BLOCK_BYTES, PAGE, PAGES, HostPool, indices
from tests.sglang.wheel import WHEEL, modules_of_wheel
from tests.store.store_harness import PATIENT
from tests.vllm.engines import agent, store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not WHEEL, reason="HALFMOON_SGLANG_WHEEL names no wheel"),
]
NAMED = [
    f"sglang.srt.{name}"
    for name in ("mem_cache.hicache_storage", "mem_cache.storage.backend_factory", "environ")
]
#: Parameters of what SGLang calls; those marked are abstract.
METHODS = {
    "register_mem_pool_host": "mem_pool_host",
    "on_host_pools_registered": "",
    "batch_exists": "keys extra_info",
    "batch_get_v1": "keys host_indices extra_info",
    "batch_set_v1": "keys host_indices extra_info",
    "get*": "key target_location target_sizes",
    "batch_get*": "keys target_locations target_sizes",
    "set*": "key value target_location target_sizes",
    "batch_set*": "keys values target_locations target_sizes",
    "exists*": "key",
    "clear": "",
    "get_stats": "",
}


@pytest.fixture(scope="module", autouse=True)
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with modules_of_wheel(tmp_path_factory.mktemp("sglang"), NAMED):
        yield
    sys.modules.pop("halfmoon.store.adapters.sglang_hicache", None)


def backend(
    url: str, node: str, pool: HostPool, *, in_place: int = 1, config: Any = None, **options: Any
) -> Any:
    """Made by SGLang's factory, as `--hicache-storage-backend dynamic` makes it."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    fields: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m",
        **(config or {}),
    }  # fmt: skip
    extra = {
        "backend_name": "halfmoon",
        "module_path": "halfmoon.store.adapters.sglang_hicache",
        "class_name": "HalfmoonStorage",
        "interface_v1": in_place,
        "halfmoon": {"node": node, "nats": url, **PATIENT, **options},
    }
    made = StorageBackendFactory.create_backend(
        "dynamic", HiCacheStorageConfig(extra_config=extra, **fields), pool
    )
    made.register_mem_pool_host(pool)
    return made


def close(*made: Any) -> None:
    for each in made:
        getattr(each, "_backend", each).close()


def test_the_storage_fits_the_class_of_the_wheel() -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    from halfmoon.store.adapters.sglang_hicache import HalfmoonStorage

    differences = []
    for marked, expected in METHODS.items():
        name = marked.rstrip("*")
        theirs = getattr(HiCacheStorage, name, None)
        if theirs is None:
            differences.append(f"HiCacheStorage.{name} is gone")
            continue
        for owner in (HiCacheStorage, HalfmoonStorage):
            there = " ".join(list(inspect.signature(getattr(owner, name)).parameters)[1:])
            if there != expected:
                differences.append(f"{owner.__name__}.{name} takes {there!r}, not {expected!r}")
        if (name in HiCacheStorage.__abstractmethods__) != marked.endswith("*"):
            differences.append(f"HiCacheStorage.{name}: abstract or not has changed")
    known = {name.rstrip("*") for name in METHODS}
    differences += [
        f"HiCacheStorage.{name} is new and abstract" for name in HiCacheStorage.__abstractmethods__ - known
    ]
    assert differences == []
    assert not HalfmoonStorage.__abstractmethods__


@pytest.mark.parametrize("in_place", [1, 0], ids=["in place", "flat"])
def test_pages_of_one_engine_are_read_by_another_and_by_no_other_rank(tmp_path: Path, in_place: int) -> None:
    keys = [f"{number:064x}" for number in range(5)]
    first, second, other = HostPool(1), HostPool(), HostPool()
    with store(tmp_path, BLOCK_BYTES, 4) as (url, node):
        one = backend(url, node, first, in_place=in_place)
        two = backend(url, node, second, in_place=in_place)
        rank = backend(url, node, other, in_place=in_place, config={"tp_rank": 1, "tp_size": 2})
        weights = backend(url, node, other, in_place=in_place, weight_version="2")
        try:
            assert one.batch_exists(keys) == 0
            if in_place:
                assert one.batch_set_v1(keys[:4], indices(3, 2, 1, 0)) == [True] * 4
            else:
                assert one.batch_set(keys[:4], [first.page(number) for number in (3, 2, 1, 0)])
            assert [each.batch_exists(keys) for each in (one, two, rank, weights)] == [4, 4, 0, 0]
            assert (two.exists(keys[0]), two.exists(keys[4])) == (True, False)
            wanted = [keys[0], keys[4], keys[3]]
            if in_place:
                assert two.batch_get_v1(wanted, indices(5, 6, 7)) == [True, False, True]
            else:
                pages = two.batch_get(wanted, [second.get_dummy_flat_data_page() for _ in wanted])
                assert [page is not None for page in pages] == [True, False, True]
                second.set_from_flat_data_page(5 * PAGE, pages[0])
                second.set_from_flat_data_page(7 * PAGE, pages[2])
            assert torch.equal(second.page(5), first.page(3))
            assert torch.equal(second.page(7), first.page(0))
            assert not second.kv[:, : 5 * PAGE].any()
        finally:
            close(one, two, rank, weights)


def test_what_sglangs_own_injector_breaks_is_a_miss_and_never_a_wrong_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.005")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    first, second = HostPool(1), HostPool()
    asked = came = 0
    with store(tmp_path, BLOCK_BYTES, 4) as (url, node):
        one, two = backend(url, node, first), backend(url, node, second)
        assert type(one).__name__ == "HiCacheStorageFailureInjector"
        try:
            for turn in range(60):
                keys = [f"{turn:032x}{number:032x}" for number in range(PAGES)]
                put = one.batch_set_v1(keys, indices(*range(PAGES)))
                held = two.batch_exists(keys)
                assert held in ((0, PAGES) if all(put) else (0,))
                second.kv.zero_()
                got = two.batch_get_v1(keys, indices(*reversed(range(PAGES))))
                for number, there in enumerate(got):
                    page = second.page(PAGES - 1 - number)
                    assert torch.equal(page, first.page(number)) if there else not page.any()
                asked, came = asked + PAGES, came + sum(got)
        finally:
            close(one, two)
    print(f"{came} of {asked} pages came")
    assert 0 < came < asked


def test_a_store_that_dies_is_a_miss_and_is_used_again(tmp_path: Path) -> None:
    keys = [f"{number:064x}" for number in range(PAGES)]
    pool = HostPool(1)
    with store(tmp_path, 4096, 1) as (url, _):
        name = cluster_name()
        running = agent(url, name, name, BLOCK_BYTES, 4, "--data-port", "-1")
        made = None
        try:
            made = backend(url, name, pool)
            assert all(made.batch_set_v1(keys, indices(*range(PAGES))))
            running.send_signal(signal.SIGKILL)
            running.wait(BOUND_S)
            assert made.batch_exists(keys) == 0
            assert made.batch_get_v1(keys, indices(*range(PAGES))) == [False] * PAGES
            assert made.batch_set_v1(keys, indices(*range(PAGES))) == [False] * PAGES
            running = agent(url, name, name, BLOCK_BYTES, 4, "--data-port", "-1")
            eventually_here(
                lambda: all(made.batch_set_v1(keys, indices(*range(PAGES)))), "the agent takes all pages"
            )
            assert made.batch_exists(keys) == PAGES
        finally:
            if made is not None:
                close(made)
            running.send_signal(signal.SIGTERM)
            running.wait(BOUND_S)
    assert not list(Path("/dev/shm").glob(f"*{name}*"))


def test_a_wrong_option_and_another_size_are_named(tmp_path: Path) -> None:
    with store(tmp_path, 3 * BLOCK_BYTES, 4) as (url, node):
        with pytest.raises(ValueError, match=r"extra-config: halfmoon: .*`nodes`"):
            backend(url, node, HostPool(), nodes="x")
        with pytest.raises(ValueError, match=f"this engine's have {BLOCK_BYTES}: halfmoon store"):
            backend(url, node, HostPool())
