"""Each assertion of the core's invariants, and a change of a real state that it alone refuses.

The numbers are those of `docs/invariants.md`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import test_cache_places
import test_groups
import test_lending
import test_moves
from conductor_scripts import Script, arrived, decode, keys, pair, prefill, stored
from msgspec.structs import replace

from halfmoon.conductor.core import invariants
from halfmoon.conductor.core.invariants import check
from halfmoon.conductor.core.state import block_index
from halfmoon.conductor.core.state.block_index import BlockIndex
from halfmoon.conductor.core.state.core_state import FINISHED_MAX, State
from halfmoon.conductor.core.state.records import Order, PendingMove
from halfmoon.conductor.core.state.similar_index import (
    DOCUMENTS_KNOWN_MAX,
    PROMPTS_MAX,
    KnownDocument,
    KnownPrompt,
)
from halfmoon.schemas.events import FrontendJoined
from halfmoon.schemas.lending import KvPart

# --- states -------------------------------------------------------------------------------------------------


def placed() -> Script:
    """A request at p0 and d0; p1 and d1 have nothing."""
    joined = FrontendJoined(frontend_id="f1", incarnation="i1")
    script = Script(prefill(0), prefill(1), decode(0), decode(1), joined)
    script(arrived())
    return script


def answered_alone() -> Script:
    """A request of one token at p0, which answers it."""
    joined = FrontendJoined(frontend_id="f1", incarnation="i1")
    script = Script(prefill(0, answers=True), joined, one_token_prefills=True)
    script(arrived(max_tokens=1))
    return script


def parked() -> Script:
    """A request that waits for a decode worker."""
    joined = FrontendJoined(frontend_id="f1", incarnation="i1")
    script = Script(prefill(), joined, arrival_wait_ns_max=10**10)
    script(arrived())
    return script


def cached() -> Script:
    """Blocks of one node."""
    script = pair()
    script(stored("p0", keys(3)))
    return script


def staged() -> Script:
    """A prompt of which p1 computes the first layers, and p0 the last."""
    script = test_groups.cluster(2, 2)
    script(arrived(tokens=20_000))
    return script


def lent() -> Script:
    """A request at d0, whose first segments d1 and d2 hold, and a short one."""
    script = test_lending.cluster(8, 20, 13)
    script(arrived("long", tokens=2_900, max_tokens=100))
    script(arrived("short", tokens=100, max_tokens=100, block_keys=b""))
    return script


def moving() -> Script:
    """Segments of a request at d0 are on their way to d1."""
    script, *_ = test_moves.skewed()
    assert test_moves.tick(script)
    return script


def moved() -> Script:
    """A segment of a request at d0 has moved to d1, where another runs."""
    script, *_ = test_moves.skewed()
    (move,) = test_moves.tick(script)
    script(test_moves.moved(move))
    other = test_moves.begin(script, "another", 500)
    assert other.worker_id == "d1"
    return script


def split() -> Script:
    """A request whose cache lies at two attention workers, by sequence."""
    script = test_cache_places.splitting(20, 13, 8)
    script(arrived(tokens=3_000, max_tokens=200))
    return script


# --- changes ------------------------------------------------------------------------------------------------


def order_of(state: State, request_id: str = "r1") -> Order:
    return state.orders[state.requests[request_id].order_id]


def no_request(state: State) -> None:
    del state.requests["r1"]


def another_order(state: State) -> None:
    state.requests["r1"].order_id = "another"


def decode_worker_gone(state: State) -> None:
    del state.workers["d0"]


def computed_and_not_answered(state: State) -> None:
    order_of(state).phase = "decode"


def more_than_one_token(state: State) -> None:
    request = state.requests["r1"]
    request.event = replace(request.event, max_tokens=2)


def not_at_its_decode_worker(state: State) -> None:
    state.workers["d0"].batch.orders.clear()


def not_at_its_prefill_worker(state: State) -> None:
    state.workers["p0"].prompts.orders.clear()


def stage_after_the_prefill(state: State) -> None:
    order_of(state).phase = "decode"
    state.workers["p0"].prompts.orders.clear()


def stage_gone(state: State) -> None:
    del state.workers["p1"]


def stage_not_booked(state: State) -> None:
    state.workers["p1"].prompts.orders.clear()


def fetch_not_booked(state: State) -> None:
    order_of(state).prefill.fetch_node_id = "n-p1"


def node_without_transfers(state: State) -> None:
    state.leaving["n-p1"] = {}


def transfer_of_no_order(state: State) -> None:
    state.leaving["n-p1"] = {order_of(state).order_id: 1}


def another_request_id(state: State) -> None:
    request = state.requests["r1"]
    request.event = replace(request.event, request_id="r2")


def ended_and_alive(state: State) -> None:
    state.finished["r1"] = True


def placed_never(state: State) -> None:
    state.requests["r1"].placements = 0


def placed_and_parked(state: State) -> None:
    state.parked["r1"] = True


def no_timer(state: State) -> None:
    state.timers = {key: at_ns for key, at_ns in state.timers.items() if not key.startswith("unplaced:")}


def order_gone(state: State) -> None:
    del state.orders[order_of(state).order_id]


def parked_and_gone(state: State) -> None:
    state.parked["r2"] = True


def too_many_remembered(state: State) -> None:
    state.finished = {f"ended-{number}": True for number in range(FINISHED_MAX + 1)}


def a_block_too_many(state: State) -> None:
    state.workers["d0"].reserved_blocks += 1


def time_of_a_prompt(state: State) -> None:
    state.workers["p0"].prompts.reserved_ns += 1


def context_of_a_batch(state: State) -> None:
    state.workers["d0"].batch.context_tokens += 1


def negative_cost(state: State) -> None:
    worker = state.workers["d0"]
    worker.cost = replace(worker.cost, decode_base_ns=-1)


def prompt_of_another(state: State) -> None:
    state.workers["p1"].prompts.orders[order_of(state).order_id] = 0


def began_later(state: State) -> None:
    state.workers["p0"].prompts.head_since_ns = state.at_ns + 1


def answer_of_another(state: State) -> None:
    state.workers["d1"].batch.orders[order_of(state).order_id] = 0


def lender_gone(state: State) -> None:
    del state.workers["d1"]


def heads_missing(state: State) -> None:
    half = order_of(state).decode
    half.cache = [*half.cache[:-1], replace(half.cache[-1], kv_heads=3)]


def segments_apart(state: State) -> None:
    half = order_of(state).decode
    half.cache = [*half.cache[:-1], replace(half.cache[-1], first_segment=7)]


def loan_not_booked(state: State) -> None:
    del state.workers["d1"].holds.orders[order_of(state, "long").order_id]


def lends_to_itself(state: State) -> None:
    order = order_of(state, "short")
    order.decode.loans = [KvPart(worker_id=order.decode_id, segments=1)]
    state.workers[order.decode_id].holds.orders[order.order_id] = 2


def more_moves_than_loans(state: State) -> None:
    half = order_of(state, "long").decode
    half.moved_loans = len(half.loans) + 1


def moves_and_waits(state: State) -> None:
    order_of(state, "long").decode.running = False


def more_than_is_here(state: State) -> None:
    move = order_of(state, "long").decode.move
    move.loan = replace(move.loan, segments=100)


def moves_back(state: State) -> None:
    order = order_of(state, "another")
    order.decode.move = PendingMove(plan_id="p", loan=KvPart(worker_id="d0", segments=1), since_ns=0)
    state.workers["d0"].holds.orders[order.order_id] = 2


def lent_to_no_order(state: State) -> None:
    state.workers["d1"].holds.orders["another"] = 1


def nothing_lent(state: State) -> None:
    state.workers["d1"].holds.orders[order_of(state, "short").order_id] = 0


def a_block_more_is_lent(state: State) -> None:
    state.workers["d1"].holds.orders[order_of(state, "long").order_id] += 1


def a_smaller_cache(state: State) -> None:
    state.workers["d1"].kv_blocks = 1


def not_sorted(state: State) -> None:
    state.workers = dict(reversed(state.workers.items()))


def takes_orders_and_changes(state: State) -> None:
    state.workers["d1"].change.becomes = "prefill"


def worker_never_lost(state: State) -> None:
    del state.timers["lost:decode:d0:i1"]


def store_never_lost(state: State) -> None:
    del state.timers["lost:store:n-d0:i1"]


def frontend_never_lost(state: State) -> None:
    del state.timers["lost:frontend:f1:i1"]


def node_not_in_the_index(state: State) -> None:
    state.index.leave("n-p0")


def nobodys_block(state: State) -> None:
    state.index._dram[keys(1)] = 0


def block_of_no_node(state: State) -> None:
    state.index._dram[keys(1)] |= 1 << 40


def two_bits(state: State) -> None:
    state.index._bits["n-p0"] = state.index._bits["n-d0"]


def too_many_known(state: State) -> None:
    for seed in range(PROMPTS_MAX + 1):
        block = keys(1, seed)
        state.similar.prompts[block.hex()] = KnownPrompt("", b"", block)


def too_many_documents(state: State) -> None:
    for number in range(DOCUMENTS_KNOWN_MAX + 1):
        state.similar.documents[str(number)] = KnownDocument("", 0, keys(1, number))


def known_by_another_name(state: State) -> None:
    state.similar.prompts[keys(1, 1).hex()] = KnownPrompt("", b"", keys(1, 2))


class Planted(NamedTuple):
    """`change` makes of the state of `script` one that the invariant of this number refuses."""

    number: str
    script: Callable[[], Script]
    change: Callable[[State], None]


PLANTED = [
    Planted("I1", placed, no_request),
    Planted("I2", placed, another_order),
    Planted("I3", placed, decode_worker_gone),
    Planted("I3", placed, not_at_its_decode_worker),
    Planted("I4", placed, not_at_its_prefill_worker),
    Planted("I5", staged, stage_after_the_prefill),
    Planted("I6", staged, stage_gone),
    Planted("I6", staged, stage_not_booked),
    Planted("I7", placed, fetch_not_booked),
    Planted("I8", placed, node_without_transfers),
    Planted("I9", placed, transfer_of_no_order),
    Planted("I124", answered_alone, computed_and_not_answered),
    Planted("I124", answered_alone, more_than_one_token),
    Planted("I10", placed, another_request_id),
    Planted("I11", placed, ended_and_alive),
    Planted("I12", placed, placed_never),
    Planted("I13", placed, placed_and_parked),
    Planted("I14", parked, no_timer),
    Planted("I15", placed, order_gone),
    Planted("I16", placed, parked_and_gone),
    Planted("I17", placed, too_many_remembered),
    Planted("I18", placed, a_block_too_many),
    Planted("I18", placed, time_of_a_prompt),
    Planted("I18", placed, context_of_a_batch),
    Planted("I19", placed, negative_cost),
    Planted("I20", placed, prompt_of_another),
    Planted("I21", placed, began_later),
    Planted("I22", placed, answer_of_another),
    Planted("I23", lent, lender_gone),
    Planted("I24", split, heads_missing),
    Planted("I25", split, segments_apart),
    Planted("I26", lent, loan_not_booked),
    Planted("I27", lent, lends_to_itself),
    Planted("I28", lent, more_moves_than_loans),
    Planted("I29", moving, moves_and_waits),
    Planted("I30", moving, more_than_is_here),
    Planted("I31", moved, moves_back),
    Planted("I32", lent, lent_to_no_order),
    Planted("I33", lent, nothing_lent),
    Planted("I33", lent, a_block_more_is_lent),
    Planted("I34", lent, a_smaller_cache),
    Planted("I35", placed, not_sorted),
    Planted("I36", placed, takes_orders_and_changes),
    Planted("I37", placed, worker_never_lost),
    Planted("I37", placed, store_never_lost),
    Planted("I37", placed, frontend_never_lost),
    Planted("I38", placed, node_not_in_the_index),
    Planted("I39", cached, nobodys_block),
    Planted("I40", cached, block_of_no_node),
    Planted("I41", cached, two_bits),
    Planted("I115", cached, too_many_known),
    Planted("I116", cached, known_by_another_name),
    Planted("I123", cached, too_many_documents),
]


@pytest.mark.parametrize("planted", PLANTED, ids=[f"{one.number}-{one.change.__name__}" for one in PLANTED])
def test_a_state_that_was_changed_is_refused_by_number(planted: Planted) -> None:
    state = planted.script().core.state
    check(state)
    planted.change(state)
    with pytest.raises(AssertionError, match=re.escape(f"('{planted.number} ")):
        check(state)


# --- without an assertion -----------------------------------------------------------------------------------


class Assertion(NamedTuple):
    """The assertion that begins in this line of the file, by its number."""

    file: str
    line: int
    number: str


def _assertions(file: str, function: str = "") -> list[Assertion]:
    """Those of a module, or of one of its functions."""
    tree: ast.AST = ast.parse(Path(file).read_text())
    if function:
        tree = next(
            one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == function
        )
    found = []
    for one in ast.walk(tree):
        if isinstance(one, ast.Assert):
            number = re.match(r"I[0-9]+", ast.unparse(one.msg or one).lstrip("('"))
            found.append(Assertion(file, one.lineno, number.group() if number else ""))
    return found


ASSERTIONS = [*_assertions(invariants.__file__), *_assertions(block_index.__file__, "check")]


class Without(ast.NodeTransformer):
    """A module without one of its assertions."""

    def __init__(self, removed: Assertion) -> None:
        self.removed = removed

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node) if node.lineno == self.removed.line else node

    def load(self, folder: Path) -> ModuleType:
        """The module, written to the folder."""
        file = folder / "without.py"
        file.write_text(ast.unparse(self.visit(ast.parse(Path(self.removed.file).read_text()))))
        spec = spec_from_file_location("without", file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def still_refused(planted: Planted, checked: Callable[[State], None]) -> bool:
    """By the same number."""
    state = planted.script().core.state
    planted.change(state)
    try:
        checked(state)
    except Exception as problem:
        return isinstance(problem, AssertionError) and str(problem).startswith(f"('{planted.number} ")
    return False


@pytest.mark.parametrize(
    "removed", ASSERTIONS, ids=[f"{Path(one.file).stem}-{one.number}-{one.line}" for one in ASSERTIONS]
)
def test_without_an_assertion_its_change_passes(
    removed: Assertion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, checked = Without(removed).load(tmp_path), check
    if removed.file == block_index.__file__:
        monkeypatch.setattr(BlockIndex, "check", module.BlockIndex.check)
    else:
        checked = module.check
    rows = [one for one in PLANTED if one.number == removed.number]
    passed = [one.change.__name__ for one in rows if not still_refused(one, checked)]
    # One assertion is for the members of all three kinds; any other has a change of its own.
    assert len(passed) == (3 if removed.number == "I37" else 1), passed


def test_every_assertion_has_a_number_and_every_number_a_change() -> None:
    assert "" not in {one.number for one in ASSERTIONS}
    assert {one.number for one in ASSERTIONS} == {one.number for one in PLANTED}
