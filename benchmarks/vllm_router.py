"""How many prompt tokens are found in the KVCache where vllm-router sends requests to two clusters by their KV events
(`kv_aware`), and where it sends them in turn (`round_robin`).

Both policies get the same conversations, in one run on the same clusters, a policy at a time and each with texts of its
own. HALFMOON_VLLM_ROUTER names the program (`pip install vllm-router` in an environment of its own).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clusters import PATIENT, cluster, finish, parsed, parser
from halfmoon.bus.embedded import free_port

BLOCK_TOKENS = 256
CLUSTERS = 2
POLICIES = ("kv_aware", "round_robin")
START_S = 60.0


class Source(NamedTuple):
    """One cluster, as the router has it: its HTTP, its KV events and their replay."""

    http: str
    events: str
    replay: str


class RunningRouter(NamedTuple):
    """Its URL, that of its metrics, and the first of its processes."""

    http: str
    metrics: str
    pid: int


def conversations(count: int, turns: int, words: int, draw: random.Random) -> list[tuple[int, str]]:
    """(conversation, prompt) in the order in which they come: `count` conversations of `turns` turns, each turn `words`
    words behind all before it. Which conversation is next is drawn.
    """
    texts = [""] * count
    order = [place for place in range(count) for _ in range(turns)]
    draw.shuffle(order)
    prompts = []
    for place in order:
        texts[place] += " ".join(f"{draw.randrange(10**6)}" for _ in range(words)) + ". "
        prompts.append((place, texts[place]))
    return prompts


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@contextlib.contextmanager
def router(
    program: str, sources: list[Source], policy: str, model: str, block_tokens: int = BLOCK_TOKENS
) -> Iterator[RunningRouter]:
    """vllm-router before these workers, whose KV events tell blocks of `block_tokens`."""
    port, metrics = free_port(), free_port()
    words = [
        program, "--host", "127.0.0.1", "--port", f"{port}", "--prometheus-port", f"{metrics}",
        "--worker-urls", *(each.http for each in sources), "--policy", policy,
        "--worker-startup-check-interval", "1",
    ]  # fmt: skip
    if policy == "kv_aware":
        for each in sources:
            words += ["--kv-event-source", f"{each.http}={each.events}"]
            words += ["--kv-event-replay-source", f"{each.http}={each.replay}"]
        words += ["--kv-event-block-size", f"{block_tokens}", "--kv-event-model", model]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{program} does not start with {policy}") from None
                time.sleep(0.2)
        time.sleep(1.0)  # until its subscriptions are known
        yield RunningRouter(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}/metrics", process.pid)
    finally:
        process.terminate()
        process.wait(20)


def measured(url: str, model: str, prompts: list[tuple[int, str]], pause_s: float) -> dict[str, Any]:
    """One request at a time. `pause_s`: until a router has heard of the last one's blocks.

    "cacheable_tokens": of the whole blocks that a conversation's turn before had, which one cluster alone would find.
    """
    prompt_tokens = cached_tokens = cacheable_tokens = 0
    before: dict[int, int] = {}
    for place, prompt in prompts:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        usage = post(f"{url}/v1/completions", body)["usage"]
        prompt_tokens += usage["prompt_tokens"]
        cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        cacheable_tokens += before.get(place, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        before[place] = usage["prompt_tokens"]
        time.sleep(pause_s)
    return {
        "requests": len(prompts),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "cacheable_tokens": cacheable_tokens,
        "share": round(cached_tokens / prompt_tokens, 4),
    }


@contextlib.contextmanager
def clusters() -> Iterator[list[Source]]:
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(CLUSTERS):
            events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            flags = ("--kv-events", events, "--kv-events-replay", replay, "--kv-events-tokens")
            addresses = stack.enter_context(cluster("--prefill", "1", "--decode", "1", *PATIENT, *flags))
            found.append(Source(addresses["http"], events, replay))
        yield found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--conversations", type=int, default=6)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--words", type=int, default=60, help="of a turn; a word is about seven tokens")
    options.add_argument("--pause-s", type=float, default=0.3, help="between two requests")
    args = parsed(options, conversations=1, turns=2)
    program = os.environ.get("HALFMOON_VLLM_ROUTER", "")
    if not program:
        raise SystemExit("HALFMOON_VLLM_ROUTER names no vllm-router")
    result: dict[str, Any] = {
        "clusters": CLUSTERS,
        "conversations": args.conversations,
        "turns": args.turns,
        "block_tokens": BLOCK_TOKENS,
    }
    with clusters() as sources:
        with urllib.request.urlopen(f"{sources[0].http}/v1/models", timeout=30) as answer:
            model = json.load(answer)["data"][0]["id"]
        for seed, policy in enumerate(POLICIES):
            prompts = conversations(args.conversations, args.turns, args.words, random.Random(seed))
            with router(program, sources, policy, model) as running:
                result[policy] = measured(running.http, model, prompts, args.pause_s)
    lines = [
        f"{policy}: of {result[policy]['prompt_tokens']} prompt tokens {result[policy]['cached_tokens']} were found "
        f"in the cache ({result[policy]['share']:.1%}; {result[policy]['cacheable_tokens']} had been there before)"
        for policy in POLICIES
    ]
    finish(args, result, lines)


if __name__ == "__main__":
    main()
