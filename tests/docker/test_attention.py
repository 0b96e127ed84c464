"""docker/compose.yaml with attention workers on a real engine: chats are answered as a cluster without them
answers, also while one is killed.

A cluster of its own, as its credentials are made at its first start. It is down before that of the other tests is up.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.docker.stack import Stack
from tests.eventually import eventually_here

QUESTIONS = ("Who was Galileo?", "What is a tide?", "Why is the sky blue?", "Name a river of France.")
#: Enough that the four together decode for seconds: both attention workers hold KV when one of them is killed.
TOKENS = 64
WITHOUT = {"HALFMOON_ATTENTION": "2", "HALFMOON_NUMERICS": "exact"}
WITH = {**WITHOUT, "HALFMOON_DECODE_ATTENTION": "remote"}
WORKERS = {"attention-0", "attention-1"}
#: Of compose.small.yaml, which leaves the two cores to fewer processes.
SMALL = {"prefill": 1, "decode": 1, "store": 2, "frontend": 1}
Answer = tuple[str, str, int]


@pytest.fixture(scope="module")
def apart(built: Stack) -> Iterator[Stack]:
    """A cluster whose attention workers are credentials only, until a test starts them."""
    with built.another().running() as stack:
        stack.overlays, stack.whole, stack.conductors = ("compose.small.yaml",), SMALL, 2
        stack.settings = WITHOUT
        stack.up("--scale", "attention=0")
        stack.wait_whole()
        yield stack


@pytest.fixture(scope="module")
def local(apart: Stack) -> list[Answer]:
    """What the chats are answered while decode workers keep their KV."""
    with ThreadPoolExecutor(len(QUESTIONS)) as clients:
        answers = chats(apart, clients)
    assert not any(places(apart))
    return answers


@pytest.fixture(scope="module")
def remote(apart: Stack, local: list[Answer]) -> Stack:
    """The same cluster, its KV at two attention workers."""
    apart.settings = WITH
    apart.whole = {**SMALL, "attention": 2, "store": SMALL["store"] + 2}
    apart.up()
    apart.wait_whole()
    return apart


def chat(stack: Stack, number: int) -> Answer:
    """Text, why it ended, its tokens."""
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": QUESTIONS[number]}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{stack.http}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer = json.loads(reply.read())
    (choice,) = answer["choices"]
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]


def chats(stack: Stack, clients: ThreadPoolExecutor) -> list[Answer]:
    """All of them at once, whole."""
    answers = list(clients.map(lambda number: chat(stack, number), range(len(QUESTIONS))))
    assert [(why, tokens) for _, why, tokens in answers] == [("length", TOKENS)] * len(QUESTIONS)
    return answers


def places(stack: Stack) -> list[set[str]]:
    """Of each order to decode, in order: the attention workers that have its KV."""
    return [
        {part["worker_id"] for part in order.get("cache", [])} for order in stack.decisions("StartDecode")
    ]


def holding(stack: Stack) -> set[str]:
    """Attention workers that have KV of a request."""
    nodes = stack.get("/status")[1].get("nodes", [])
    return {node["id"] for node in nodes if node["role"] == "attention" and node.get("kv_used")}


def test_chats_are_answered_as_without_attention_workers_which_hold_their_kv(
    remote: Stack, local: list[Answer]
) -> None:
    before = len(places(remote))
    with ThreadPoolExecutor(len(QUESTIONS)) as clients:
        assert chats(remote, clients) == local
    found = places(remote)[before:]
    assert {len(each) for each in found} == {1}
    assert set().union(*found) == WORKERS
    assert "identical" in remote.replayed()


def test_an_attention_worker_that_is_killed_costs_no_text_and_takes_part_again(
    remote: Stack, local: list[Answer]
) -> None:
    container = remote.containers("attention")[0]
    before = len(places(remote))
    with ThreadPoolExecutor(len(QUESTIONS)) as clients:
        asked = [clients.submit(chat, remote, number) for number in range(len(QUESTIONS))]
        eventually_here(lambda: holding(remote) == WORKERS, "both attention workers hold KV")
        remote.docker("kill", container)
        assert [each.result() for each in asked] == local
    # Those whose KV was lost are placed anew, at the one that is left.
    assert len(places(remote)) - before > len(QUESTIONS)
    assert remote.get("/ready")[0] == 200

    remote.docker("start", container)
    remote.wait_whole()
    before = len(places(remote))
    with ThreadPoolExecutor(len(QUESTIONS)) as clients:
        assert chats(remote, clients) == local
    assert set().union(*places(remote)[before:]) == WORKERS
    eventually_here(lambda: not holding(remote), "nothing is held")
    assert "identical" in remote.replayed()


def test_down_leaves_nothing(remote: Stack) -> None:
    assert remote.left()
    remote.down()
    assert remote.left() == []
