"""Chunks of prompts and decodes in one iteration give what each request gives alone, however they are mixed."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import pytest
import torch

from halfmoon.workers.batch_former import BatchFormer, BlockRoom, Iteration
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.prompt_rows import PromptRows
from halfmoon.workers.model.transformer import Layer

BLOCK_TOKENS, LAYERS, ANSWER_TOKENS = 32, 3, 4
LENGTHS = (100, 32, 5, 64, 1)
PROMPTS = [
    [(i * i * 31 + 17 * i + 1000 * seed) % 40000 + 20 for i in range(n)] for seed, n in enumerate(LENGTHS)
]
BLOCKS_EACH = -(-(max(LENGTHS) + ANSWER_TOKENS) // BLOCK_TOKENS)
#: Blocks of 8 tokens: all prompts fit, but not what all of them draw.
ROOM_SMALL = 28
TABLES = [[request * BLOCKS_EACH + i for i in range(BLOCKS_EACH)] for request in range(len(PROMPTS))]


class Served:
    """Requests that one engine serves as the batch former says: their tokens, and the logits of each."""

    def __init__(self, engine: Engine, former: BatchFormer) -> None:
        self._engine, self._former = engine, former
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        self.logits: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
        self.iterations: list[Iteration] = []
        self.replayed = 0
        self._cached = [0] * len(PROMPTS)

    def run(self) -> Served:
        for request, prompt in enumerate(PROMPTS):
            self._former.add(str(request), len(prompt))
        while True:
            made = self._former.form()
            if not made.tokens:
                return self
            self.iterations.append(made)
            self._compute(made)
            self._former.made()
            for request, tokens in enumerate(self.tokens):
                if len(tokens) == ANSWER_TOKENS:
                    self._former.remove(str(request))

    def _compute(self, made: Iteration) -> None:
        decodes = [int(name) for name in made.decodes]
        texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, self.tokens, strict=True)]
        chunks, drawing = [], []
        for chunk in made.chunks:
            request, end = int(chunk.name), chunk.start + chunk.tokens
            tokens = texts[request][chunk.start : end]
            chunks.append(PromptRows(tokens, chunk.start, TABLES[request], want_logits=chunk.last))
            drawing.append(request)
            self._cached[request] = end
        rows, ends = self._engine.mixed(
            chunks,
            [texts[request][self._cached[request]] for request in decodes],
            [self._cached[request] for request in decodes],
            [TABLES[request] for request in decodes],
        )
        assert (rows is None) == (not decodes)
        for request, row in zip(decodes, rows if rows is not None else [], strict=True):
            self._cached[request] += 1
            self._draw(request, row)
        for request, chunk_rows, last in zip(drawing, chunks, ends, strict=True):
            assert (last is None) == (not chunk_rows.want_logits)
            if last is not None:
                self._draw(request, last)

    def _draw(self, request: int, row: torch.Tensor) -> None:
        place = self._cached[request] - len(PROMPTS[request])
        if place < len(self.tokens[request]):
            # What was drawn before it gave its room up goes through decode again.
            self.replayed += 1
            assert torch.equal(row, self.logits[request][place])
            return
        self.tokens[request].append(self._engine.argmax(row)[0])
        self.logits[request].append(row.clone())


def serve(
    engine: Engine,
    *,
    budget: int,
    sequences: int = 8,
    grain: int = 1,
    room: int = 1_000,
    replays: bool = False,
) -> Served:
    former = BatchFormer(
        BlockRoom(room, 8),
        budget_tokens=budget,
        sequences_max=sequences,
        grain_tokens=grain,
        replays=replays,
    )
    return Served(engine, former).run()


def cached_kv(engine: Engine) -> list[torch.Tensor]:
    """k and v of every prompt, all layers."""
    found = []
    for prompt, table in zip(PROMPTS, TABLES, strict=True):
        for layers in (engine.cache.k, engine.cache.v):
            found += [layer[table].flatten(0, 1)[: len(prompt)].clone() for layer in layers]
    return found


def engine_of(model: LoadedModel, *, exact: bool) -> Engine:
    few = replace(model, config=replace(model.config, layers=LAYERS))
    return Engine(few, num_blocks=BLOCKS_EACH * len(PROMPTS), block_tokens=BLOCK_TOKENS, exact=exact)


class Wanted(NamedTuple):
    """Of each request: its tokens and the logits of each; and the KV of all prompts."""

    tokens: list[list[int]]
    logits: list[list[torch.Tensor]]
    kv: list[torch.Tensor]


def alone(engine: Engine) -> Wanted:
    """Each request by itself, by `prefill_chunk` and `decode`."""
    wanted = Wanted([], [], [])
    for prompt, table in zip(PROMPTS, TABLES, strict=True):
        step, row = BLOCK_TOKENS if engine.exact else len(prompt), None
        for at in range(0, len(prompt), step):
            row = engine.prefill_chunk(
                prompt[at : at + step], at, table, want_logits=at + step >= len(prompt)
            )
        assert row is not None
        rows, drawn = [row.clone()], [engine.argmax(row)[0]]
        while len(drawn) < ANSWER_TOKENS:
            row = engine.decode([drawn[-1]], [len(prompt) + len(drawn) - 1], [table])[0]
            rows.append(row.clone())
            drawn.append(engine.argmax(row)[0])
        wanted.tokens.append(drawn)
        wanted.logits.append(rows)
    wanted.kv.extend(cached_kv(engine))
    return wanted


@pytest.fixture(scope="module", params=["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def exact(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.getfixturevalue(f"model_{request.param}"), exact=True)


@pytest.fixture(scope="module")
def wanted(exact: Engine) -> Wanted:
    return alone(exact)


SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in ((70, 8), (130, 8), (64, 3))]


@pytest.mark.parametrize(("budget", "sequences"), [(40, 8), *SLOW])
def test_in_exact_numerics_any_mixture_gives_the_bits_of_each_alone(
    exact: Engine, wanted: Wanted, budget: int, sequences: int
) -> None:
    mixed = serve(exact, budget=budget, sequences=sequences, grain=BLOCK_TOKENS, replays=True)
    assert mixed.tokens == wanted.tokens
    assert all(map(torch.equal, chain(*mixed.logits), chain(*wanted.logits)))
    assert all(map(torch.equal, cached_kv(exact), wanted.kv))
    assert any(one.decodes and one.chunks for one in mixed.iterations)


def test_who_gave_its_room_up_goes_on_with_the_same_bits(exact: Engine, wanted: Wanted) -> None:
    mixed = serve(exact, budget=300, grain=BLOCK_TOKENS, replays=True, room=ROOM_SMALL)
    assert any(one.preempted for one in mixed.iterations)
    assert mixed.replayed
    assert mixed.tokens == wanted.tokens
    assert all(map(torch.equal, chain(*mixed.logits), chain(*wanted.logits)))


def test_in_fast_numerics_any_chunking_and_mixture_is_close_and_draws_the_same_tokens(
    model_f32: LoadedModel,
) -> None:
    engine = engine_of(model_f32, exact=False)
    wanted = alone(engine)
    for budget, sequences, room in ((13, 3, 1_000), (77, 8, 1_000), (300, 8, ROOM_SMALL)):
        mixed = serve(engine, budget=budget, sequences=sequences, room=room)
        assert mixed.tokens == wanted.tokens
        for a, b in zip(chain(*mixed.logits), chain(*wanted.logits), strict=True):
            assert (a - b).abs().max() <= 1e-4
        for a, b in zip(cached_kv(engine), wanted.kv, strict=True):
            assert (a - b).abs().max() <= 5e-5
        assert room > ROOM_SMALL or any(one.preempted for one in mixed.iterations)


def test_rows_of_one_iteration_share_each_linear_layer_but_in_exact_numerics_those_not_computed_apart(
    model_f32: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    finish = Layer.finish

    def counted(layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        widths.append(len(x))
        return finish(layer, x, attended)

    monkeypatch.setattr(Layer, "finish", counted)
    for exact in (False, True):
        engine = engine_of(model_f32, exact=exact)
        widths.clear()
        engine.mixed([PromptRows(PROMPTS[0][:32], 0, TABLES[0])], [7, 8], [3, 4], TABLES[1:3])
        # 32 rows of the chunk and 2 that decode, together or each group by itself; some kernels want padding.
        if engine.rows_apart:
            assert widths == [34] * LAYERS
        else:
            assert sorted(widths) == ([16] * LAYERS + [32] * LAYERS if exact else [48] * LAYERS)
