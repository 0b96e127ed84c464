"""Decode workers lend to each other: a request longer than any one cache is served, with the text it always has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster.harness import PATIENT, Cluster, running
from tests.cluster.prompts import prompt
from tests.cluster.test_same_text import Form, written_down

#: Blocks of 256 tokens: a decode worker's cache holds 1,280, a prefill worker's 1,024, which prompts outgrow.
SIZES = ("--decode-kv-blocks", "5", "--prefill-kv-blocks", "4")
CAPPED = ("--dtype", "float32", *SIZES, "--worker-wait-s", "120", *PATIENT)
LONG = 2000
TOKENS = 12


async def ask(cluster: Cluster, nc: Any, **fields: Any) -> dict[str, Any]:
    return await cluster.generate(
        nc, prompt=prompt(LONG), max_tokens=TOKENS, temperature=0, ignore_eos=True, **fields
    )


async def test_a_prompt_longer_than_any_cache_has_its_text(tmp_path: Path) -> None:
    with running(tmp_path, "--lend", "--prefill", "1", "--decode", "2", *CAPPED) as cluster:
        nc = await cluster.connect()
        answer = await ask(cluster, nc)
        assert answer["token_ids"] == written_down(Form((LONG,), TOKENS))[LONG]
        await nc.close()
