"""The adapter against the classes of the installed vLLM: events of its own block pool, and its view of a request."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from halfmoon.schemas.keys import chain_keys, split_keys
from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.adapters.engine_blocks import EngineBlocks, salt_of
from halfmoon.workers.adapters.engines.words import EngineCompletion, VllmWords
from halfmoon.workers.adapters.kv_events import read_batch
from tests.vllm.engines import HERE, ON_CPU, PROGRAM, no_vllm

pytestmark = [no_vllm, pytest.mark.slow]
SIZE, OURS = 16, 64
TOKENS = list(range(100, 100 + 2 * OURS))
ROOT = b"r" * 16


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    sampling = Sampling(
        temperature=0.5,
        top_k=0,
        seed=2**63 - 1,
        logprobs=2,
        logit_bias={5: 1.0},
        allowed_token_ids=[5, 6],
        min_tokens=3,
    )
    completion = EngineCompletion(salt_of(ROOT), TOKENS, [7], 4, sampling)
    asked = {
        "block_size": SIZE,
        "tokens": TOKENS,
        "salts": [salt_of(ROOT), "", "their own"],
        "body": VllmWords("m").body(completion),
        "prefill": VllmWords("m").prefill_body(completion, ""),
    }
    python = str(Path(PROGRAM).with_name("python"))
    done = subprocess.run(
        [python, str(HERE / "adapter_contract.py")],
        input=json.dumps(asked), env={**os.environ, **ON_CPU}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_its_events_mean_our_blocks_and_it_understands_our_requests_field_by_field(
    said: dict[str, Any],
) -> None:
    blocks = EngineBlocks(block_tokens=OURS, blocks_max=1_000)
    keys = split_keys(chain_keys(ROOT, TOKENS, OURS))
    told = []
    for payload in said["payloads"]:
        batch = read_batch(bytes.fromhex(payload))
        assert batch.malformed == 0
        assert batch.at_s > 0
        told.append([(change.stored, change.key) for change in blocks.apply(batch.events)])
    evicted = [(False, keys[1])]
    unsalted: list[tuple[bool, bytes]] = []
    assert told == [[(True, keys[0])], [(True, keys[1])], evicted, *[unsalted] * 4, [(False, keys[0])]]
    assert blocks.passed_over["of_others"] == 8
    assert (said["unknown"], said["top_k"], said["seed"]) == ([], 0, 2**63 - 1)
    # A prefill half gets its place in an answer that is not streamed.
    assert said["asks_for_place"]["do_remote_decode"] is True
    assert said["ends_by_length_alone"] == [0, True, []]
    assert said["place"] == [True, False]
