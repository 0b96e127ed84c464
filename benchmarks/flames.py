"""Where the processes that a request passes through spend their time, as flame graphs: an older checkout's and this
one's, each with the null engine under the same load.

    python benchmarks/flames.py --against ../older --save flames

py-spy (`pip install py-spy`) samples one process of each kind while 32 connections send prompts of 128 token ids, which
are answered by one token each. Sampling takes time of the process, so the rates here are lower than without. With
`--save`, results/NAME/ holds the graphs, one a process, which a browser opens.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop
from clusters import ROOT, cluster, command_of, family, finish, parsed, parser, process_name
from dynamo_edge import HEAD, Load, run_load

from benchmarks.measured import RESULTS

LOAD = Load("ids", 128, 1, 32)
PROCESSES = ("frontend", "conductor", "prefill")
SAMPLES_PER_S = 200
#: Every model has so many tokens, and the null engine reads none of them.
VOCABULARY = 1000


def bodies(model: str) -> Iterator[bytes]:
    """Requests over HTTP whose prompts share no beginning."""
    draw = random.Random(str(LOAD))
    while True:
        prompt = draw.choices(range(VOCABULARY), k=LOAD.tokens)
        asked = {"model": model, "prompt": prompt, "max_tokens": LOAD.output, "stream": True}
        body = json.dumps({**asked, "temperature": 0, "ignore_eos": True}).encode()
        yield HEAD % len(body) + body


def sampled(spy: str, root: Path, seconds: float, graphs: Path) -> tuple[float, list[Path]]:
    """Requests a second of a cluster of the checkout at `root`, and the graphs that it left in the folder."""
    with cluster("--engine", "null", "--prefill", "2", "--decode", "2", root=root) as addresses:
        with urllib.request.urlopen(f"{addresses['http']}/v1/models", timeout=30) as answer:
            model = json.load(answer)["data"][0]["id"]
        requests = bodies(model)
        uvloop.run(run_load(addresses["http"], LOAD, requests, 1.0))  # what is made at first use is made
        pids: dict[str, int] = {}
        for pid in family(addresses["pid"]):
            pids.setdefault(process_name(command_of(pid)), pid)
        graphs.mkdir(parents=True)
        made = {name: graphs / f"{name}.svg" for name in PROCESSES}
        spies = [
            subprocess.Popen(
                [spy, "record", "--pid", str(pids[name]), "--duration", str(round(seconds)),
                 "--rate", str(SAMPLES_PER_S), "--output", str(path)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )
            for name, path in made.items()
        ]  # fmt: skip
        started = time.monotonic()
        answers, _ = uvloop.run(run_load(addresses["http"], LOAD, requests, seconds + 1))
        took = time.monotonic() - started
        for each in spies:
            if each.wait(60):
                raise SystemExit(f"{each.args}: ended with {each.returncode}")
    return answers / took, list(made.values())


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--against", metavar="DIR", type=Path, required=True, help="the older checkout")
    options.add_argument("--seconds", type=float, default=15.0)
    args = parsed(options, seconds=2.0)
    spy = shutil.which("py-spy")
    if spy is None:
        raise SystemExit("there is no py-spy: `pip install py-spy`")
    against = args.against.resolve()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=against, capture_output=True, text=True, check=True
    ).stdout.strip()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, root in (("before", against), ("after", ROOT)):
            rate, graphs = sampled(spy, root, args.seconds, Path(folder) / name)
            rows.append({"checkout": name, "requests_per_s": round(rate, 1)})
            if args.save:
                for graph in graphs:
                    kept = RESULTS / args.save / f"{graph.stem}-{name}.svg"
                    kept.parent.mkdir(exist_ok=True)
                    shutil.copyfile(graph, kept)
    lines = [f"{row['checkout']}: {row['requests_per_s']:,.0f} requests/s while sampled" for row in rows]
    finish(args, {"against": commit, "rows": rows}, lines)


if __name__ == "__main__":
    main()
