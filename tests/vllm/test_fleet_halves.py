"""Two real vLLMs behind the conductor, of which one computes prompts and the other answers: the text of one.

HALFMOON_VLLM names vLLM's program, and HALFMOON_VLLM_MODEL a model's directory (`make_model.py`): this skips
without them. The KV goes by files (`kv_place.py`), since NIXL is none of a CPU's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.schemas.kv import PrefillResult
from tests.adapters.fleet import AdaptedFleet
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.vllm.engines import HERE, START_S, RealEngine, counted, no_model, real_engine, told
from tests.vllm.test_fleet import THEIRS, prompts

pytestmark = [no_model, pytest.mark.slow, pytest.mark.timeout(3_600)]
EXTERNAL = "vllm:external_prefix_cache_hits_total"
PREFILL, DECODE = "vllm-0", "vllm-1"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RealEngine]]:
    place = tmp_path_factory.mktemp("engines")
    transfer = {
        "kv_connector": "PlaceConnector", "kv_connector_module_path": "kv_place", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(place / "kv")},
    }  # fmt: skip
    # Room for three of the prompts, so that two engines fit into a small machine.
    words = ["--kv-transfer-config", json.dumps(transfer), "--num-gpu-blocks-override", "128"]
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(real_engine(place / f"{name}.log", core, *words, PYTHONPATH=str(HERE)))
            for core, name in enumerate((PREFILL, DECODE))
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engines: dict[str, RealEngine]) -> Iterator[Cluster]:
    flags = ["--adapt-vllm-prefill", engines[PREFILL].url, "--adapt-vllm-decode", engines[DECODE].url]
    with running(tmp_path_factory.mktemp("fleet"), *flags, "--dtype", "float32", *PATIENT) as one:
        yield one


async def test_one_vllm_answers_with_the_kv_that_the_other_one_computed(
    cluster: Cluster, engines: dict[str, RealEngine], tmp_path: Path
) -> None:
    nc = await cluster.connect()
    fleet = AdaptedFleet(cluster, engines, nc)
    for ids in prompts():
        before = counted(engines[DECODE].url, EXTERNAL)
        said = await fleet.ask(ids, 24, bound_s=START_S)
        loaded = counted(engines[DECODE].url, EXTERNAL) - before
        assert (said["prefill_worker"], said["decode_worker"]) == (PREFILL, DECODE)
        # By the engine's own count: all whole blocks of its own.
        assert loaded == (len(ids) - 1) // THEIRS * THEIRS
        assert said["token_ids"] == told(engines[PREFILL].url, ids)
        print(f"{len(ids)} tokens: {loaded:.0f} of them came from the other vLLM, by this one's own count")
    await nc.close()
    results = [message for _, message in await cluster.kv() if isinstance(message, PrefillResult)]
    places = [json.loads(each.engine_kv.params) for each in results if each.engine_kv is not None]
    assert [place["do_remote_prefill"] for place in places] == [True] * len(prompts())
    assert "identical" in replayed(cluster, tmp_path)
