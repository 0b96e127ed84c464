"""Tokens a second of `halfmoon generate` on the default cluster, in exact and fast numerics, and beside them those of a
bare loop over the engine, in one process.

    python benchmarks/generate.py                      # this checkout
    python benchmarks/generate.py --against ../older   # and another one, by turns; it has an environment of its own

Each round starts a cluster, asks once unseen, and asks again. `tokens_per_s` is by the answer's `timing_ms.total`: from
the frontend's taking the request to its last token. `command_s` is the whole command, with the start of its Python.
`of_bare` is the cluster's tokens a second over those of the loop, round by round: all but the engine costs the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clusters import PATIENT, ROOT, cluster, finish, parsed, parser, python_in, spread
from benchmarks.cpu_engines import COMPUTING, OURS, Engine

TEXT = "The moon is"
#: Of `TEXT`, which an answer confirms: the bare loop begins behind as many.
TEXT_TOKENS = 3


def generate(python: str, directory: Path, tokens: int) -> dict[str, float]:
    """One `halfmoon generate` of a cluster whose state is in `directory`."""
    words = [python, "-m", "halfmoon.cli.main", "generate", TEXT, "--cluster", directory.name, "--json"]
    words += ["--max-tokens", f"{tokens}", "--ignore-eos", "--temperature", "0"]
    environment = {**os.environ, "XDG_STATE_HOME": str(directory.parents[1])}
    began = time.perf_counter()
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    command_s = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"halfmoon generate ended with {done.returncode}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    usage = answer["usage"]
    if (usage["prompt_tokens"], usage["completion_tokens"]) != (TEXT_TOKENS, tokens):
        raise SystemExit(f"another answer than was asked for: {usage}")
    timing = answer["timing_ms"]
    return {
        "tokens_per_s": tokens / timing["total"] * 1000,
        "first_token_ms": timing["ttft"],
        "token_ms": timing["tbt_mean"],
        "command_s": command_s,
    }


def bare(python: str, numerics: str, tokens: int) -> float:
    """Tokens a second of the loop, its prefill included."""
    one = Engine(numerics, "float32", None, python)
    try:
        one.answer()
        prompt = list(range(100, 100 + TEXT_TOKENS))
        one.ask("hold", prompts=[prompt])
        one.ask("decode", batch=1, steps=2)
        first_ms = one.ask("first", prompt=prompt)["ms"]
        step_ms = one.ask("decode", batch=1, steps=tokens - 1)["ms"]
    finally:
        one.end()
    return float(tokens / (first_ms + (tokens - 1) * step_ms) * 1000)


def measure(root: Path, numerics: str, tokens: int) -> dict[str, float]:
    python = python_in(root)
    with cluster("--numerics", numerics, "--dtype", "float32", *PATIENT, root=root) as addresses:
        directory = Path(addresses["directory"])
        generate(python, directory, tokens)
        found = generate(python, directory, tokens)
    bare_per_s = bare(python, numerics, tokens)
    return {**found, "bare_tokens_per_s": bare_per_s, "of_bare": found["tokens_per_s"] / bare_per_s}


def compared(here: Sequence[Mapping[str, float]], there: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Of each figure the spread of its rounds here; with another checkout there too, and here over there by rounds."""
    found: dict[str, Any] = {}
    for figure in here[0]:
        new = [each[figure] for each in here]
        found[figure] = {"here": spread(new)}
        if there:
            old = [each[figure] for each in there]
            ratios = [a / b for a, b in zip(new, old, strict=True)]
            found[figure] |= {"there": spread(old), "here_over_there": spread(ratios)}
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--against", metavar="DIR", type=Path, default=None, help="another checkout, by turns"
    )
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--numerics", nargs="+", choices=OURS, default=list(OURS))
    args = parsed(options, rounds=1, tokens=4, numerics=["exact"])
    roots = ([args.against.resolve()] if args.against else []) + [ROOT]
    runs: dict[tuple[Path, str], list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for numerics in args.numerics:
            for root in roots:
                runs.setdefault((root, numerics), []).append(measure(root, numerics, args.tokens))
    rows, lines = [], []
    for numerics in args.numerics:
        there = runs[roots[0], numerics] if args.against else []
        figures = compared(runs[ROOT, numerics], there)
        rows.append({"numerics": numerics, **figures})
        lines.append(f"{numerics}, {args.tokens} tokens behind {TEXT_TOKENS}, float32")
        for figure, each in figures.items():
            line = "  ".join(
                f"{name} {of['p50']:.3f} ({of['min']:.3f} to {of['max']:.3f})" for name, of in each.items()
            )
            lines.append(f"  {figure:18} {line}")
    about = {"tokens": args.tokens, "rounds": args.rounds, "against": _commit(args.against)}
    finish(args, {**about, "rows": rows}, lines, also=COMPUTING)


def _commit(root: Path | None) -> str:
    """What `there` is; "" without one."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(words, cwd=root, text=True).strip() if root is not None else ""


if __name__ == "__main__":
    main()
