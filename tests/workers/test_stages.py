"""Several workers compute one prompt, each some layers, over real channels: one worker's bits, also where one ends.

Invariant I109 of `docs/invariants.md`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference import prefill

from halfmoon.schemas.decisions import LayerStage
from halfmoon.schemas.policy import Layout
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.prefill.actions import ComputePrompt, ComputeStage
from halfmoon.workers.prefill.cache_window import CacheWindow, PromptMemory
from halfmoon.workers.prefill.computation import OrderAborted, PromptComputation
from halfmoon.workers.prefill.events import LayerStored, PrefixLayerLoaded
from halfmoon.workers.prefill.layer_progress import LayersMissing, StageGone
from halfmoon.workers.prefill.layer_stages import listener as listener_module
from halfmoon.workers.prefill.layer_stages.computation import StageComputation
from halfmoon.workers.prefill.layer_stages.listener import StageListener
from halfmoon.workers.worker import ChannelConfig
from tests.eventually import BOUND_S
from tests.store.channel_harness import hello, options
from tests.store.memory_channels import KIND, MemoryListener, channel_kind

LAYERS, BLOCK, TOKENS = 3, 16, 16 * 5 + 3
PROMPT = [(i * i * 31 + 17 * i) % 40000 + 20 for i in range(TOKENS)]
BLOCKS = -(-TOKENS // BLOCK)
ORDER = "7-1"


@pytest.fixture(scope="module", params=["f32", pytest.param("bf16", marks=pytest.mark.slow)], name="model")
def any_model(request: pytest.FixtureRequest) -> LoadedModel:
    found: LoadedModel = request.getfixturevalue(f"model_{request.param}")
    return replace(found, config=replace(found.config, layers=LAYERS))


def engine(model: LoadedModel) -> Engine:
    made = Engine(model, num_blocks=BLOCKS + 2, block_tokens=BLOCK, exact=True, segment_tokens=2 * BLOCK)
    made.cache.k.fill_(float("nan"))  # what was never brought there would be seen
    made.cache.v.fill_(float("nan"))
    return made


@pytest.fixture(autouse=True)
def within_the_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the test is marked so."""
    if channel_kind(request.node) == KIND:
        monkeypatch.setattr(listener_module, "ChannelListener", MemoryListener)


class Pool:
    """Slots of a node: bytes `[slots, layers, layer_block_bytes]`."""

    def __init__(self, layer_block_bytes: int) -> None:
        self.bytes = np.full((BLOCKS, LAYERS, layer_block_bytes), 255, dtype=np.uint8)
        self.written: set[int] = set()

    def layer_block(self, slot: int, layer: int) -> Any:
        return self.bytes[slot, layer]

    @contextlib.contextmanager
    def writing(self, slot: int, order_id: str) -> Iterator[None]:
        assert order_id == ORDER
        self.written.add(slot)
        yield


class Group:
    """A last worker and others, each with an engine and a thread; `split` has the layers of each."""

    def __init__(self, model: LoadedModel, split: tuple[int, ...]) -> None:
        self.engines = [engine(model) for _ in split]
        dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[model.dtype]
        config = model.config
        self.layout = Layout(
            model="m",
            model_fingerprint="f",
            layers=LAYERS,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_tokens=BLOCK,
            dtype=dtype,  # type: ignore[arg-type]
            segment_tokens=2 * BLOCK,
        )
        names = [f"p{place}" for place in range(len(split))]
        self.listeners = [StageListener(hello(name), options("unix")) for name in names[:-1]]
        places = [one.addresses for one in self.listeners] + [[]]
        self.stages, first = [], 0
        for name, layers, addresses in zip(names, split, places, strict=True):
            self.stages.append(
                LayerStage(worker_id=name, first_layer=first, layers=layers, addresses=list(addresses))
            )
            first += layers
        self.parts: list[StageComputation] = []
        self.heard: list[Any] = []
        self.pool = Pool(self.engines[-1].cache.layer_block_bytes)
        self.threads = ThreadPoolExecutor(len(split) + 1)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *problem: object) -> None:
        for part in self.parts:
            part.stop()
        self.threads.shutdown()
        for listener in self.listeners:
            listener.close()

    def prompt(self, cached: int = 0, fetched_layer: int = LAYERS - 1) -> PromptComputation:
        starts = range(cached * BLOCK, TOKENS, BLOCK)
        action = ComputePrompt(
            order_id=ORDER,
            token_ids=PROMPT,
            chunks=[range(start, min(start + BLOCK, TOKENS)) for start in starts],
            prefix_blocks=cached,
            fetched_layer=fetched_layer,
            slots=list(range(BLOCKS)),
            present=list(range(cached)),
            stages=self.stages,
        )
        return PromptComputation(
            action,
            PromptMemory(
                engine=self.engines[-1],
                pool=self.pool,
                layout=self.layout,
                window=CacheWindow(BLOCKS, room=BLOCKS + 2, each=2),
            ),
            copies=self.threads,
            tell=self.heard.append,
            channels=ChannelConfig(hello=hello(self.stages[-1].worker_id), options=options("unix")),
        )

    def begin_parts(self, **changes: Any) -> list[Any]:
        """The other workers', on threads of their own."""
        running = []
        for stage, own, listener in zip(self.stages[:-1], self.engines, self.listeners, strict=False):
            asked: dict[str, Any] = {
                "order_id": ORDER,
                "prefill_worker_id": self.stages[-1].worker_id,
                "prompt_tokens": TOKENS,
                "first_layer": stage.first_layer,
                "layers": stage.layers,
            }
            action = ComputeStage(**{**asked, **changes})
            part = StageComputation(action, engine=own, layout=self.layout, listener=listener)
            self.parts.append(part)
            running.append(self.threads.submit(part.run, list(range(BLOCKS))))
        return running


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> tuple[str, Any]:
    """The logits' digest of one worker, and the KV of all whole blocks `[blocks, layers, bytes]`."""
    one = engine(model)
    logits = prefill(one, PROMPT, list(range(BLOCKS)))
    held = np.zeros((BLOCKS, LAYERS, one.cache.layer_block_bytes), dtype=np.uint8)
    for block in range(BLOCKS):
        for layer in range(LAYERS):
            one.cache.read_block(layer, block, held[block, layer])
    return one.logits_digest(logits), held[: TOKENS // BLOCK]


@pytest.mark.parametrize("split", [(2, 1), (1, 1, 1)])
@pytest.mark.parametrize("cached", [0, 2, 5])
def test_stages_give_one_workers_bits(
    model: LoadedModel, alone: tuple[str, Any], split: tuple[int, ...], cached: int
) -> None:
    digest, held = alone
    with Group(model, split) as group:
        group.pool.bytes[:cached] = held[:cached]
        running = group.begin_parts()
        prompt = group.prompt(cached)
        logits = prompt.run(list(range(BLOCKS)))
        assert prompt.stage_wait_ns > 0, "it waits for the first chunk at least"
        for part in running:
            part.result(timeout=BOUND_S)
        assert group.engines[-1].logits_digest(logits) == digest  # type: ignore[arg-type]
        assert (group.pool.bytes[: TOKENS // BLOCK] == held).all()
        assert group.pool.written == set(range(cached, BLOCKS)), "committed blocks stay as they are"
        stored = [(e.layer, e.first_block) for e in group.heard if isinstance(e, LayerStored)]
        assert sorted(stored) == [
            (layer, block) for layer in range(LAYERS) for block in range(cached, BLOCKS)
        ]
        loaded = sorted(e.layer for e in group.heard if isinstance(e, PrefixLayerLoaded))
        assert loaded == (list(range(LAYERS)) if cached else [])


@pytest.mark.pure
def test_a_planted_difference_in_a_cached_block_is_seen(model: LoadedModel, alone: tuple[str, Any]) -> None:
    digest, held = alone
    with Group(model, (2, 1)) as group:
        group.pool.bytes[:2] = held[:2]
        group.pool.bytes[0, 0, 0] ^= 0x40
        running = group.begin_parts()
        logits = group.prompt(2).run(list(range(BLOCKS)))
        for part in running:
            part.result(timeout=BOUND_S)
        assert group.engines[-1].logits_digest(logits) != digest  # type: ignore[arg-type]


@pytest.mark.pure
def test_a_stage_computes_a_chunk_while_the_next_one_computes_that_before(model: LoadedModel) -> None:
    """By the order of events alone: the first stage is done with all before the last one ends."""
    with Group(model, (2, 1)) as group:
        running = group.begin_parts()
        held = threading.Event()
        compute = group.engines[-1].prefill_stage

        def late(chunk: Any, *rest: Any, **named: Any) -> Any:
            # The last chunk's residual can only lie here if the first stage did not wait for this one.
            if chunk.start == 0:
                assert held.wait(BOUND_S)
            return compute(chunk, *rest, **named)

        group.engines[-1].prefill_stage = late  # type: ignore[method-assign]
        prompt = group.prompt()
        last = group.threads.submit(prompt.run, list(range(BLOCKS)))
        while len([e for e in group.heard if isinstance(e, LayerStored) and e.layer == 1]) < BLOCKS:
            assert not last.done()
        held.set()
        last.result(timeout=BOUND_S)
        running[0].result(timeout=BOUND_S)


@pytest.mark.pure
def test_a_stage_that_hangs_up_is_named_and_the_others_end(model: LoadedModel) -> None:
    with Group(model, (1, 1, 1)) as group:
        compute, named = group.engines[0].prefill_stage, threading.Event()

        def late(chunk: Any, *rest: Any, **more: Any) -> Any:
            # What it sent before its channel is closed may all be under way: then it has nothing left to fail by.
            if chunk.start:
                assert named.wait(BOUND_S)
            return compute(chunk, *rest, **more)

        def hang_up(*chunk: Any, **more: Any) -> None:
            group.parts[1].stop()

        group.engines[0].prefill_stage = late  # type: ignore[method-assign]
        group.engines[1].prefill_stage = hang_up  # type: ignore[method-assign]
        running = group.begin_parts()
        with pytest.raises(StageGone, match="stage p1") as gone:
            group.prompt().run(list(range(BLOCKS)))
        assert gone.value.worker_id == "p1"
        named.set()
        for part in running:
            assert isinstance(part.exception(timeout=BOUND_S), ChannelLost)


@pytest.mark.pure
def test_a_stage_that_is_stopped_as_its_channel_comes_waits_for_nothing(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stop` finds no channel to close, and the channel is there before it says so."""
    with Group(model, (2, 1)) as group:
        take = group.listeners[0].take

        def taken(order_id: str, stopped: Callable[[], bool]) -> Any:
            came = take(order_id, stopped)
            group.parts[0].stop()
            return came

        monkeypatch.setattr(group.listeners[0], "take", taken)
        monkeypatch.setattr(group.engines[0], "prefill_stage", pytest.fail)
        (running,) = group.begin_parts()
        with pytest.raises(StageGone, match="stage p0"):
            group.prompt().run(list(range(BLOCKS)))
        with pytest.raises(ChannelLost, match="it was stopped"):
            running.result(timeout=BOUND_S)


@pytest.mark.pure
@pytest.mark.parametrize(
    "changes", [{"prompt_tokens": TOKENS + 1}, {"prefill_worker_id": "p9"}], ids=["tokens", "worker"]
)
def test_a_plan_of_another_order_is_not_obeyed(model: LoadedModel, changes: dict[str, Any]) -> None:
    with Group(model, (2, 1)) as group:
        running = group.begin_parts(**changes)
        with pytest.raises(StageGone, match="p0"):
            group.prompt().run(list(range(BLOCKS)))
        assert isinstance(running[0].exception(timeout=BOUND_S), ChannelLost)


@pytest.mark.pure
def test_what_cannot_be_fetched_is_no_stages_fault(model: LoadedModel) -> None:
    with Group(model, (2, 1)) as group:
        running = group.begin_parts()
        prompt = group.prompt(cached=2, fetched_layer=0)
        prompt.loads.fail("its source is gone")
        with pytest.raises(LayersMissing, match="its source is gone"):
            prompt.run(list(range(BLOCKS)))
        assert isinstance(running[0].exception(timeout=BOUND_S), ChannelLost)


@pytest.mark.pure
def test_a_cancelled_prompt_ends_all_stages(model: LoadedModel) -> None:
    with Group(model, (2, 1)) as group:
        running = group.begin_parts()
        prompt = group.prompt()
        prompt.stop()
        with pytest.raises(OrderAborted):
            prompt.run(list(range(BLOCKS)))
        group.parts[0].stop()
        assert isinstance(running[0].exception(timeout=BOUND_S), ChannelLost)


@pytest.mark.pure
def test_a_stage_that_nobody_called_ends_when_it_is_stopped(model: LoadedModel) -> None:
    with Group(model, (2, 1)) as group:
        (running,) = group.begin_parts()
        group.parts[0].stop()
        assert isinstance(running.exception(timeout=BOUND_S), ChannelLost)
