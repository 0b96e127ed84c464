"""Recorded agents' sessions on real clusters, in a closed loop: the default policy and the papers' own rule, by turns.

Both clusters are up at once: the built-in model, two prefill and two decode workers each, nothing refused. In a round
both get the same sessions with the same texts, drawn anew for each round, first the one, then the other; the order
changes with the round. Lengths are a 32nd of the recorded ones; a turn comes when the answer before it is whole and the
recorded pause, shortened, is over. TTFT as the client sees it, mean and p90 over the requests of a round; the ratio is
of one round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clusters import PATIENT, cluster, finish, parsed, parser
from benchmarks.workloads import recorded_agents, rows

POLICIES = ("halfmoon", "mooncake")
FLAGS = ("--prefill", "2", "--decode", "2", "--pool-mib", "1024", *PATIENT)
SCALE = 32
#: A short load, before anything is measured.
WARM = ("--requests", "8", "--concurrency", "4", "--prompt-tokens", "300", "--output-tokens", "4")


def bench(http: str, *words: str) -> dict[str, Any]:
    """The report of `halfmoon bench`."""
    command = [sys.executable, "-m", "halfmoon.cli.main", "bench", "--http", http, "--json", *words]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    if found["completed"] != found["requests"]:
        raise SystemExit(f"{http}: of {found['requests']} requests {found['completed']} were answered")
    return found


def session_options(options: argparse.ArgumentParser, *, sessions: int, turns: int) -> None:
    """Rounds, and the sessions of each."""
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--sessions", type=int, default=sessions)
    options.add_argument(
        "--turns", type=int, default=turns, help=f"of each session, the first so many ({turns})"
    )
    options.add_argument("--speed", type=float, default=20.0, help="of beginnings and pauses (20)")


def session_words(trace: Path, seed: int, args: argparse.Namespace) -> list[str]:
    """Options of `halfmoon bench` for the sessions of a round."""
    words = ["--trace", str(trace), "--scale", str(SCALE), "--speed", str(args.speed), "--seed", str(seed)]
    return [*words, "--sessions", str(args.sessions), "--turns", str(args.turns)]


def by_turns(
    names: Sequence[str], rounds: int, loaded: Callable[[str, Path, int], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A row of each round, with what `loaded` returns for each name. `loaded` gets the name, the round's sessions as a
    trace, and its seed. Two names change places with each round.
    """
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "sessions.jsonl"
        for seed in range(1, rounds + 1):
            trace.write_text("".join(json.dumps(row) + "\n" for row in rows(recorded_agents(seed))))
            order = names if seed % 2 else names[::-1]
            yield {"seed": seed, "first": order[0], **{name: loaded(name, trace, seed) for name in order}}


def ratios(row: Mapping[str, Any], own: str, rival: str, kinds: Mapping[str, str]) -> dict[str, float]:
    """By name of `kinds`: what that field is of `own`, over what it is of `rival`."""
    return {name: round(row[own][field] / row[rival][field], 3) for name, field in kinds.items()}


def medians(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the rounds' ratios, by name."""
    return {name: statistics.median(row["ratio"][name] for row in found) for name in found[0]["ratio"]}


def loaded(http: str, trace: Path, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """One round on one cluster: TTFT in ms, tokens of prompts, and how many of them were found in the KVCache."""
    found = bench(http, *session_words(trace, seed, args))
    return {
        "requests": found["requests"],
        "ttft_mean_ms": found["mean_ttft_ms"],
        "ttft_p90_ms": found["p90_ttft_ms"],
        "prompt_tokens": found["total_input_tokens"],
        "cached_tokens": found["cached_tokens"],
    }


def measured(addresses: Mapping[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each round: `addresses` of HTTP by policy."""
    for http in addresses.values():  # both workers of a role are warm then
        bench(http, *WARM)
    found = by_turns(
        POLICIES, args.rounds, lambda policy, trace, seed: loaded(addresses[policy], trace, seed, args)
    )
    kinds = {"mean": "ttft_mean_ms", "p90": "ttft_p90_ms"}
    return [{**row, "ratio": ratios(row, *POLICIES, kinds)} for row in found]


def line(row: Mapping[str, Any]) -> str:
    each = "; ".join(
        f"{policy} {row[policy]['ttft_mean_ms']:,.0f} / {row[policy]['ttft_p90_ms']:,.0f} ms, "
        f"{row[policy]['cached_tokens'] / row[policy]['prompt_tokens']:.0%} of the prompts found"
        for policy in POLICIES
    )
    requests, ratio = row[POLICIES[0]]["requests"], row["ratio"]
    return f"{requests} requests: {each}; {ratio['mean']:.3f} in the mean, {ratio['p90']:.3f} at p90"


def main() -> None:
    options = parser(__doc__ or "")
    session_options(options, sessions=10, turns=6)
    args = parsed(options, rounds=1, sessions=2, turns=2, speed=200.0)
    with contextlib.ExitStack() as stack:
        addresses = {
            policy: stack.enter_context(cluster(*FLAGS, "--policy", policy))["http"] for policy in POLICIES
        }
        found = measured(addresses, args)
    ratio = medians(found)
    result = {
        "sessions": args.sessions,
        "turns": args.turns,
        "speed": args.speed,
        "scale": SCALE,
        "rounds": found,
        "ratio": ratio,
    }
    finish(args, result, ["TTFT, mean / p90", *map(line, found), f"ratio {ratio['mean']} / {ratio['p90']}"])


if __name__ == "__main__":
    main()
