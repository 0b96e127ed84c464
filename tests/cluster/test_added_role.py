"""The role of docs/adding.md, added to a copy of the tree, works there: a cluster starts it, and it answers clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nats
import orjson
import pytest
import torch

from halfmoon.schemas import subjects
from tests.anchored import PAGE, apply, diff_of, parts
from tests.cluster.harness import Cluster, running
from tests.eventually import BOUND_S, eventually
from tests.tree_copies import copy_tree
from tests.workers.made_models import two_layers

#: The made model has no room for more. The mixed worker serves what is not asked of the new one.
TINY = ("--block-tokens", "16", "--pool-mib", "16", "--dtype", "float32", "--mixed", "1", "--embed", "1")
PACKAGES = ("bus", "cli", "conductor", "schemas", "store", "workers")
TEXT = [3, 1, 4, 1, 5, 9, 2, 6] * 5


def expected(model: Path, tokens: list[int]) -> torch.Tensor:
    """By transformers: the mean of what enters the last layer, of length 1."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    mean = states[-2][0].mean(0)
    return mean / mean.norm()


async def ask(nc: nats.NATS, tokens: list[int]) -> dict[str, Any]:
    reply = await nc.request(subjects.api("embed"), orjson.dumps({"tokens": tokens}), timeout=BOUND_S)
    answer: dict[str, Any] = orjson.loads(reply.data)
    return answer


async def vector(nc: nats.NATS, tokens: list[int]) -> list[float]:
    answer = await ask(nc, tokens)
    assert answer["tokens"] == len(tokens), answer
    found: list[float] = answer["embedding"]
    return found


async def from_its_next_life(cluster: Cluster, nc: nats.NATS, tokens: list[int]) -> list[float]:
    """Its vector after it was killed. What is asked while it dies is lost with it."""
    lives = cluster.output("embed-0").count("takes orders")
    cluster.kill("embed-0")
    await eventually(lambda: cluster.output("embed-0").count("takes orders") > lives, "embed-0 is back")
    return await vector(nc, tokens)


async def test_the_role_that_is_added_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, diff = parts(PAGE.read_text(encoding="utf-8"))["A role"]
    tree = copy_tree(tmp_path / "tree", ".links", "*.toml", *PACKAGES)
    apply(diff_of(diff), tree)
    monkeypatch.setenv("PYTHONPATH", str(tree / ".links"))
    model = two_layers().write(tmp_path / "model")
    with running(tmp_path / "state", *TINY, "--model", str(model)) as cluster:
        nc = await cluster.connect()
        try:
            # This checkout's own classes know no such role.
            status = orjson.loads((await nc.request(subjects.api("status"), b"", timeout=BOUND_S)).data)
            assert {"embed-0": "ready"}.items() <= {
                node["id"]: node["state"] for node in status["nodes"] if node["role"] == "embed"
            }.items()
            first = await vector(nc, TEXT)
            torch.testing.assert_close(torch.tensor(first), expected(model, TEXT), atol=1e-5, rtol=1e-5)
            assert await vector(nc, TEXT[::-1]) != first
            for refused in ([], TEXT * 9, [10**6], ["a"]):
                assert (await ask(nc, refused))["code"] == "invalid_request"
            answer = await cluster.generate(nc, prompt="Once", max_tokens=3, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 3
            assert await from_its_next_life(cluster, nc, TEXT) == first
        finally:
            await nc.close()
