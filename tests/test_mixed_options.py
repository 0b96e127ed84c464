"""Options of mixed workers: how many of each role `halfmoon up` starts, and what an iteration may hold."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from halfmoon.cli.declared import options_of
from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.processes.mixed import iteration_bounds
from halfmoon.cli.up import add, count_nodes
from halfmoon.schemas.policy import Layout
from halfmoon.workers.options import WorkerOptions

MS = 1_000_000
LAYOUT = Layout(
    model="m", model_fingerprint="f", layers=2, kv_heads=1, head_dim=4, block_tokens=256, dtype="float32"
)
FAST = Layout(
    model="m",
    model_fingerprint="f",
    layers=2,
    kv_heads=1,
    head_dim=4,
    block_tokens=256,
    dtype="float32",
    numerics="fast",
)


#: One that prefills, one that decodes.
ENGINES = ("--adapt-vllm-prefill", "http://a", "--adapt-vllm-decode", "http://b")


def nodes(*words: str) -> tuple[int, int, int, int]:
    parser = argparse.ArgumentParser()
    add(parser)
    args = parser.parse_args(words)
    count_nodes(args)
    return args.prefill, args.decode, args.mixed, args.attention


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ((), (2, 2, 0, 0)),
        (("--mixed", "1"), (0, 0, 1, 0)),
        (("--mixed", "2", "--prefill", "1", "--decode", "3"), (1, 3, 2, 0)),
        (("--prefill", "1"), (1, 2, 0, 0)),
        (ENGINES, (0, 0, 0, 0)),
        ((*ENGINES, "--mixed", "1"), (0, 0, 1, 0)),
    ],
)
def test_with_mixed_workers_there_need_be_no_others(words: tuple[str, ...], counts: tuple[int, ...]) -> None:
    assert nodes(*words) == counts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prefill", "0"), "--prefill: at least 1"),
        (("--mixed", "1", "--prefill", "1"), "some of both, or with --mixed or --adapt-… none of either"),
        (("--mixed", "-1"), "at least"),
        (("--mixed", "1", "--attention", "1"), "--attention: its KV is that of decode workers"),
        (
            ("--adapt-vllm-prefill", "http://a"),
            "--adapt-vllm-prefill and --adapt-vllm-decode: some of both, or none of either",
        ),
        (
            ("--adapt-sglang-decode", "http://a"),
            "--adapt-sglang-prefill and --adapt-sglang-decode: some of both, or none of either",
        ),
        (
            (*ENGINES, "--adapt-sglang-prefill", "http://c", "--adapt-sglang-decode", "http://d"),
            "--adapt-vllm-prefill and --adapt-sglang-prefill: engines of one kind do not get the KV of another's",
        ),
        ((*ENGINES, "--prefill", "1", "--decode", "1"), "its KV does not come to decode workers of --decode"),
    ],
)
def test_counts_that_serve_nobody_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionInvalid, match=message):
        nodes(*words)


def bounds(layout: Layout, **options: Any) -> tuple[int, int]:
    args = argparse.Namespace(iteration_ms=200)
    return iteration_bounds(args, WorkerOptions(**options), layout)


def test_without_a_token_budget_an_iteration_keeps_the_objective_with_a_tenth_to_spare() -> None:
    # A chunk of the engine, or a block, and all that decode.
    assert bounds(FAST, chunk_tokens=1_024, batch_max=16) == (1_040, 180 * MS)
    assert bounds(LAYOUT, chunk_tokens=100, batch_max=16) == (272, 180 * MS)
    assert bounds(FAST, token_budget=64) == (64, 0)


@pytest.mark.parametrize("word", ["0", "-3", "many", ""])
def test_a_budget_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(OptionInvalid, match=f"--token-budget {word}: auto, or at least 1"):
        options_of(WorkerOptions, argparse.Namespace(token_budget=word))
