"""Recorded agents' sessions on two real vLLMs, in a closed loop: behind halfmoon, and behind vllm-router's `kv_aware`.

Both routers stand before the same two engines at once and are loaded by turns. In a round both get the same sessions
with the same texts, drawn anew for each round, first the one, then the other; the order changes with the round, and the
engines' prefix caches are emptied before each. Lengths are a 32nd of the recorded ones. Both route by the engines' KV
events in blocks of 32 tokens. TTFT is what the client sees; the hit rate is the engines' own count of prompt tokens
that they found in their caches. The client, both routers and the engines share the machine.

HALFMOON_VLLM names vLLM's program, HALFMOON_VLLM_MODEL a model's directory (docs/vllm.md) and HALFMOON_VLLM_ROUTER
vllm-router (`pip install vllm-router` in an environment of its own).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.clusters import PATIENT, cluster, cpu_s, finish, parsed, parser
from benchmarks.sessions_live import (
    SCALE,
    WARM,
    bench,
    by_turns,
    medians,
    ratios,
    session_options,
    session_words,
)
from benchmarks.vllm_router import RunningRouter, Source, router
from tests.vllm.engines import MODEL, RealEngine, counted, forget, real_engine

ROUTERS = ("halfmoon", "vllm-router")
ENGINES = 2
BLOCK_TOKENS = 32
RATIOS = {
    kind: kind for kind in ("ttft_mean_ms", "ttft_p90_ms", "tpot_mean_ms", "answer_mean_ms", "requests_per_s")
}
#: By the engine's own count, in tokens of prompts.
ASKED, FOUND = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


def of_the_model() -> list[str]:
    """Options of `halfmoon bench`: vLLM's list of models does not tell how many tokens there are."""
    return ["--vocab-size", str(json.loads((Path(MODEL) / "config.json").read_text())["vocab_size"])]


@contextlib.contextmanager
def engines(directory: Path) -> Iterator[list[RealEngine]]:
    """Each on a core of its own, with `/reset_prefix_cache`."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                real_engine(
                    directory / f"vllm-{core}.log",
                    core,
                    "--enable-prompt-tokens-details",
                    VLLM_SERVER_DEV_MODE="1",
                )
            )
            for core in range(ENGINES)
        ]


@contextlib.contextmanager
def routers(fleet: Sequence[RealEngine]) -> Iterator[dict[str, RunningRouter]]:
    """Both, before the same engines."""
    words = ["--block-tokens", f"{BLOCK_TOKENS}", "--dtype", "float32", "--model", MODEL, *PATIENT]
    words += [word for engine in fleet for word in ("--adapt-vllm", engine.url)]
    sources = [Source(engine.url, engine.events, engine.replay) for engine in fleet]
    with (
        cluster(*words) as addresses,
        router(os.environ["HALFMOON_VLLM_ROUTER"], sources, "kv_aware", "m", BLOCK_TOKENS) as peer,
    ):
        http = addresses["http"]
        yield {"halfmoon": RunningRouter(http, f"{http}/metrics", addresses["pid"]), "vllm-router": peer}


def loaded(
    at: RunningRouter, fleet: Sequence[RealEngine], trace: Path, seed: int, args: argparse.Namespace
) -> dict[str, float]:
    """One round behind one router, on engines that have nothing cached."""
    for engine in fleet:
        forget(engine.url)
    before = [{name: counted(engine.url, name) for name in (ASKED, FOUND)} for engine in fleet]
    cpu = cpu_s(at.pid)
    found = bench(at.http, *session_words(trace, seed, args), *of_the_model())
    cpu = cpu_s(at.pid) - cpu
    asked, hit = (
        [counted(engine.url, name) - then[name] for engine, then in zip(fleet, before, strict=True)]
        for name in (ASKED, FOUND)
    )
    return {
        "requests": found["requests"],
        "ttft_mean_ms": found["mean_ttft_ms"],
        "ttft_p90_ms": found["p90_ttft_ms"],
        "tpot_mean_ms": found["mean_tpot_ms"],
        "answer_mean_ms": found["mean_e2el_ms"],
        "requests_per_s": found["request_throughput"],
        "output_tokens_per_s": found["output_throughput"],
        "prompt_tokens": found["total_input_tokens"],
        "hit_rate": round(sum(hit) / sum(asked), 4),
        "busier_engine": round(max(asked) / sum(asked), 3),
        "cpu_ms": round(cpu / found["requests"] * 1000, 1),
    }


def measured(
    at: Mapping[str, RunningRouter], fleet: Sequence[RealEngine], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row of each round."""
    for one in at.values():
        bench(one.http, *WARM, *of_the_model())
    found = by_turns(
        ROUTERS, args.rounds, lambda name, trace, seed: loaded(at[name], fleet, trace, seed, args)
    )
    return [{**row, "ratio": ratios(row, *ROUTERS, RATIOS)} for row in found]


def line(row: Mapping[str, Any]) -> str:
    each = "; ".join(
        f"{name} {row[name]['ttft_mean_ms']:,.0f} / {row[name]['ttft_p90_ms']:,.0f} ms, "
        f"{row[name]['requests_per_s']:.2f} requests/s, {row[name]['hit_rate']:.1%} hit"
        for name in ROUTERS
    )
    return f"{row[ROUTERS[0]]['requests']} requests: {each}; TTFT {row['ratio']['ttft_mean_ms']:.3f} of the peer's"


def main() -> None:
    options = parser(__doc__ or "")
    session_options(options, sessions=8, turns=5)
    args = parsed(options, rounds=1, sessions=2, turns=2, speed=200.0)
    for name in ("HALFMOON_VLLM", "HALFMOON_VLLM_MODEL", "HALFMOON_VLLM_ROUTER"):
        if not os.environ.get(name):
            raise SystemExit(f"{name} names nothing")
    with (
        tempfile.TemporaryDirectory() as directory,
        engines(Path(directory)) as fleet,
        routers(fleet) as at,
    ):
        found = measured(at, fleet, args)
    ratio = medians(found)
    result = {
        "engines": ENGINES, "block_tokens": BLOCK_TOKENS, "sessions": args.sessions, "turns": args.turns,
        "speed": args.speed, "scale": SCALE, "rounds": found, "ratio": ratio,
    }  # fmt: skip
    lines = [
        "TTFT, mean / p90",
        *map(line, found),
        "ratio " + ", ".join(f"{kind} {value}" for kind, value in ratio.items()),
    ]
    finish(args, result, lines)


if __name__ == "__main__":
    main()
