"""Selective prefill with the real model: what stands in is exact where it can be, and near where it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from halfmoon.schemas.similar import reuse_of
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.layer_hooks import LayerHooks
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.similar import selective
from halfmoon.workers.model.similar.matching import UNKNOWN, Matching, match_runs, same_tokens
from halfmoon.workers.model.similar.retention import most_attended
from halfmoon.workers.model.similar.selective import (
    NotAlike,
    Schedule,
    SelectivePrefill,
    SelectiveResult,
    turn_by,
)
from halfmoon.workers.model.text.tokenizer import Tokenizer
from halfmoon.workers.model.transformer import rotate

Tensor = torch.Tensor
Read = Callable[[int], tuple[Tensor, Tensor]]

BLOCK, TOKENS = 64, 256
#: Where the reference lies in the engine's cache, and where the prompt does: their blocks are mixed.
REFERENCE, PROMPT = list(range(0, 16, 2)), list(range(15, 0, -2))
NOTHING_MORE = Schedule(first=0.0)


@pytest.fixture(scope="module")
def engine(model_f32: LoadedModel) -> Engine:
    return Engine(model_f32, num_blocks=16, block_tokens=BLOCK, exact=False)


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> list[int]:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return tokenizer.encode(" ".join(text.split()))


def prefilled(engine: Engine, ids: Sequence[int], table: list[int]) -> Tensor:
    logits = engine.prefill_chunk(ids, 0, table, want_logits=True)
    assert logits is not None
    return logits


def cached(engine: Engine, table: list[int], tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Copies of K and V of each layer."""
    return [
        (k[table].flatten(0, 1)[:tokens].clone(), v[table].flatten(0, 1)[:tokens].clone())
        for k, v in zip(engine.cache.k, engine.cache.v, strict=True)
    ]


def stand_in(
    engine: Engine,
    prompt: list[int],
    reference: Sequence[int],
    *,
    start: int = 0,
    schedule: Schedule | None = None,
    matching: Matching | None = None,
    keep: int = 0,
) -> SelectiveResult:
    """The prompt with the reference's KV, whose own prefix is computed whole up to `start`."""
    prefilled(engine, reference, REFERENCE)
    kv = cached(engine, REFERENCE, len(reference))
    if start:
        prefilled(engine, prompt[:start], PROMPT)
    prefill = SelectivePrefill(engine, prompt, start, PROMPT, schedule=schedule, matching=matching, keep=keep)
    made = prefill.run(kv.__getitem__)
    assert made is not None
    return made


def divergence(logits: Tensor, of: Tensor) -> float:
    """Kullback-Leibler, nats."""
    wanted, got = of.log_softmax(0), logits.log_softmax(0)
    return float((wanted.exp() * (wanted - got)).sum())


# --- the same prompt ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "start"),
    [
        pytest.param(NOTHING_MORE, 100, marks=pytest.mark.slow),
        pytest.param(Schedule(), 0, marks=pytest.mark.slow),
        pytest.param(NOTHING_MORE, 0, marks=pytest.mark.slow),
        pytest.param(Schedule(first=1.0, decay=1.0), 100, marks=pytest.mark.slow),
    ],
)
def test_of_the_same_prompt_nothing_differs(
    engine: Engine, words: list[int], schedule: Schedule, start: int
) -> None:
    prompt = words[:TOKENS]
    made = stand_in(engine, prompt, prompt, start=start, schedule=schedule)
    own = cached(engine, PROMPT, TOKENS)
    assert made.found == TOKENS - start
    logits = prefilled(engine, prompt, PROMPT)
    assert abs(divergence(made.logits, logits)) < 1e-6
    assert int(made.logits.argmax()) == int(logits.argmax())
    for (k, v), (own_k, own_v) in zip(cached(engine, PROMPT, TOKENS), own, strict=True):
        torch.testing.assert_close(own_k, k, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(own_v, v, atol=2e-3, rtol=1e-3)


@pytest.mark.slow
def test_the_schedule_says_how_much_is_computed(engine: Engine, words: list[int]) -> None:
    layers = engine.config.layers
    made = stand_in(engine, words[:TOKENS], words[:TOKENS])
    whole_tiles = [max(16, Schedule().rows(layer, TOKENS) // 16 * 16) for layer in range(layers)]
    assert made.computed == whole_tiles
    assert 0.13 < made.computed_tokens / TOKENS < 0.17
    made = stand_in(engine, words[:TOKENS], words[:TOKENS], schedule=NOTHING_MORE)
    assert made.computed == [TOKENS, *[16] * (layers - 1)]


@pytest.mark.slow
def test_what_the_reference_lacks_is_computed_in_every_layer(engine: Engine, words: list[int]) -> None:
    """40 tokens, which are the first of those that a layer computes."""
    prompt = [*words[:100], *range(2_000, 2_040), *words[140:TOKENS]]
    made = stand_in(engine, prompt, words[:TOKENS])
    most = [Schedule().rows(layer, TOKENS) // 16 * 16 for layer in range(engine.config.layers)]
    assert most[1] > 48 > most[-1]
    assert made.found == TOKENS - 40
    assert made.computed == [max(rows, 48) for rows in most]


def test_the_later_of_rows_that_deviate_are_computed(
    engine: Engine, words: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind another beginning all rows deviate."""
    prompt, chosen = [*range(2_000, 2_020), *words[: TOKENS - 20]], selective._chosen
    seen: list[list[int]] = []

    def noted(deviation: Tensor, forced: Tensor, count: int) -> Tensor:
        rows = chosen(deviation, forced, count)
        seen.append(rows.tolist())
        return rows

    monkeypatch.setattr(selective, "_chosen", noted)
    places = []
    for last_over_first in (1.0, 5.0):
        seen.clear()
        stand_in(engine, prompt, words[:TOKENS], schedule=Schedule(last_over_first=last_over_first))
        assert len(seen[0]) == 64
        places.append(sum(seen[0]))
    assert places[1] > places[0], places


# --- the first layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-150, *(pytest.param(shift, marks=pytest.mark.slow) for shift in (1, 37))])
def test_in_the_first_layer_what_stands_in_is_what_would_be_computed(
    engine: Engine, words: list[int], shift: int
) -> None:
    """It depends on the token alone, and on the position, to which it is turned: at any shift."""
    text, filler = words[:200], words[1_000:1_200]
    reference = [*filler[: max(0, -shift)], *text]
    prompt = [*filler[: max(0, shift)], *text]
    prefilled(engine, reference, REFERENCE)
    prefilled(engine, prompt, PROMPT)
    (old_k, old_v), (k, v) = (
        cached(engine, table, len(ids))[0] for table, ids in ((REFERENCE, reference), (PROMPT, prompt))
    )
    places = torch.arange(len(text))
    there, here = places + max(0, -shift), places + max(0, shift)
    moved = rotate(old_k[there], *turn_by(engine.transformer.rotary, here - there))
    assert float((moved - k[here]).abs().max()) <= 1e-5 * float(k.abs().max())
    assert float((old_k[there] - k[here]).abs().max()) > 0.1 * float(k.abs().max()), "turned by nothing"
    torch.testing.assert_close(old_v[there], v[here], atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_a_references_tokens_are_read_off_its_values(engine: Engine, words: list[int]) -> None:
    prompt, reference = words[:200], [*words[100:250], *words[1_500:1_550]]
    prefilled(engine, prompt, PROMPT)
    values = cached(engine, PROMPT, 200)[0][1]
    prefilled(engine, reference, REFERENCE)
    found = same_tokens(prompt, values, cached(engine, REFERENCE, 200)[0][1])
    assert found == [token if token in prompt else UNKNOWN for token in reference]
    assert UNKNOWN in found


# --- matching -----------------------------------------------------------------------------------------------


def test_runs_are_found_wherever_they_stand() -> None:
    first, second, third = (list(range(base, base + 50)) for base in (1_000, 2_000, 3_000))
    reference = [*first, *second, *third]
    prompt = [*third, 5, 6, *first[10:], 7, *second[:3]]
    matching = match_runs(prompt, 0, reference)
    assert matching.forced.tolist() == [False] * 50 + [True] * 2 + [False] * 40 + [True] * 4
    assert matching.rows[:50].tolist() == list(range(100, 150))
    assert matching.rows[52:92].tolist() == list(range(10, 50))
    assert matching.found == 90


def test_of_equal_runs_the_one_beside_the_last_is_taken() -> None:
    phrase = [1, 2, 3, 4, 5]
    reference = [*phrase, 10, 11, 12, 13, 14, *phrase, 20, 21, 22, 23]
    matching = match_runs([10, 11, 12, 13, 99, *phrase, 98], 0, reference)
    assert matching.rows[5:10].tolist() == list(range(10, 15))


def test_what_the_prompt_does_not_have_is_in_no_run() -> None:
    assert match_runs([1, 2, 3, 4, 5, 6], 0, [1, 2, 3, UNKNOWN, 5, 6]).found == 0


def test_a_text_that_repeats_itself_ends() -> None:
    matching = match_runs([7] * 3_000, 0, [7] * 3_000)
    assert matching.found == 3_000


# --- other prompts ------------------------------------------------------------------------------------------


#: Tokens behind a prompt over which its quality is told.
FOLLOWING = 64


@dataclass(frozen=True)
class Quality:
    """Over the tokens that follow a prompt: mean nats of divergence from a whole prefill, of likelihood that is lost,
    and the share of rows whose likeliest token is the same.
    """

    divergence: float
    lost: float
    agreement: float


def following_rows(engine: Engine, following: Sequence[int], position: int) -> Tensor:
    """Log probabilities behind each of these tokens, which follow the prompt that is cached."""
    rows = [engine.decode([token], [position + step], [PROMPT])[0] for step, token in enumerate(following)]
    return torch.stack(rows).log_softmax(1)


def quality_of(rows: Tensor, wanted: Tensor, following: Sequence[int]) -> Quality:
    targets = torch.tensor(following[1:]).unsqueeze(1)
    lost = (wanted[:-1].gather(1, targets) - rows[:-1].gather(1, targets)).mean()
    return Quality(
        divergence=float((wanted.exp() * (wanted - rows)).sum(1).mean()),
        lost=float(lost),
        agreement=float((rows.argmax(1) == wanted.argmax(1)).float().mean()),
    )


def edited(ids: list[int], others: list[int], percent: int, draw: random.Random) -> list[int]:
    """Runs of 20 tokens are replaced by runs of another length, so that what follows is shifted."""
    out: list[int] = []
    for number, at in enumerate(range(0, len(ids), 20)):
        # The end stays: what follows it depends on it most.
        if draw.randrange(100) < percent and at < len(ids) - 40:
            out += others[number * 16 : number * 16 + 12 + draw.randrange(8)]
        else:
            out += ids[at : at + 20]
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("percent", "lost_most", "agreement", "margin"), [(10, 0.03, 0.9, 10), (30, 0.1, 0.8, 2)]
)
def test_an_edited_prompt_is_near_to_a_whole_prefill_and_the_controls_are_not(
    engine: Engine, words: list[int], percent: int, lost_most: float, agreement: float, margin: int
) -> None:
    """Means over three documents. The controls compute the same rows: with any token's KV, with zeros, and with keys
    that keep the positions of the reference.
    """
    draw, found = random.Random(percent), dict[str, list[Quality]]()
    for at in (0, 500, 1_000):
        original, following = words[at : at + 440], words[at + 440 : at + 440 + FOLLOWING]
        prompt = edited(original, words[1_500:], percent, draw)
        prefilled(engine, prompt, PROMPT)
        wanted = following_rows(engine, following, len(prompt))
        prefilled(engine, original, REFERENCE)
        kv = cached(engine, REFERENCE, len(original))
        runs = match_runs(prompt, 0, original)
        any_rows = torch.tensor([draw.randrange(len(original)) for _ in prompt])
        in_place = Matching(torch.arange(len(prompt)), runs.forced)
        ways: dict[str, tuple[Read, Matching]] = {
            "runs": (kv.__getitem__, runs),
            "any": (kv.__getitem__, Matching(any_rows, runs.forced)),
            "zeros": (lambda i, kv=kv: tuple(map(torch.zeros_like, kv[i])), runs),
            "unturned": (lambda i, kv=kv, runs=runs: tuple(each[runs.rows] for each in kv[i]), in_place),
        }
        for name, (read, matching) in ways.items():
            made = SelectivePrefill(engine, prompt, 0, PROMPT, matching=matching).run(read)
            assert made is not None
            rows = following_rows(engine, following, len(prompt))
            found.setdefault(name, []).append(quality_of(rows, wanted, following))
        # Of so short a prompt a tile is many percent.
        expected = reuse_of(len(prompt), runs.found, 0).computed_tokens
        assert abs(made.computed_tokens - expected) <= len(prompt) * 5 // 100

    def mean(name: str, field: str) -> float:
        return sum(getattr(one, field) for one in found[name]) / len(found[name])

    assert mean("runs", "lost") <= lost_most, found
    assert mean("runs", "agreement") >= agreement, found
    assert mean("any", "divergence") > margin * mean("runs", "divergence"), found
    assert mean("unturned", "divergence") > mean("runs", "divergence"), found
    assert mean("zeros", "lost") > 1, found


@pytest.mark.parametrize("rows", [10, 150])
def test_keys_before_all_rows_may_be_attended_to_in_a_call_of_their_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    draw, config = torch.Generator().manual_seed(rows), engine.config
    q = torch.randn(rows, config.heads, config.head_dim, generator=draw)
    k, v = (torch.randn(400, config.kv_heads, config.head_dim, generator=draw) for _ in range(2))
    positions = torch.randperm(400, generator=draw)[:rows].sort().values
    made = []
    for least in (1, 1_000):
        monkeypatch.setattr(selective, "_UNMASKED_KEYS_MIN", least)
        made.append(selective.attend_rows(engine.attention, q, k, v, positions))
    assert not torch.equal(*made), "two ways"
    torch.testing.assert_close(*made, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_all_rows_computed_is_a_prefill(engine: Engine, words: list[int]) -> None:
    """With a reference that has nothing to do with it."""
    prompt = words[:TOKENS]
    rows = torch.zeros(TOKENS, dtype=torch.int64)
    matching = Matching(rows, torch.ones(TOKENS, dtype=torch.bool))
    made = stand_in(engine, prompt, words[900:1_000], matching=matching)
    assert made.computed == [TOKENS] * engine.config.layers
    torch.testing.assert_close(made.logits, prefilled(engine, prompt, PROMPT), atol=2e-3, rtol=1e-3)


def test_a_reference_that_is_not_like_it_is_refused(engine: Engine, words: list[int]) -> None:
    with pytest.raises(NotAlike, match="of 256 tokens are in the reference"):
        stand_in(engine, words[:TOKENS], words[1_000:1_300])


@pytest.mark.parametrize("start", [0, BLOCK])
def test_documents_in_another_order_are_turned_from_where_they_stood(
    engine: Engine, words: list[int], start: int
) -> None:
    """Rows of two references, one behind the other; as if their keys carried the places of these rows."""
    one, two = words[:128], words[600:728]
    prompt = [*words[1_000 : 1_000 + start], *two, *one]
    prefilled(engine, [*one, *two], REFERENCE)
    places = torch.cat([torch.arange(128, 256), torch.arange(128)])
    kv = [(k[places], v[places]) for k, v in cached(engine, REFERENCE, 256)]
    rotary = engine.transformer.rotary
    moved = [(rotate(k, *turn_by(rotary, torch.arange(256) - places)), v) for k, v in kv]
    if start:
        prefilled(engine, prompt[:start], PROMPT)
    made = SelectivePrefill(engine, prompt, start, PROMPT, places=places).run(kv.__getitem__)
    wanted = SelectivePrefill(engine, prompt, start, PROMPT).run(moved.__getitem__)
    assert made is not None
    assert wanted is not None
    assert made.found == 256
    torch.testing.assert_close(made.logits, wanted.logits, atol=2e-3, rtol=1e-3)


# --- fewer tokens -------------------------------------------------------------------------------------------


def test_each_layer_keeps_its_own_tokens_in_order_and_without_gaps(
    engine: Engine, words: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, prefix, keep = words[:TOKENS], 100, 70
    kept: list[Tensor] = []

    def judged(*asked: Any) -> Tensor:
        kept.append(most_attended(*asked))
        return kept[-1]

    monkeypatch.setattr(selective, "most_attended", judged)
    whole = stand_in(engine, prompt, prompt, start=prefix)
    every = cached(engine, PROMPT, TOKENS)
    assert not kept
    made = stand_in(engine, prompt, prompt, start=prefix, keep=keep)
    assert torch.equal(made.logits, whole.logits), "what is left out is left out of decoding alone"
    assert len({tuple(places.tolist()) for places in kept}) > 1, "all layers keep the same"
    for places, (k, v), (own_k, own_v) in zip(
        kept, every, cached(engine, PROMPT, prefix + keep), strict=True
    ):
        there = torch.cat([torch.arange(prefix), prefix + places])
        assert places.tolist() == sorted(set(places.tolist()))
        assert TOKENS - prefix - 1 in places
        assert torch.equal(own_k, k[there])
        assert torch.equal(own_v, v[there])


def test_decoding_attends_to_what_is_kept_from_the_place_in_the_text(
    engine: Engine, words: list[int]
) -> None:
    prompt, keep, following = words[:TOKENS], 150, words[TOKENS : TOKENS + 3]
    stand_in(engine, prompt, prompt, keep=keep)
    past = cached(engine, PROMPT, keep)
    wanted = dense(engine, following, TOKENS, past)
    for step, token in enumerate(following):
        (row,) = engine.decode([token], [TOKENS + step], [PROMPT], lengths=[keep + step])
        torch.testing.assert_close(row, wanted[step], atol=2e-3, rtol=1e-3)
    (row,) = engine.decode(following[:1], [keep], [PROMPT])
    assert divergence(row, wanted[0]) > 1e-4, "its place in the text does not count"


@torch.inference_mode()
def dense(engine: Engine, ids: Sequence[int], position: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Logits behind each of these tokens, the first at `position`, which attend to `past` and to each other."""
    model = engine.transformer
    cos, sin = model.rotary.rows(torch.arange(position, position + len(ids)))
    x = model.embed(torch.tensor(ids))
    for layer, (old_k, old_v) in zip(model.layers, past, strict=True):
        q, k, v = layer.project(x, cos, sin)
        keys, values = torch.cat([old_k, k]), torch.cat([old_v, v])
        seen = torch.ones(len(ids), len(keys), dtype=torch.bool).tril(len(old_k))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1).unsqueeze(0) for part in (q, keys, values)),
            attn_mask=seen,
            enable_gqa=True,
        )
        x = layer.finish(x, attended[0].transpose(0, 1).reshape(len(ids), -1))
    return model.logits(x)


# --- the end -----------------------------------------------------------------------------------------------


def test_it_stops_between_layers(engine: Engine, words: list[int]) -> None:
    prefilled(engine, words[:TOKENS], REFERENCE)
    kv, stored = cached(engine, REFERENCE, TOKENS), []
    prefill = SelectivePrefill(engine, words[:TOKENS], 0, PROMPT)
    hooks = LayerHooks(after_layer=stored.append, should_stop=lambda: len(stored) == 3)
    made = prefill.run(kv.__getitem__, hooks)
    assert made is None
    assert stored == [0, 1, 2]
