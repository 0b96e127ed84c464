"""The self-test of exact numerics: nothing is said where all holds, and each planted difference by its name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import flip_a_bit, sum_in_two_halves

from halfmoon.cli import model as models
from halfmoon.schemas.policy import Layout
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.self_test import (
    AGAIN,
    BATCHED,
    BLOCKS_MIN,
    CACHED,
    differing_ways,
    known_differing_ways,
)


class _BatchMatters(Engine):
    """One unit in the last place of one logit, in any batch of more than one."""

    def decode(
        self, token_ids: Sequence[int], positions: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        rows = super().decode(token_ids, positions, block_tables).clone()
        if len(rows) > 1:
            rows[-1, 0] = torch.nextafter(rows[-1, 0], torch.tensor(torch.inf))
        return rows


class _TransportMatters(Engine):
    """One bit of a block that was written from outside."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        write_block = self.cache.write_block

        def flipping(layer: int, block: int, source: Any) -> None:
            write_block(layer, block, source)
            if layer == self.config.layers - 1:
                self.cache.write_block = write_block  # type: ignore[method-assign]
                flip_a_bit(self, block)

        self.cache.write_block = flipping  # type: ignore[method-assign]


class _SecondTimeMatters(Engine):
    """From its fourth chunk on (the second cold prefill) it adds in another order."""

    def __init__(self, model: LoadedModel, **fields: Any) -> None:
        super().__init__(model, **fields)
        self.loaded, self.chunks = model, 0

    def prefill_chunk(self, *args: Any, **fields: Any) -> torch.Tensor | None:
        self.chunks += 1
        if self.chunks == 4:
            sum_in_two_halves(self, self.loaded)
        return super().prefill_chunk(*args, **fields)


@pytest.fixture(scope="module")
def model(model_f32: LoadedModel) -> LoadedModel:
    """The first two layers of the real model, and its head."""
    return replace(model_f32, config=replace(model_f32.config, layers=2))


def engine_of(kind: type[Engine], model: LoadedModel) -> Engine:
    return kind(model, num_blocks=BLOCKS_MIN, block_tokens=32, exact=True)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (_BatchMatters, [BATCHED]),
        (_TransportMatters, [CACHED, BATCHED]),
        (_SecondTimeMatters, [AGAIN, CACHED, BATCHED]),
    ],
)
def test_a_planted_difference_is_named(model: LoadedModel, kind: type[Engine], expected: list[str]) -> None:
    engine = engine_of(kind, model)
    assert differing_ways(engine) == expected
    assert engine.allocator.free_blocks == BLOCKS_MIN


def test_one_answer_is_kept_for_each_key(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ill, well = engine_of(_BatchMatters, model), engine_of(Engine, model)
    assert known_differing_ways(ill, "one") == [BATCHED]
    assert known_differing_ways(well, "one") == [BATCHED]  # as it was kept
    place = tmp_path / "halfmoon" / "profiles" / "one.numerics.json"
    place.write_text("{}")
    assert known_differing_ways(well, "one") == differing_ways(well)
    engine = Engine(model, num_blocks=BLOCKS_MIN - 1, block_tokens=32, exact=True)
    assert known_differing_ways(engine, "one") is None


def test_what_does_not_hold_is_said_in_one_line(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = argparse.Namespace(
        layout_file="", model="smollm2-135m-instruct", engine="torch", device="cpu", dtype="float32",
        block_tokens=32, numerics="exact",
    )  # fmt: skip
    layout: Layout = models.layout_of(args)
    ill = engine_of(_BatchMatters, model)
    assert models.exact_numerics(ill, layout) == (
        "not_held",
        "warning: a batch gave other bits than a request alone and cold: "
        "--numerics exact is not to be trusted on this CPU",
    )
    args.numerics = "fast"
    assert models.exact_numerics(ill, models.layout_of(args)) == ("", "")
