"""Two real vLLMs, of which one computes prompts and the other answers: the KV goes by halfmoon's store agents, a layer
at a time, and the text is that of one.

HALFMOON_VLLM names vLLM's program, and HALFMOON_VLLM_MODEL a model's directory (`make_model.py`): this skips
without them.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmoon.bus.config import BusConfig
from halfmoon.bus.connection import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.store import StoreStatus, StoreStatusRequest
from tests.adapters.fleet import AdaptedFleet
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, running
from tests.eventually import BOUND_S, eventually, eventually_here
from tests.vllm.engines import HITS, START_S, RealEngine, counted, no_model, told
from tests.vllm.pair import Pair, answer, running_pair
from tests.vllm.test_fleet import THEIRS, prompts

pytestmark = [no_model, pytest.mark.slow, pytest.mark.timeout(3_600)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    # A prompt takes several steps.
    with running_pair(tmp_path_factory.mktemp("pair"), "--max-num-batched-tokens", "256") as one:
        yield one


def asks_first(pair: Pair, ids: list[int]) -> tuple[str, threading.Thread, list[dict[str, Any]]]:
    """The order of a prompt whose KV the engine that answers waits for; the answer comes at the thread's end."""
    order, before = uuid.uuid4().hex, loaded(pair.decode)
    answers: list[dict[str, Any]] = []
    named = {"do_remote_prefill": True, "halfmoon_order": order, "halfmoon_worker": "prefill"}
    asking = threading.Thread(target=lambda: answers.append(answer(pair.decode.url, ids, named)))
    asking.start()
    eventually_here(lambda: loaded(pair.decode) > before, "the request waits for its KV")
    return order, asking, answers


def loaded(engine: RealEngine) -> float:
    return counted(engine.url, HITS)


def test_one_vllm_answers_with_the_kv_of_the_other_whichever_is_asked_first(pair: Pair) -> None:
    for ids in prompts():
        before = loaded(pair.decode)
        first = answer(pair.prefill.url, ids, {"do_remote_decode": True}, 1)
        said = answer(pair.decode.url, ids, first["kv_transfer_params"])
        external = loaded(pair.decode) - before
        print(f"{len(ids)} tokens: {external:.0f} of them came, by the engine's own count")
        assert external == len(ids)
        assert said["choices"][0]["token_ids"] == told(pair.prefill.url, ids)

    # Each engine has the beginning already, in its own whole blocks: the rest comes.
    longer = [*ids, *range(100, 200)]
    before = loaded(pair.decode)
    first = answer(pair.prefill.url, longer, {"do_remote_decode": True}, 1)
    said = answer(pair.decode.url, longer, first["kv_transfer_params"])
    assert loaded(pair.decode) - before == len(longer) - len(ids) // THEIRS * THEIRS
    assert said["choices"][0]["token_ids"] == told(pair.prefill.url, longer)

    # The engine that answers is asked first.
    ids = [(7 * i) % 5000 + 100 for i in range(700)]
    order, asking, answers = asks_first(pair, ids)
    answer(pair.prefill.url, ids, {"do_remote_decode": True, "halfmoon_order": order}, 1)
    asking.join(START_S)
    assert answers[0]["choices"][0]["token_ids"] == told(pair.prefill.url, ids)


async def test_a_cluster_has_each_do_one_half_and_an_agent_that_is_killed_costs_time_alone(
    pair: Pair, tmp_path: Path
) -> None:
    engines = {"vllm-0": pair.prefill, "vllm-1": pair.decode}
    flags = ["--adapt-vllm-prefill", pair.prefill.url, "--adapt-vllm-decode", pair.decode.url]
    with running(tmp_path / "fleet", *flags, "--dtype", "float32", *PATIENT) as cluster:
        nc = await cluster.connect()
        fleet = AdaptedFleet(cluster, engines, nc)
        first = True
        for ids in prompts():
            ids = [*ids[1:], ids[0]]  # no prompt of another test
            before = loaded(pair.decode)
            said = await fleet.ask(ids, 24, bound_s=START_S)
            assert (said["prefill_worker"], said["decode_worker"]) == ("vllm-0", "vllm-1")
            assert loaded(pair.decode) - before == len(ids)
            # The first prompt shows that the connector takes names. From then on the decode engine is asked before the
            # prompt is computed.
            kv = [type(one).__name__ for _, one in await cluster.kv() if said["id"] in str(one)]
            assert kv == (["PrefillResult"] if first else ["KvPromised", "PrefillResult"])
            first = False
            assert said["token_ids"] == told(pair.prefill.url, ids)
        await nc.close()
        assert "identical" in replayed(cluster, tmp_path)

    ids = [(11 * i) % 5000 + 100 for i in range(1500)]
    order, asking, answers = asks_first(pair, ids)
    bus = await Bus.connect(BusConfig(url=pair.nats), name="test")

    async def coming() -> bool:
        status = await bus.request(
            subjects.store("decode", "status"), StoreStatusRequest(), StoreStatus, timeout_s=BOUND_S
        )
        return status.slots_reserved > 0

    named = {"do_remote_decode": True, "halfmoon_order": order}
    computing = threading.Thread(target=answer, args=(pair.prefill.url, ids, named, 1))
    computing.start()
    await eventually(coming, "the KV comes")
    pair.agents["prefill"].kill()
    computing.join(START_S)
    asking.join(START_S)
    await bus.close()
    assert answers[0]["choices"][0]["token_ids"] == told(pair.prefill.url, ids)
