"""Two real vLLMs behind the conductor: the text of one, hits where the blocks are, an engine killed in mid-answer.

HALFMOON_VLLM names vLLM's program, and HALFMOON_VLLM_MODEL a model's directory (`make_model.py`): this skips
without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from halfmoon.schemas.events import RequestFinished
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.adapters.fleet import OTHER, AdaptedFleet, explained
from tests.chaos.live import replayed
from tests.cluster.harness import PATIENT, Cluster, running
from tests.vllm.engines import START_S, RealEngine, counted, no_model, real_engine, told

pytestmark = [no_model, pytest.mark.slow, pytest.mark.timeout(3_600)]
HITS = "vllm:prefix_cache_hits_total"
#: Of the engine's own blocks, and of the cluster's.
THEIRS, OURS = 32, 256
ARTICLE = (
    "The moon is Earth's only natural satellite, and it has been watched for as long as there are people. "
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RealEngine]]:
    place = tmp_path_factory.mktemp("engines")
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(real_engine(place / f"{name}.log", core))
            for core, name in enumerate(OTHER)
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engines: dict[str, RealEngine]) -> Iterator[Cluster]:
    flags = [word for engine in engines.values() for word in ("--adapt-vllm", engine.url)]
    with running(tmp_path_factory.mktemp("fleet"), *flags, "--dtype", "float32", *PATIENT) as one:
        yield one


@pytest.fixture
async def fleet(cluster: Cluster) -> AsyncIterator[AdaptedFleet]:
    nc = await cluster.connect()
    yield AdaptedFleet(cluster, OTHER, nc)
    await nc.close()


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load("smollm2-135m-instruct")
    return [tokenizer.encode(f"Chapter {number}. {ARTICLE * 28}")[: 540 + 40 * number] for number in range(4)]


async def test_a_fleet_says_what_one_vllm_says(fleet: AdaptedFleet, engines: dict[str, RealEngine]) -> None:
    alone = [told(engines["vllm-0"].url, ids) for ids in prompts()]
    for ids, expected in zip(prompts(), alone, strict=True):
        blocks = (len(ids) - 1) // OURS
        cold = await fleet.cold(ids, 24, blocks=blocks, bound_s=START_S)
        assert cold["token_ids"] == expected
        before = {name: counted(engine.url, HITS) for name, engine in engines.items()}
        warm = await fleet.ask(ids, 24, bound_s=START_S)
        gained = {name: counted(engine.url, HITS) - before[name] for name, engine in engines.items()}
        at = cold["decode_worker"]
        assert (warm["token_ids"], warm["decode_worker"]) == (expected, at)
        assert warm["usage"]["cached_tokens"] == blocks * OURS
        # By the engine's own count: all whole blocks of its own, of which ours are made.
        assert gained == {at: (len(ids) - 1) // THEIRS * THEIRS, OTHER[at]: 0}
        print(f"{len(ids)} tokens: at {at}, {gained[at]:.0f} of them hit by vLLM's own count")
    several = await asyncio.gather(*(fleet.ask(ids, 24, bound_s=START_S) for ids in prompts()))
    assert [said["token_ids"] for said in several] == alone


async def test_an_engine_that_is_killed_in_mid_answer_costs_no_token(
    fleet: AdaptedFleet, engines: dict[str, RealEngine], tmp_path: Path
) -> None:
    ids = prompts()[0][:300]
    whole = await fleet.ask(ids, 200, bound_s=START_S)
    after = await fleet.last_seq()
    asking = asyncio.ensure_future(fleet.ask(ids, 200, bound_s=START_S))
    at = await fleet.drawing(after)
    engines[at].stop()
    assert await fleet.told(after, RequestFinished, at) == [], "it was too fast to be stopped in mid-answer"
    engines[at].kill()
    said = await asking
    assert said["token_ids"] == whole["token_ids"]
    assert said["decode_worker"] == OTHER[at]
    assert "identical" in replayed(fleet.cluster, tmp_path)
    why = explained(tmp_path / "run.jsonl.zst", said["id"])
    print(why)
    assert set(re.findall(r"vllm-\d", why)) == set(OTHER)
