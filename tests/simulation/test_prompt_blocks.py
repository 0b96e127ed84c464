"""The cached blocks of a simulated prompt: held and fetched before it is computed, let go of afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from halfmoon.conductor.simulation.clock import Clock
from halfmoon.conductor.simulation.context import SimulationContext
from halfmoon.conductor.simulation.decode import SimulatedDecode
from halfmoon.conductor.simulation.mixed import SimulatedMixed
from halfmoon.conductor.simulation.network import Network
from halfmoon.conductor.simulation.nodes import Node
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.prefill import SimulatedPrefill
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.prompt_blocks import PromptBlocks
from halfmoon.schemas.decisions import Fetch, StartMixed, StartPrefill
from halfmoon.schemas.events import Event, PrefillFinished
from halfmoon.schemas.policy import Policy

S = 1_000_000_000
BLOCK = 512
KEYS = [bytes(15) + bytes([place]) for place in range(8)]
#: A block takes a second over the link; its layers come in two halves.
PROFILE = msgspec.structs.replace(LLAMA3_A800, layers=2)
BLOCK_BYTES = PROFILE.layout(BLOCK).block_bytes
FETCH = [Fetch(node_id="there", first_block=1, blocks=3)]


class Surroundings:
    """A world without a core: two nodes, the first one with one block of the prompt, the other one with four."""

    def __init__(self) -> None:
        self.said: list[Event] = []
        self.clock = Clock()
        self.outcomes = {"r1": Outcome(arrived_ns=0, prompt_tokens=8 * BLOCK + 1, output_tokens=1)}
        self.context = SimulationContext(
            PROFILE,
            self.clock,
            Network(self.clock, BLOCK_BYTES, 0),
            self.outcomes,
            self,
            block_tokens=BLOCK,
            policy=Policy(coming_blocks=True),
        )
        for name, blocks in (("here", 1), ("there", 4), ("elsewhere", 0)):
            node = self.context.nodes[name] = Node(self.say, name, 8)
            node.pool.commit(KEYS[:blocks])
            node.pool.release(KEYS[:blocks])

    def say(self, event: Event) -> None:
        self.said.append(event)

    def ended(self, request_id: str, end: str) -> None:
        self.outcomes[request_id].end = end

    def keys(self, request_id: str) -> list[bytes]:
        return KEYS

    def held(self) -> tuple[int, int]:
        """Blocks that are held here, and there."""
        return self.context.nodes["here"].pool.held, self.context.nodes["there"].pool.held


@pytest.fixture
def world() -> Iterator[Surroundings]:
    one = Surroundings()
    yield one
    while one.clock.step():
        pass
    assert one.held() == (0, 0)


def prepared(world: Surroundings) -> tuple[PromptBlocks, list[tuple[str, int]]]:
    blocks = PromptBlocks(world.context, world.context.nodes["here"], KEYS)
    told: list[tuple[str, int]] = []
    blocks.prepare(
        8 * BLOCK + 1,
        FETCH,
        first_layer=lambda: told.append(("first layer", world.clock.now_ns)),
        all_layers=lambda: told.append(("all", world.clock.now_ns)),
    )
    return blocks, told


def test_blocks_are_held_and_fetched_layer_by_layer_and_then_others_may_read_all(world: Surroundings) -> None:
    blocks, told = prepared(world)
    assert (blocks.local, blocks.fetched, blocks.tokens) == (1, 3, 4 * BLOCK)
    assert (blocks.layer_here, blocks.loaded, world.held()) == (False, False, (1, 3))
    while world.clock.step():
        pass
    assert told == [("first layer", 3 * S // 2), ("all", 3 * S)]
    assert (blocks.layer_here, blocks.loaded, blocks.fetch_ns) == (True, True, 3 * S)
    assert world.held() == (1, 0)
    blocks.commit()
    assert len(world.context.nodes["here"].pool) == 8


def test_what_is_fetched_or_computed_comes_for_others_as_far_as_they_can_use_it(world: Surroundings) -> None:
    blocks, _ = prepared(world)
    other = PromptBlocks(world.context, world.context.nodes["here"], [*KEYS[:3], *KEYS[:1]])
    assert [blocks.brings_for(other, tokens) for tokens in (BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)] == [
        False,
        False,
        True,
    ]
    blocks.let_go()


@pytest.mark.parametrize("at_ns", [0, S, 2 * S, 4 * S])
def test_an_order_that_is_taken_back_lets_go_of_both_ends(world: Surroundings, at_ns: int) -> None:
    blocks, told = prepared(world)
    while world.clock.now_ns < at_ns and world.clock.step():
        pass
    seen = len(told)
    blocks.let_go()
    assert world.held() == (0, 0)
    while world.clock.step():
        pass
    assert len(told) == seen


def test_a_fetch_of_what_is_gone_is_computed_instead(world: Surroundings) -> None:
    world.context.nodes["there"].pool.resize(3)
    blocks, _ = prepared(world)
    assert (blocks.tokens, blocks.loaded, world.context.failed_fetches) == (BLOCK, True, 1)
    blocks.let_go()


def first_token_ns(world: Surroundings) -> int:
    while world.clock.step():
        pass
    (told,) = [event for event in world.said if isinstance(event, PrefillFinished)]
    assert (told.cached_local_tokens, told.cached_fetched_tokens) == (BLOCK, 3 * BLOCK)
    assert (told.fetch_node_id, told.fetch_ns, told.fetched_bytes) == ("there", 3 * S, 3 * BLOCK_BYTES)
    return world.outcomes["r1"].compute_ns + told.queue_ns


def test_a_prefill_worker_computes_from_the_first_layer_on(world: Surroundings) -> None:
    context = world.context
    decode = {"decode-0": SimulatedDecode(context, "decode-0", 100)}
    worker = SimulatedPrefill(context, "prefill-0", context.nodes["here"], decode, {})
    worker.start(
        StartPrefill(
            order_id="1-1",
            request_id="r1",
            frontend_id="f",
            worker_id="prefill-0",
            decode_worker_id="decode-0",
            decode_node_id="elsewhere",
            prompt_tokens=8 * BLOCK + 1,
            fetches=FETCH,
        )
    )
    assert worker.running is None
    assert first_token_ns(world) == 3 * S  # computing is over before the last layer is here
    assert worker.prefill_ns == 3 * S // 2


def test_a_mixed_worker_computes_when_all_is_here(world: Surroundings) -> None:
    context = world.context
    layout = PROFILE.layout(BLOCK)
    worker = SimulatedMixed(
        context, "mixed-0", context.nodes["here"], layout, kv_blocks=100, token_budget=8_192, iteration_ns=0
    )
    worker.start(
        StartMixed(
            order_id="1-1",
            request_id="r1",
            frontend_id="f",
            worker_id="mixed-0",
            prompt_tokens=8 * BLOCK + 1,
            max_tokens=1,
            fetches=FETCH,
        )
    )
    computing_ns = PROFILE.cost.iteration_ns([(4 * BLOCK, 4 * BLOCK + 1)], 0, 0)
    assert first_token_ns(world) == 3 * S + computing_ns
    assert (worker.prefill_ns, worker.open) == (computing_ns, {})
