"""The self-test of exact numerics: nothing is said where all holds, and each planted difference by its name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import flip_a_bit, sum_in_two_halves

from halfmoon.cli import model as models
from halfmoon.schemas.policy import Layout
from halfmoon.workers.model import linear
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.linear import Linear
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.self_test import (
    AGAIN,
    BATCHED,
    BLOCKS_MIN,
    CACHED,
    TOGETHER,
    Trial,
    differing_ways,
    invariant_row_counts,
    prepare_products,
    quick_row_counts,
    trial_of,
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


class _NeighbourMatters(Engine):
    """One unit in the last place of a logit after a chunk of more than a block."""

    def prefill_chunk(self, token_ids: Sequence[int], *args: Any, **fields: Any) -> torch.Tensor | None:
        row = super().prefill_chunk(token_ids, *args, **fields)
        if row is not None and len(token_ids) > self.block_tokens:
            row = row.clone()
            row[0] = torch.nextafter(row[0], torch.tensor(torch.inf))
        return row


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
        (_SecondTimeMatters, [AGAIN, TOGETHER, CACHED, BATCHED]),
        (_NeighbourMatters, [TOGETHER]),
    ],
)
def test_a_planted_difference_is_named(model: LoadedModel, kind: type[Engine], expected: list[str]) -> None:
    engine = engine_of(kind, model)
    assert differing_ways(engine) == expected
    assert engine.allocator.free_blocks == BLOCKS_MIN


class _FewRowsMatter(Linear):
    """The last row's, where there are fewer than six: one unit in the last place, or so `much`."""

    def __init__(self, product: Linear, much: float = 0.0) -> None:
        self._product, self.kernel, self._much = product, product.kernel, much

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = self._product(x, dtype).clone()
        if len(x) < 6:
            made[-1, 0] = torch.nextafter(made[-1, 0] + self._much, torch.tensor(torch.inf))
        return made


def plant_few_rows_matter(engine: Engine, product: str, much: float = 0.0) -> None:
    at: Any = engine.transformer if product == "_head" else engine.transformer.layers[1]
    setattr(at, product, _FewRowsMatter(getattr(at, product), much))


@pytest.fixture
def library_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the row kernel."""
    monkeypatch.setattr(linear, "_by_rows", lambda *_: None)


PRODUCTS = ["_qkv", "_out", "_gate_up", "_down", "_head"]


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_row_kernel_whose_rows_depend_on_the_batch_is_found(model: LoadedModel, product: str) -> None:
    engine = engine_of(Engine, model)
    assert trial_of(engine) == Trial((), [])
    # Logits alone are compared, which show a unit in the last place of some products only.
    plant_few_rows_matter(engine, product, much=0.01)
    # The prompt's last block has two rows alone, and more together with the first.
    together = [TOGETHER] if product != "_head" else []
    assert trial_of(engine).differing == [*together, BATCHED]
    assert engine.product_rows == ()


@pytest.mark.usefixtures("library_products")
@pytest.mark.parametrize("product", PRODUCTS)
def test_rows_that_a_product_computes_otherwise_are_padded(model: LoadedModel, product: str) -> None:
    engine = engine_of(Engine, model)
    assert engine.product_rows == (16,)
    plant_few_rows_matter(engine, product)
    trial = trial_of(engine)
    assert trial.product_rows == engine.product_rows
    assert min(trial.product_rows) >= 6
    assert max(trial.product_rows) == 16
    assert trial.differing == []


class _Timed(Linear):
    """Its rows take `seconds` by a clock of its own. Keeps how many it saw."""

    def __init__(self, product: Linear, seconds: dict[int, float]) -> None:
        self._product, self._seconds, self.kernel = product, seconds, product.kernel
        self.now, self.rows = 0.0, 0

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.rows = len(x)
        self.now += self._seconds.get(self.rows, 0.0)
        return self._product(x, dtype)


@pytest.mark.usefixtures("library_products")
def test_rows_that_take_longer_than_more_rows_are_padded(model: LoadedModel) -> None:
    engine = Engine(model, num_blocks=BLOCKS_MIN, block_tokens=32, exact=False)
    seconds = {1: 5.0, 2: 6.0, 4: 3.0, 6: 2.95, 8: 9.0, 12: 8.0, 16: 8.5}
    at: Any = engine.transformer
    at._head = head = _Timed(at._head, seconds)
    assert quick_row_counts(engine, tuple(seconds), lambda: head.now) == (4, 6, 12, 16)
    assert quick_row_counts(engine, (1, 2, 16), lambda: head.now) == (1, 2, 16)
    assert trial_of(engine).product_rows == engine.product_rows
    (least,) = engine.product_rows
    for rows in (1, 2, 3, 4, 5, 7, 17):
        logits = engine.decode([9] * rows, [31] * rows, [[row % BLOCKS_MIN] for row in range(rows)])
        assert (head.rows, len(logits)) == (max(least, rows), rows)


@pytest.mark.usefixtures("library_products")
def test_where_a_batch_differs_all_the_same_no_group_is_cut_short(model: LoadedModel) -> None:
    engine = engine_of(_BatchMatters, model)
    trial = trial_of(engine)
    assert (trial.product_rows, trial.differing) == ((16,), [BATCHED])


@pytest.mark.usefixtures("library_products")
def test_fewer_rows_change_no_bit(model: LoadedModel) -> None:
    whole, cut = engine_of(Engine, model), engine_of(Engine, model)
    cut.product_rows = invariant_row_counts(cut)
    for engine in (whole, cut):
        for block in range(BLOCKS_MIN):
            engine.prefill_chunk([(7 * i + block) % 999 for i in range(32)], 0, [block])
    for batch in range(1, 17):
        # Sequences of one block write nothing that another reads: each token is the block's last.
        step = ([9 + row for row in range(batch)], [31] * batch, [[row % BLOCKS_MIN] for row in range(batch)])
        digests = [[engine.logits_digest(row) for row in engine.decode(*step)] for engine in (whole, cut)]
        assert digests[0] == digests[1], batch


@pytest.mark.usefixtures("library_products")
def test_one_answer_is_kept_for_each_key(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ill, well = engine_of(_BatchMatters, model), engine_of(Engine, model)
    assert prepare_products(ill, "one") == [BATCHED]
    assert prepare_products(well, "one") == [BATCHED]  # as it was kept
    place = tmp_path / "halfmoon" / "profiles" / "one-onednn.numerics.json"
    place.write_text("{}")
    assert prepare_products(well, "one") == differing_ways(well)
    engine = Engine(model, num_blocks=BLOCKS_MIN - 1, block_tokens=32, exact=True)
    assert prepare_products(engine, "two") is None
    assert engine.product_rows == (16,)
    kept = json.loads(place.read_text()) | {"product_rows": [4, 16]}
    place.write_text(json.dumps(kept))
    assert prepare_products(engine, "one") == []
    assert engine.product_rows == (4, 16)
    engine = Engine(model, num_blocks=BLOCKS_MIN - 1, block_tokens=32, exact=True, query_first=True)
    assert prepare_products(engine, "one") is None  # its products are others


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
    assert models.prepare_numerics(ill, layout) == (
        "not_held",
        "warning: a batch gave other bits than a request alone and cold: "
        "--numerics exact is not to be trusted on this CPU",
    )
    args.numerics = "fast"
    assert models.prepare_numerics(ill, models.layout_of(args)) == ("", "")
