"""A short prompt of which further answers are wanted is computed once, and its other choices get the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from prefill_script import FIRST, LAYOUT, Script, order, reply

from halfmoon.schemas.events import PrefillFinished
from halfmoon.schemas.policy import Layout
from halfmoon.workers.machines import Report, TokensTaken
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.prefill.actions import ComputePrompt, SendResult
from halfmoon.workers.prefill.cache_window import CacheWindow, PromptMemory
from halfmoon.workers.prefill.computation import PromptComputation
from halfmoon.workers.prefill.events import (
    FirstTokenDrawn,
    PrefillOrdered,
    PromptComputed,
    PushClosed,
    PushOpened,
    SlotsReserved,
)
from halfmoon.workers.prefill.kept_prompts import KEPT_MAX, KeptPrompts

BLOCK = 32
PROMPT = [(i * i * 31 + 17 * i) % 40000 + 20 for i in range(21)]


class Counted(Engine):
    """Counts the chunks that it computes."""

    chunks = 0

    def prefill_chunk(self, *args: Any, **options: Any) -> Any:
        self.chunks += 1
        return super().prefill_chunk(*args, **options)


@pytest.fixture(scope="module")
def engine(model_f32: LoadedModel) -> Counted:
    few = replace(model_f32, config=replace(model_f32.config, layers=2))
    return Counted(few, num_blocks=4, block_tokens=BLOCK, exact=True)


def computed(engine: Counted, kept: KeptPrompts, block: int, key: bytes = b"k", **fields: Any) -> Any:
    """(digest of the logits, bytes of the KV, whether it was kept), computed into `block` of the cache."""
    config = engine.config
    layout = Layout(
        model="m",
        model_fingerprint="f",
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_tokens=BLOCK,
        dtype="float32",
    )
    prompt = ComputePrompt(
        order_id="1-1",
        token_ids=PROMPT,
        chunks=[range(len(PROMPT))],
        prefix_blocks=0,
        fetched_layer=config.layers - 1,
        slots=[],
        present=[],
        kept_key=key,
        **fields,
    )
    with ThreadPoolExecutor(1) as copies:
        computation = PromptComputation(
            prompt,
            PromptMemory(engine=engine, pool=None, layout=layout, window=CacheWindow(1, room=4, each=0)),
            copies=copies,
            tell=lambda _: None,
            kept=kept,
        )
        logits: Any = computation.run([block])
    content = [bytearray(engine.cache.layer_block_bytes) for _ in range(config.layers)]
    for layer, each in enumerate(content):
        engine.cache.read_block(layer, block, each)
    return engine.logits_digest(logits), content, computation.was_kept


def test_a_kept_prompt_has_the_bits_of_the_computed_one(engine: Counted) -> None:
    kept = KeptPrompts()
    before = engine.chunks
    digest, content, was_kept = computed(engine, kept, 0)
    assert not was_kept
    assert computed(engine, kept, 3) == (digest, content, True)
    assert engine.chunks == before + 1
    assert not computed(engine, kept, 1, prompt_logprobs=0)[2], "what is scored is computed"
    assert not computed(engine, kept, 1, key=b"another's")[2]
    assert not computed(engine, kept, 1, key=b"")[2]
    assert engine.chunks == before + 4


def test_few_prompts_are_kept(engine: Counted) -> None:
    kept = KeptPrompts()
    for number in range(KEPT_MAX):
        computed(engine, kept, 0, key=bytes([number]))
    assert computed(engine, kept, 0, key=bytes([0]))[2]
    computed(engine, kept, 0, key=b"one more")
    assert computed(engine, kept, 0, key=bytes([0]))[2], "asked for lately"
    assert not computed(engine, kept, 0, key=bytes([1]))[2]


@pytest.mark.parametrize(
    ("tokens", "choices", "key"),
    [(9, 2, True), (10, 3, True), (11, 2, False), (9, 1, False), (9, 0, False)],
)
def test_only_prompts_of_one_block_and_several_choices_are_kept(tokens: int, choices: int, key: bool) -> None:
    assert LAYOUT.block_tokens == 10
    script, ids = Script(), list(range(tokens))
    packed = b"".join(token.to_bytes(4, "little") for token in ids)
    script(PrefillOrdered, order=msgspec.structs.replace(order(), prompt_tokens=tokens))
    script(TokensTaken, reply=reply(token_ids=packed, block_keys=b"", root_key=b"r" * 16, choices=choices))
    script(SlotsReserved, slots=[4, 5][: LAYOUT.blocks(tokens)], present=[])
    script(PushOpened)
    (action,) = [each for each in script.past if isinstance(each, ComputePrompt)]
    assert action.kept_key == (b"r" * 16 + packed if key else b"")
    if not key:
        return
    script(PromptComputed, finished_at_ns=5, kept=True)
    script(FirstTokenDrawn, first=FIRST)
    script(PushClosed, moved_bytes=0, elapsed_ns=0)
    (result,) = [each.result for each in script.past if isinstance(each, SendResult)]
    reports = [each.event for each in script.past if isinstance(each, Report)]
    (finished,) = [each for each in reports if isinstance(each, PrefillFinished)]
    assert (result.cached_tokens, finished.cached_local_tokens) == (tokens, tokens)
