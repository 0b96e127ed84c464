"""A tier whose store agent is stopped, held and killed under load: each job ends, no row gets another key's bytes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from store_harness import PATIENT

from halfmoon.store.adapters.tier import StoreTier, TierOptions
from tests.eventually import BOUND_S, eventually_here
from tests.guardian import cluster_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROW, KEYS, ROUNDS = 64 * 4096, 64, 60
#: So long a job waits for an agent that is stopped.
TRANSFER_S = 2.0


def agent(url: str, name: str) -> subprocess.Popen[bytes]:
    words = ["--nats", url, "--cluster", name, "--node", name, "--block-bytes", f"{ROW}", "--pool-mib", "32"]
    return subprocess.Popen([sys.executable, "-m", "halfmoon.cli.main", "store", *words, "--data-port", "-1"])


def content(key: int) -> np.ndarray:
    return np.random.default_rng(key).integers(0, 256, ROW, np.uint8)


def store_again(tier: StoreTier, keys: list[int]) -> None:
    """Until the agent is back and has them all."""

    def stored() -> bool:
        tier.submit(-1, [b"%d" % key for key in keys], keys, load=False)
        tier.drain()
        (ended,) = tier.finished()
        return len(ended.moved) == len(keys)

    eventually_here(stored, "the agent takes all blocks")


def test_under_faults_of_its_agent_every_job_ends_and_every_byte_is_its_own(nats_url: str) -> None:
    name = cluster_name()
    drawn = random.Random(17)
    rows = np.zeros((KEYS, ROW), np.uint8)
    running = agent(nats_url, name)
    options = TierOptions.of({"nats": nats_url, "node": name, **PATIENT, "transfer_s": TRANSFER_S})
    tier = StoreTier(rows, options, namespace=b"faults")
    tier.start()
    loaded, failed = 0, 0
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
            for _ in range(drawn.randrange(12)):
                content(first[0])  # some work, so that the fault comes at another moment of the load
            fault = drawn.choice([None, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            faults[fault] += 1
            if fault is not None:
                running.send_signal(fault)
            tier.drain()
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
                running.wait(BOUND_S)
                running = agent(nats_url, name)
        store_again(tier, [0])  # the last agent is up, and has taken over what a killed one left
    finally:
        tier.close()
        running.send_signal(signal.SIGCONT)
        running.send_signal(signal.SIGTERM)
        running.wait(BOUND_S)
    told = {fault.name if fault else "none": count for fault, count in faults.items()}
    print(f"faults {told}; blocks loaded {loaded}, failed {failed}")
    assert loaded > 0
    assert failed > 0
    assert not list(Path("/dev/shm").glob(f"*{name}*"))
