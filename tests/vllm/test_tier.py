"""halfmoon's store under a real vLLM: the classes of the installed release, and the bytes that pass through them.

HALFMOON_VLLM names vLLM's program, whose environment has halfmoon's light dependencies too (docs/vllm.md), and
HALFMOON_VLLM_MODEL a model's directory (`make_model.py`); without them this skips.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from tests.vllm.engines import (
    BLOCK_BYTES,
    EVENTS,
    HERE,
    HITS,
    PROGRAM,
    ROOT,
    counted,
    engine,
    environment,
    forget,
    no_model,
    no_vllm,
    store,
    told,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@no_vllm
def test_the_tier_fits_the_classes_of_the_installed_vllm_and_carries_rows_through_its_manager(
    tmp_path: Path,
) -> None:
    with store(tmp_path, 8192, 1) as (url, node):
        words = [str(Path(PROGRAM).with_name("python")), str(HERE / "tier_contract.py"), url, node]
        run = subprocess.run(
            words, env=environment(), stdout=subprocess.PIPE, text=True, timeout=300, check=True
        )
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["differences"] == []
    hit = ["RETRY", "HIT_PENDING", "HIT"]
    assert told["story"] == {
        "cold": [["RETRY", "MISS"], None],
        "first": {"blocks_stored": 2},
        "warm": [[hit, 41], [hit, 42], [["RETRY", "MISS"], None]],
        "second": {"blocks_loaded": 2},
    }


@no_model
def test_an_engine_that_starts_again_reads_its_prompts_from_the_store_and_says_the_same(
    tmp_path: Path,
) -> None:
    text = (ROOT / "docs" / "store.md").read_text()
    prompts = [text[first : first + 1500] for first in (0, 3000, 6000)]
    with store(tmp_path, BLOCK_BYTES, 256) as (url, node):
        with engine(tmp_path, url, node) as cold:
            said = [told(cold, prompt)[0] for prompt in prompts]
            assert counted(cold, HITS) == 0
            until = time.monotonic() + 30
            while (
                stored := counted(cold, f'{EVENTS}{{event="blocks_stored"')
            ) < 3 * 8 and time.monotonic() < until:
                told(cold, "Hello")  # vLLM takes the counts when it steps
                time.sleep(0.2)
        with engine(tmp_path, url, node) as warm:
            assert [told(warm, prompt)[0] for prompt in prompts] == said
            hits, loaded = counted(warm, HITS), counted(warm, f'{EVENTS}{{event="blocks_loaded"')
    with engine(tmp_path, url, node) as alone:  # the store is gone, and its nats-server
        assert [told(alone, prompt)[0] for prompt in prompts] == said
        assert counted(alone, HITS) == 0
    print(f"blocks stored {stored}, loaded {loaded}; tokens of external hits {hits}")
    assert stored >= 3 * 8
    assert loaded >= 3 * 8
    assert hits == 32 * loaded


@no_model
def test_a_long_prompt_comes_sooner_from_the_store_than_from_the_engines_own_prefill(tmp_path: Path) -> None:
    """By turns: a prompt of 2,000 tokens that is new, and the one before it, which host memory (64 rows) has lost."""
    drawn = random.Random(1)
    prompts = [[drawn.randrange(100, 40_000) for _ in range(2000)] for _ in range(6)]
    own_s, from_store_s = [], []
    with store(tmp_path, BLOCK_BYTES, 1200) as (url, node), engine(tmp_path, url, node) as running:
        told(running, prompts[0][:200])
        said: list[int] = []
        for prompt, before in zip(prompts, [None, *prompts], strict=False):
            forget(running)
            tokens, took_s = told(running, prompt)
            own_s.append(took_s)
            time.sleep(1)  # its last blocks are on their way to the store
            if before is not None:
                forget(running)
                hits = counted(running, HITS)
                again, took_s = told(running, before)
                from_store_s.append(took_s)
                assert (again, counted(running, HITS) - hits) == (said, 1984)
                time.sleep(0.5)
            said = tokens
    for name, took in (("own prefill", own_s), ("from the store", from_store_s)):
        print(
            f"{name}: {statistics.median(took):.2f} s ({min(took):.2f} to {max(took):.2f}, {len(took)} prompts)"
        )
    assert statistics.median(from_store_s) < statistics.median(own_s) / 2
