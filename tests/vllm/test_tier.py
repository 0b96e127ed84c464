"""halfmoon's store under a real vLLM: the classes of the installed release, and the bytes that pass through them.

HALFMOON_VLLM names vLLM's program, whose environment has halfmoon's light dependencies too (docs/vllm.md), and
HALFMOON_VLLM_MODEL a model's directory (`make_model.py`); without them this skips.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.eventually import BOUND_S
from tests.vllm.engines import (
    BLOCK_BYTES,
    EVENTS,
    HERE,
    HITS,
    ON_CPU,
    PROGRAM,
    ROOT,
    WITH_OURS,
    counted,
    engine,
    no_model,
    no_vllm,
    store,
    stored,
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
            words,
            env={**os.environ, **ON_CPU, **WITH_OURS},
            stdout=subprocess.PIPE,
            text=True,
            timeout=BOUND_S,
            check=True,
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
# Rows of one length, each a block; and of two engines' lengths: ten blocks of the one's, and five of the other's.
@pytest.mark.parametrize(
    ("block_bytes", "kinds"), [(BLOCK_BYTES, ["float32"]), (BLOCK_BYTES // 10, ["float32", "bfloat16"])]
)
def test_an_engine_that_starts_again_reads_its_prompts_from_the_store_and_says_the_same(
    tmp_path: Path, block_bytes: int, kinds: list[str]
) -> None:
    text = (ROOT / "docs" / "store.md").read_text()
    prompts = [text[first : first + 1500] for first in (0, 3000, 6000)]
    said: dict[str, list[list[int]]] = {}
    with store(tmp_path, block_bytes, 512) as (url, node):
        for dtype in kinds:
            with engine(tmp_path, url, node, "--dtype", dtype) as cold:
                said[dtype] = [told(cold, prompt) for prompt in prompts]
                assert counted(cold, HITS) == 0
                print(f"{dtype}: rows stored {stored(cold, 3 * 8)}")
        for dtype in kinds:
            with engine(tmp_path, url, node, "--dtype", dtype) as warm:
                assert [told(warm, prompt) for prompt in prompts] == said[dtype]
                hits, loaded = counted(warm, HITS), counted(warm, f'{EVENTS}{{event="blocks_loaded"')
                print(f"{dtype}: rows loaded {loaded}; tokens of external hits {hits}")
                assert loaded >= 3 * 8
                assert hits == 32 * loaded
    with engine(tmp_path, url, node, connect_s=0.1) as alone:  # the store is gone, and its nats-server
        assert [told(alone, prompt) for prompt in prompts] == said["float32"]
        assert counted(alone, HITS) == 0
