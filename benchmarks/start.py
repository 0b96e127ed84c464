"""How long `halfmoon up` takes to be ready, what memory the default cluster has, and how long a killed worker is away.

    python benchmarks/start.py                      # this checkout
    python benchmarks/start.py --against ../older   # and another one, by turns; it has an environment of its own

Each checkout starts once unseen, so that profiles and weights are in the user's cache: a warm start. Memory is the sum
of all processes' proportional set sizes (what several share counts once), in the same minute of each cluster's life,
after one answer; `pools` is the part of it that is shared memory, which is the store agents' pools.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusters import ROOT, finish, parser, spread

READY_S_MAX = 240.0
VICTIM = "decode-0"
QUESTION = {"model": "smollm2-135m-instruct", "prompt": "The moon is", "max_tokens": 8, "temperature": 0}


def until(what: Callable[[], bool], words: str) -> float:
    """How long it took, in seconds."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > READY_S_MAX:
            raise SystemExit(f"{words}: not within {READY_S_MAX:.0f} s")
        time.sleep(0.01)
    return time.monotonic() - began


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += family(child)
    return found


def memory_mib(pid: int) -> dict[str, float]:
    kib = {"Pss": 0, "Pss_Shmem": 0}
    for each in family(pid):
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in kib:
                kib[name] += int(rest.split()[0])
    return {"all": kib["Pss"] / 1024, "pools": kib["Pss_Shmem"] / 1024}


def pid_of(up: int, worker: str) -> int:
    for each in family(up):
        words = Path(f"/proc/{each}/cmdline").read_bytes().decode().split("\0")
        if ["--id", worker] in [words[i : i + 2] for i in range(len(words))]:
            return each
    raise SystemExit(f"no process of {worker}")


def measure(root: Path) -> dict[str, float]:
    """One cluster of the checkout at `root`, from its start to its end."""
    name = f"bench-{uuid.uuid4().hex[:6]}"
    with tempfile.TemporaryDirectory() as state:
        directory = Path(state) / "halfmoon" / name
        process = subprocess.Popen(
            [str(root / ".venv/bin/halfmoon"), "up", "--cluster", name],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_STATE_HOME": state},
            start_new_session=True,
        )
        try:
            ready_s = until((directory / "cluster.json").exists, "ready")
            http = json.loads((directory / "cluster.json").read_text())["http"]
            body = json.dumps(QUESTION).encode()
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{http}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == QUESTION["max_tokens"]
            memory = memory_mib(process.pid)
            log = directory / "output" / f"{VICTIM}.log"
            before = log.read_text().count("takes orders")
            os.kill(pid_of(process.pid, VICTIM), signal.SIGKILL)
            back_s = until(lambda: log.read_text().count("takes orders") > before, f"{VICTIM} is back")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    return {
        "ready_s": ready_s,
        "memory_mib": memory["all"],
        "memory_but_pools_mib": memory["all"] - memory["pools"],
        "killed_worker_back_s": back_s,
    }


def main() -> None:
    made: argparse.ArgumentParser = parser(__doc__ or "")
    made.add_argument("--against", metavar="DIR", type=Path, default=None, help="another checkout, by turns")
    made.add_argument("--rounds", type=int, default=5)
    args = made.parse_args()
    roots = {"here": ROOT} | ({"there": args.against.resolve()} if args.against else {})
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in roots}
    for number in range(args.rounds + 1):
        for who, root in reversed(roots.items()):
            run = measure(root)
            if number:
                runs[who].append(run)
    figures: dict[str, Any] = {}
    lines = []
    for figure in runs["here"][0]:
        values = {who: [run[figure] for run in runs[who]] for who in runs}
        figures[figure] = {who: spread(each) for who, each in values.items()}
        line = f"{figure:24} " + "  ".join(
            f"{who} {statistics.median(each):9.2f}" for who, each in values.items()
        )
        if "there" in values:
            ratios = [a / b for a, b in zip(values["here"], values["there"], strict=True)]
            figures[figure]["here_over_there"] = spread(ratios)
            line += f"  {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        lines.append(line)
    finish(args, {"rounds": args.rounds, "figures": figures}, lines)


if __name__ == "__main__":
    main()
