"""Options of attention that runs apart from the model: each that does not fit is refused by name, before the start."""

from __future__ import annotations

import argparse

import pytest
from msgspec.structs import replace

from halfmoon.cli import up
from halfmoon.cli.declared import options_of
from halfmoon.cli.local.flags import worker_flags
from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.processes import worker
from halfmoon.cli.processes.attention import channels, check_attention, heads_of_part
from halfmoon.schemas.policy import Layout
from halfmoon.workers.options import WorkerProcessOptions

EXACT = Layout(
    model="m",
    model_fingerprint="f",
    layers=2,
    kv_heads=3,
    head_dim=8,
    block_tokens=256,
    dtype="float32",
    segment_tokens=1024,
)
FAST = replace(EXACT, numerics="fast", segment_tokens=0)


def asked(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add(parser)
    return parser.parse_args(words)


def process(role: str, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    worker.add(parser)
    args = parser.parse_args(["--node", "n", *words])
    args.command = role
    return args


@pytest.mark.parametrize(
    ("words", "layout", "said"),
    [
        (["--decode-attention", "remote"], EXACT, "--decode-attention remote: needs an attention worker"),
        (["--attention-split", "heads"], EXACT, "--attention-split heads: needs attention workers"),
        (["--attention", "2"], FAST, "--attention: only exact numerics of a real model"),
        (
            ["--attention", "1", "--decode-attention", "local"],
            EXACT,
            "--decode-attention local: leaves nothing",
        ),
        (["--attention", "1", "--lend"], EXACT, "--lend: decode workers whose KV lies at attention workers"),
        (["--attention", "2", "--attention-split", "heads"], EXACT, "heads: 3 KV heads do not divide by 2"),
    ],
)
def test_what_does_not_fit_a_cluster_is_refused_by_name(words: list[str], layout: Layout, said: str) -> None:
    with pytest.raises(OptionInvalid, match=said):
        check_attention(asked(*words), layout)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--attention", "2"],
        ["--attention", "3", "--attention-split", "heads"],
        ["--attention", "2", "--attention-split", "sequence"],
    ],
)
def test_what_fits_is_handed_on_to_each_process(words: list[str]) -> None:
    args = asked(*words)
    check_attention(args, EXACT)
    flags = worker_flags(args, "attention")
    assert flags["decode_attention"] == ("remote" if words else "local")
    assert flags["attention_parts"] == (3 if "heads" in words else 1)
    assert flags["attention_segments"] == ("sequence" in words)


@pytest.mark.parametrize(
    ("role", "words", "said"),
    [
        ("attention", [], "attention: only exact numerics"),
        ("decode", ["--decode-attention", "remote"], "--decode-attention remote: only exact numerics"),
        ("decode", ["--lend"], "--lend: only exact numerics"),
    ],
)
def test_a_process_refuses_fast_numerics(role: str, words: list[str], said: str) -> None:
    with pytest.raises(OptionInvalid, match=said):
        channels(process(role, *words), "w", FAST)


def test_groups_are_at_least_one() -> None:
    args = process("decode", "--decode-attention", "remote", "--decode-groups", "0")
    with pytest.raises(OptionInvalid, match="--decode-groups 0: auto, or from 1 to 64"):
        options_of(WorkerProcessOptions, args)


def test_an_attention_worker_has_its_heads_by_its_number() -> None:
    args = process("attention", "--attention-parts", "3")
    assert [heads_of_part(args, EXACT, f"attention-{n}") for n in (0, 2, 4)] == [(0, 1), (2, 1), (1, 1)]
    assert heads_of_part(process("attention"), EXACT, "any") == (0, 3)
    with pytest.raises(OptionInvalid, match="--id any: with --attention-parts it ends in -NUMBER"):
        heads_of_part(args, EXACT, "any")
    with pytest.raises(
        OptionInvalid, match="--attention-segments: not where caches have a part of the heads, of 3"
    ):
        heads_of_part(process("attention", "--attention-parts", "3", "--attention-segments"), EXACT, "a-0")
    with pytest.raises(OptionInvalid, match="--attention-parts 2: 3 KV heads do not divide by it"):
        heads_of_part(process("attention", "--attention-parts", "2"), EXACT, "attention-0")
