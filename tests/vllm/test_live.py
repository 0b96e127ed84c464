"""The same requests to a real vLLM and to a real cluster, over the same model: values too.

HALFMOON_VLLM names vLLM's program, HALFMOON_VLLM_MODEL a Hugging Face directory (`tests/vllm/make_model.py` makes one);
without them this skips. With HALFMOON_VLLM_RECORD=1 vLLM's answers become the recording of the default tests.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.cluster.harness import PATIENT, running
from tests.vllm.answers import ask
from tests.vllm.asked import requests
from tests.vllm.differences import DIFFERENCES, differences, reasons
from tests.vllm.engines import vllm
from tests.vllm.request import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
AT_ONCE = 16


def asked_of(url: str) -> dict[str, Any]:
    """As many at once as vLLM computes together: neither has answers that depend on what it computes beside them."""
    asked = requests()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = threads.map(lambda each: ask(url, each), asked)
        return {each.name: answer for each, answer in zip(asked, answers, strict=True)}


def test_every_difference_of_values_has_a_reason(tmp_path: Path) -> None:
    program, model = os.environ.get("HALFMOON_VLLM"), os.environ.get("HALFMOON_VLLM_MODEL")
    if not program or not model:
        pytest.skip("HALFMOON_VLLM and HALFMOON_VLLM_MODEL name no vLLM and no model")
    words = (
        "--served-model-name", MODEL, "--max-model-len", "1024", "--max-num-seqs", f"{AT_ONCE}",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    )  # fmt: skip
    with vllm(program, model, tmp_path / "vllm.log", *words) as url:
        theirs = asked_of(url)
    if os.environ.get("HALFMOON_VLLM_RECORD"):
        packed = zstandard.ZstdCompressor(level=19).compress(json.dumps(theirs, sort_keys=True).encode())
        (Path(__file__).parent / "vllm-0.32.json.zst").write_bytes(packed)
    # A busy machine refuses nothing.
    flags = (
        "--model", model, "--served-model-name", MODEL, "--max-model-len", "1024", "--admission", "none",
        "--prefill", "1", "--decode", "1",
    )  # fmt: skip
    with running(tmp_path, *flags, *PATIENT) as cluster:
        ours = asked_of(cluster.http)
    unexplained: list[str] = []
    used: set[int] = set()
    for name, answer in theirs.items():
        rows, without = reasons(name, differences(answer, ours[name], values=True))
        used |= rows
        unexplained += without
    assert unexplained == []
    assert [row.what for place, row in enumerate(DIFFERENCES) if place not in used] == []
