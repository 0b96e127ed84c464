"""A tier whose store agent is stopped, held and killed under load: each job ends, no row gets another key's bytes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from halfmoon.store.adapters.tier import StoreTier, TierOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROW, KEYS, ROUNDS = 64 * 4096, 64, 60
#: `transfer_s` of these tests, and the longest that giving back what a job held may take behind it.
TRANSFER_S, GIVE_BACK_S = 2.0, 12.0


def agent(url: str, name: str) -> subprocess.Popen[bytes]:
    words = ["--nats", url, "--cluster", name, "--node", name, "--block-bytes", f"{ROW}", "--pool-mib", "32"]
    return subprocess.Popen([sys.executable, "-m", "halfmoon.cli.main", "store", *words, "--data-port", "-1"])


def content(key: int) -> np.ndarray:
    return np.random.default_rng(key).integers(0, 256, ROW, np.uint8)


def store_again(tier: StoreTier, keys: list[int]) -> None:
    """Until the agent is back and has them all."""
    until = time.monotonic() + 60
    while True:
        tier.submit(-1, [b"%d" % key for key in keys], keys, load=False)
        tier.drain()
        (ended,) = tier.finished()
        if len(ended.moved) == len(keys):
            return
        assert time.monotonic() < until
        time.sleep(0.1)


def test_under_faults_of_its_agent_every_job_ends_and_every_byte_is_its_own(nats_url: str) -> None:
    name = f"e{uuid.uuid4().hex[:8]}"
    drawn = random.Random(17)
    rows = np.zeros((KEYS, ROW), np.uint8)
    running = agent(nats_url, name)
    options = TierOptions.of({"nats": nats_url, "node": name, "transfer_s": TRANSFER_S, "connect_s": 30.0})
    tier = StoreTier(rows, options, namespace=b"faults")
    tier.start()
    loaded, failed, longest_s = 0, 0, 0.0
    faults = Counter[signal.Signals | None]()
    try:
        for turn in range(ROUNDS):
            first = drawn.sample(range(KEYS), 16)
            second = [*drawn.sample(first, 12), *(set(range(KEYS)) - set(first))][:16]
            for key in first:
                rows[key] = content(key)
            store_again(tier, first)
            rows[:] = 0
            tier.submit(turn, [b"%d" % key for key in second], second, load=True)
            time.sleep(drawn.random() * 0.01)
            fault = drawn.choice([None, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            faults[fault] += 1
            if fault is not None:
                running.send_signal(fault)
            began = time.monotonic()
            tier.drain()
            longest_s = max(longest_s, time.monotonic() - began)
            (ended,) = tier.finished()
            assert ended.job_id == turn
            moved = {int(key) for key in ended.moved}
            for key in moved:
                assert (rows[key] == content(key)).all(), (turn, key)
            untouched = set(range(KEYS)).difference(second)
            assert not rows[sorted(untouched)].any()
            loaded, failed = loaded + len(moved), failed + len(second) - len(moved)
            if fault is signal.SIGSTOP:
                running.send_signal(signal.SIGCONT)
            elif fault is not None:
                running.wait(20)
                running = agent(nats_url, name)
        store_again(tier, [0])  # the last agent is up, and has taken over what a killed one left
    finally:
        tier.close()
        running.send_signal(signal.SIGCONT)
        running.send_signal(signal.SIGTERM)
        running.wait(20)
    told = {fault.name if fault else "none": count for fault, count in faults.items()}
    print(f"faults {told}; blocks loaded {loaded}, failed {failed}, longest wait {longest_s:.1f} s")
    assert loaded >= 12 * ROUNDS // 3
    assert failed > 0
    assert longest_s < TRANSFER_S + GIVE_BACK_S
    assert not list(Path("/dev/shm").glob(f"*{name}*"))
