"""How long `halfmoon up` takes to be ready, at what CPU time, what memory the default cluster has, and how long a
killed worker is away.

    python benchmarks/start.py                      # this checkout
    python benchmarks/start.py --against ../older   # and another one, by turns; it has an environment of its own

Each checkout starts once unseen, so that profiles and weights are in the user's cache: a warm start. CPU time is that
of all processes together, user and system, at the moment they are ready. Memory is the sum of their proportional set
sizes (what several share counts once) after one answer; `pools` is the part of it that is shared memory, which is the
store agents' pools. `worker_private_mib` is the median of what a worker shares with nobody.
"""

from __future__ import annotations

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

from clusters import ROOT, cpu_s, family, finish, parsed, parser, pid_of, spread

READY_S_MAX = 240.0
VICTIM = "decode-0"
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
QUESTION = {"model": "smollm2-135m-instruct", "prompt": "The moon is", "max_tokens": 8, "temperature": 0}


def until(what: Callable[[], bool], words: str) -> float:
    """How long it took, in seconds."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > READY_S_MAX:
            raise SystemExit(f"{words}: not within {READY_S_MAX:.0f} s")
        time.sleep(0.01)
    return time.monotonic() - began


def memory_mib(pid: int, *names: str) -> list[float]:
    """By names of /proc/PID/smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return [kib[name] / 1024 for name in names]


def measure(root: Path) -> dict[str, float]:
    """One cluster of the checkout at `root`, from its start to its end."""
    name = f"bench-{uuid.uuid4().hex[:6]}"
    with tempfile.TemporaryDirectory() as state:
        directory = Path(state) / "halfmoon" / name
        process = subprocess.Popen(
            [str(root / ".venv/bin/python"), "-m", "halfmoon.cli.main", "up", "--cluster", name],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_STATE_HOME": state},
            start_new_session=True,
        )
        try:
            ready_s = until((directory / "cluster.json").exists, "ready")
            started_cpu_s = cpu_s(process.pid)
            return {"ready_s": ready_s, "ready_cpu_s": started_cpu_s, **_of_the_ready(process.pid, directory)}
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _of_the_ready(up: int, directory: Path) -> dict[str, float]:
    http = json.loads((directory / "cluster.json").read_text())["http"]
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{http}/v1/completions", json.dumps(QUESTION).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == QUESTION["max_tokens"]
    shares = [memory_mib(pid, "Pss", "Pss_Shmem") for pid in family(up)]
    private = [sum(memory_mib(pid_of(up, worker), "Private_Clean", "Private_Dirty")) for worker in WORKERS]
    log = directory / "output" / f"{VICTIM}.log"
    before = log.read_text().count("takes orders")
    os.kill(pid_of(up, VICTIM), signal.SIGKILL)
    back_s = until(lambda: log.read_text().count("takes orders") > before, f"{VICTIM} is back")
    return {
        "memory_mib": sum(all_of_it for all_of_it, _ in shares),
        "memory_but_pools_mib": sum(all_of_it - pools for all_of_it, pools in shares),
        "worker_private_mib": statistics.median(private),
        "killed_worker_back_s": back_s,
    }


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--against", metavar="DIR", type=Path, default=None, help="another checkout, by turns")
    made.add_argument("--rounds", type=int, default=5)
    args = parsed(made, rounds=1)
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
    finish(args, {"rounds": args.rounds, "against": _commit(args.against), "figures": figures}, lines)


def _commit(root: Path | None) -> str:
    """What `there` is; "" without one."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(words, cwd=root, text=True).strip() if root is not None else ""


if __name__ == "__main__":
    main()
