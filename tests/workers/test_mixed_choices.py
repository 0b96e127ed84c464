"""Choices of one short prompt on a mixed worker: its KV and its logits are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from halfmoon.schemas.decisions import StartMixed
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.sampling import Sampling
from halfmoon.schemas.tokens import TakeReply
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.mixed import iteration
from halfmoon.workers.mixed.actions import ChunkRows, RunIteration
from halfmoon.workers.mixed.request import decode_half
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.prompt_rows import PromptRows
from halfmoon.workers.prefill.kept_prompts import KEPT_MAX, KeptPrompts

BLOCK_TOKENS, BLOCKS = 32, 12
LAYOUT = Layout(
    model="m",
    model_fingerprint="f",
    layers=3,
    kv_heads=3,
    head_dim=64,
    block_tokens=BLOCK_TOKENS,
    dtype="float32",
)


class Counting(Engine):
    """An engine that writes down how many tokens of prompts it computed."""

    computed = 0

    def mixed(self, chunks: Sequence[PromptRows], *rest: Any) -> Any:
        self.computed += sum(len(chunk.token_ids) for chunk in chunks)
        return super().mixed(chunks, *rest)


@pytest.fixture
def engine(model_f32: LoadedModel) -> Counting:
    few = replace(model_f32, config=replace(model_f32.config, layers=LAYOUT.layers))
    return Counting(few, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, exact=True)


def choice(block: int, tokens: list[int], *, kept: bool = True) -> ChunkRows:
    """A whole prompt in one block of the cache, which draws with a seed of its own."""
    order = StartMixed(
        order_id=f"{block}-1",
        request_id=f"r{block}",
        frontend_id="f1",
        worker_id="m0",
        prompt_tokens=len(tokens),
        max_tokens=2,
        placement=1,
    )
    sequence = DecodeSequence(decode_half(order), LAYOUT, 0)
    sampling = Sampling(temperature=1.0, seed=block, logits_digest=True)
    sequence.take(TakeReply(token_ids=pack_tokens(tokens), sampling=sampling), frozenset())
    key = pack_tokens(tokens) if kept else b""
    return ChunkRows(sequence=sequence, token_ids=tokens, start=0, table=[block], draws=True, kept_key=key)


def made_by(engine: Engine, kept: KeptPrompts, *chunks: ChunkRows) -> iteration.Made:
    return iteration.run(
        engine, None, RunIteration(loads=[], chunks=list(chunks), decodes=[], context_tokens=0), kept
    )


def kv_of(engine: Engine, block: int, tokens: int) -> list[torch.Tensor]:
    return [layer[block][:tokens].clone() for both in (engine.cache.k, engine.cache.v) for layer in both]


def test_choices_of_one_iteration_and_of_later_ones_have_the_bits_of_one_alone(engine: Counting) -> None:
    tokens, kept = [(7 * i + 11) % 4000 + 20 for i in range(20)], KeptPrompts()
    alone = [made_by(engine, KeptPrompts(), choice(block, tokens, kept=False)) for block in range(4)]
    wanted = kv_of(engine, 0, len(tokens))
    for layer in (*engine.cache.k, *engine.cache.v):
        layer.zero_()
    engine.computed = 0
    together = made_by(engine, kept, *(choice(block, tokens) for block in range(3)))
    later = made_by(engine, kept, choice(3, tokens))
    assert engine.computed == len(tokens)
    assert (together.kept, later.kept) == ({"1-1", "2-1"}, {"3-1"})
    assert [*together.first, *later.first] == [each.first[0] for each in alone]
    assert len({token.token_id for token in together.first}) > 1, "every choice drew the same"
    for block in range(4):
        assert all(map(torch.equal, kv_of(engine, block, len(tokens)), wanted)), block


def test_more_prompts_in_one_iteration_than_are_kept(engine: Counting) -> None:
    kept = KeptPrompts()
    prompts = [[100 * which + i for i in range(5)] for which in range(1, KEPT_MAX + 2)]
    # All first choices, and then all second ones: what is kept to the end is not what each of them needs.
    chunks = [choice(block, prompts[block % len(prompts)]) for block in range(2 * len(prompts))]
    made = made_by(engine, kept, *chunks)
    assert engine.computed == sum(map(len, prompts))
    assert len(made.kept) == len(prompts)
    digests = [token.logits_digest for token in made.first]
    assert digests[: len(prompts)] == digests[len(prompts) :]
    assert len(set(digests)) == len(prompts)
