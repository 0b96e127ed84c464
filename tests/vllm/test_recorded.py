"""vLLM's recorded answers, and ours to the same requests: each status and each field, but for the differences that
docs/vllm-differences.md gives reasons for.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from frontend_double import MODEL, Cluster, cluster

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.vllm.answers import ask
from tests.vllm.asked import requests
from tests.vllm.differences import DIFFERENCES, PAGE, differences, page, reasons
from tests.vllm.request import MODEL as SERVED

RECORDED = Path(__file__).parent / "vllm-0.32.json.zst"


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zstandard.decompress(RECORDED.read_bytes()))
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a real edge, with the model's tokenizer; the double's workers draw."""
    tokenizer = Tokenizer.load(MODEL)
    server = EmbeddedServer.start(tmp_path_factory.mktemp("nats"), max_payload_bytes=1 << 20)

    def ask_all(here: Cluster) -> dict[str, Any]:
        anything, answers = here.double.answer_ids, {}
        for each in requests():
            ids = tokenizer.encode(each.text)
            here.double.answer_ids = [*ids, here.double.eos] if ids else anything
            answers[each.name] = ask(here.url, each)
        return answers

    async def main() -> dict[str, Any]:
        async with cluster(server.url, tokenizer, model=SERVED, context_tokens=1024) as here:
            return await asyncio.to_thread(ask_all, here)

    try:
        return asyncio.run(asyncio.wait_for(main(), 200))
    finally:
        server.stop()


def test_each_request_is_in_the_recording() -> None:
    names = [each.name for each in requests()]
    assert len(names) == len(set(names)) >= 150
    assert set(recorded()) == set(names)


@pytest.mark.realtime
def test_every_difference_has_a_reason(ours: dict[str, Any]) -> None:
    unexplained: list[str] = []
    used: set[int] = set()
    for name, vllm in recorded().items():
        rows, without = reasons(name, differences(vllm, ours[name], values=False))
        used |= rows
        unexplained += without
    assert unexplained == []
    # A row that only values can show is for `make test-vllm`.
    gone = [
        row.what
        for place, row in enumerate(DIFFERENCES)
        if place not in used and not set("=~") & set(row.places[:5])
    ]
    assert gone == [], "no difference any more"


def test_the_document_is_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m tests.vllm.differences"
