"""Invariants of workers' machines, and changes of real machines that they refuse. The numbers are those of
`docs/invariants.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import test_attention_state
import test_decode_moves
import test_decode_state
from decode_script import MS, order, reply
from decode_script import Script as DecodeScript
from mixed_script import Script as MixedScript
from mixed_script import order as mixed_order
from prefill_script import OTHER_KEYS
from prefill_script import Script as PrefillScript

from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.attention.events import HoldLoaded
from halfmoon.workers.decode import events
from halfmoon.workers.decode.sequence import Stage
from tests.adapters import test_adapter_halves, test_adapter_state

# --- decode workers -----------------------------------------------------------------------------------------


def stepping() -> Any:
    """One sequence runs, and is in the step; another waits for its KV."""
    script = DecodeScript()
    test_decode_state.loaded(script, 1)
    script.on(events.EngineIdled)
    script.give(order(2), reply())
    return script.state


def between() -> Any:
    """As `stepping`; the step has ended, and the compute thread has not said so."""
    script = DecodeScript()
    test_decode_state.loaded(script, 1)
    script.on(events.EngineIdled)
    script.on(events.StepEnded, tokens=[SampledToken(token_id=101)], step_ns=MS)
    return script.state


def copying() -> Any:
    """A sequence waits while its first layer is copied."""
    script = DecodeScript()
    script.give(order(1), reply())
    script.hear(*test_decode_state.filled(1)[:2])
    return script.state


def swapped() -> Any:
    """The second of two sequences has given way to the first."""
    script = test_decode_state.crowded()
    test_decode_state.step(script, 101, 201)
    script.on(events.SwappedOut, held="bytes")
    return script.state


def ready() -> Any:
    """A sequence could join the batch."""
    script = DecodeScript()
    test_decode_state.loaded(script, 1)
    return script.state


def moving() -> Any:
    """Segments of a sequence are on their way to a lender."""
    script = test_decode_moves.running()
    test_decode_moves.moving(script)
    return script.state


def finished() -> Any:
    """A sequence of two tokens has ended."""
    script = DecodeScript()
    test_decode_state.loaded(script, 1, max_tokens=2)
    script.on(events.EngineIdled)
    test_decode_state.step(script, 101)
    return script.state


def first(state: Any) -> Any:
    return next(iter(state.orders.open.values()))


def a_free_block_too_many(state: Any) -> None:
    state.orders.blocks._free += 1


def a_mark_too_few(state: Any) -> None:
    state.orders.blocks._used[0] = 0


def runs_and_waits(state: Any) -> None:
    first(state).stage = Stage.WAITING


def a_smaller_batch(state: Any) -> None:
    state.batch.size_max = 0


def sleeps_in_a_step(state: Any) -> None:
    state.orders.asleep = True


def blocks_gone_while_they_are_copied(state: Any) -> None:
    first(state).table = []


def a_free_block_in_a_table(state: Any) -> None:
    first(state).table.append(15)


def more_moved_than_there_is(state: Any) -> None:
    next(iter(state.orders.moves.open.values())).tokens = 1_000


def away_at_nobody(state: Any) -> None:
    state.orders.open["2-1"].away = 1


def copied_and_never_started(state: Any) -> None:
    first(state).kv.copied += 1


def copies_of_nobody(state: Any) -> None:
    first(state).kv.copying += 1


def ended_and_open(state: Any) -> None:
    first(state).finish_reason = "stop"


def a_lease_after_its_time(state: Any) -> None:
    first(state).released = False


def tokens_without_blocks(state: Any) -> None:
    first(state).output += [1] * 20
    first(state).tokens += [SampledToken(token_id=1)] * 20


def swapped_out_with_blocks(state: Any) -> None:
    state.orders.swapped[0].table = state.orders.blocks.allocate(2)


def finished_and_alive(state: Any) -> None:
    next(iter(state.orders.finished.values())).stage = Stage.RUNNING


def a_run_of_no_place(state: Any) -> None:
    state.orders.blocks._length[99] = 1


def sleeps_over_one_that_is_ready(state: Any) -> None:
    state.orders.asleep = True


def an_output_without_its_tokens(state: Any) -> None:
    first(state).output.append(1)


def finished_with_its_lease(state: Any) -> None:
    next(iter(state.orders.finished.values())).released = False


def finished_without_a_reason(state: Any) -> None:
    next(iter(state.orders.finished.values())).finish_reason = ""


def early_and_open(state: Any) -> None:
    state.orders.early[first(state).order_id] = []


# --- prefill workers ----------------------------------------------------------------------------------------


def computing() -> Any:
    """One prompt is computed, and another is prepared."""
    script = PrefillScript()
    script.computing("1-1")
    script.prepared("2-1", block_keys=OTHER_KEYS)
    return script.state


def turn_of_nobody(state: Any) -> None:
    state.turn = None


def cancelled_and_queued(state: Any) -> None:
    state.jobs["2-1"].cancelled = True


def a_layer_too_many(state: Any) -> None:
    state.jobs["2-1"].fetched_layer = 1_000


def prepared_too_early(state: Any) -> None:
    state.prepared_max = 0


def prepared_and_left(state: Any) -> None:
    del state.jobs["1-1"]
    state.turn = None


def stopped_with_orders(state: Any) -> None:
    state.stopped = True


def computes_and_pauses(state: Any) -> None:
    state.jobs["1-1"].paused = True


def more_cached_than_usable(state: Any) -> None:
    state.jobs["2-1"].cached_blocks = 1_000


# --- attention workers --------------------------------------------------------------------------------------


def holding() -> Any:
    """A hold whose blocks are loaded."""
    machine = test_attention_state.Machine()
    (load,) = machine.ask()
    machine.on(HoldLoaded, hold=load.hold)
    return machine.state


def over_and_here(state: Any) -> None:
    next(iter(state.holds.open.values())).over = True


def a_block_of_nobody(state: Any) -> None:
    next(iter(state.holds.open.values())).blocks.pop()


def a_free_block_in_a_hold(state: Any) -> None:
    blocks = next(iter(state.holds.open.values())).blocks
    (free,) = set(range(6)) - set(blocks)
    blocks[0] = free


# --- mixed workers ------------------------------------------------------------------------------------------


def iterating() -> Any:
    """A request is in the iteration that is under way."""
    script = MixedScript()
    script.begin(mixed_order(1))
    while script.todo:
        script.prepare()
    script.hear(events.EngineIdled)
    return script.state


def only(state: Any) -> Any:
    (request,) = state.requests.values()
    return request


def blocks_of_nobody(state: Any) -> None:
    only(state).sequence.table.pop()


def ends_after_nothing(state: Any) -> None:
    state.ending.append(only(state).job)
    state.in_step = None


def unknown_to_the_former(state: Any) -> None:
    only(state).formed = False


def drawn_and_nowhere(state: Any) -> None:
    only(state).drawn += 100


def asleep_over_work(state: Any) -> None:
    state.in_step, state.asleep = None, True


def formed_and_not_in_hand(state: Any) -> None:
    state.former._running.clear()


def answered_before_its_end(state: Any) -> None:
    only(state).answered = not only(state).answered


def ended_and_still_there(state: Any) -> None:
    only(state).sequence.finish_reason = "stop"


# --- adapters -----------------------------------------------------------------------------------------------


def asking() -> Any:
    """An engine is asked for an answer."""
    state = test_adapter_state.machine()
    state.on(test_adapter_state.ordered())
    state.on(test_adapter_state.taken())
    return state


def waiting_for_the_other_half() -> Any:
    """A decode half has its tokens, and has not heard that the prompt is computed."""
    state = test_adapter_halves.decode()
    state.on(test_adapter_halves.decode_ordered())
    state.on(test_adapter_state.taken())
    return state


def ended_at_the_engine(state: Any) -> None:
    only(state).sequence.finish_reason = "stop"


def tokens_without_a_result(state: Any) -> None:
    only(state).sequence.output.append(1)


def open_and_finished(state: Any) -> None:
    state.finished["o1"] = only(state).sequence


PLANTED: list[tuple[str, Callable[[], Any], Callable[[Any], None]]] = [
    ("I54", stepping, a_free_block_too_many),
    ("I54", stepping, a_mark_too_few),
    ("I54", stepping, a_run_of_no_place),
    ("I55", stepping, runs_and_waits),
    ("I56", stepping, a_smaller_batch),
    ("I57", stepping, sleeps_in_a_step),
    ("I58", between, sleeps_in_a_step),
    ("I58", ready, sleeps_over_one_that_is_ready),
    ("I59", copying, blocks_gone_while_they_are_copied),
    ("I60", stepping, a_free_block_in_a_table),
    ("I61", moving, more_moved_than_there_is),
    ("I62", stepping, away_at_nobody),
    ("I63", stepping, copied_and_never_started),
    ("I63", stepping, copies_of_nobody),
    ("I64", stepping, ended_and_open),
    ("I64", stepping, an_output_without_its_tokens),
    ("I65", stepping, a_lease_after_its_time),
    ("I65", finished, finished_with_its_lease),
    ("I66", stepping, tokens_without_blocks),
    ("I67", swapped, swapped_out_with_blocks),
    ("I68", finished, finished_and_alive),
    ("I68", finished, finished_without_a_reason),
    ("I68", stepping, early_and_open),
    ("I69", computing, turn_of_nobody),
    ("I70", computing, cancelled_and_queued),
    ("I70", computing, computes_and_pauses),
    ("I71", computing, a_layer_too_many),
    ("I71", computing, more_cached_than_usable),
    ("I72", computing, prepared_too_early),
    ("I73", computing, prepared_and_left),
    ("I75", computing, stopped_with_orders),
    ("I75", iterating, stopped_with_orders),
    ("I75", asking, stopped_with_orders),
    ("I76", holding, over_and_here),
    ("I76", holding, a_block_of_nobody),
    ("I76", holding, a_free_block_in_a_hold),
    ("I77", iterating, blocks_of_nobody),
    ("I78", iterating, ends_after_nothing),
    ("I79", iterating, unknown_to_the_former),
    ("I79", iterating, formed_and_not_in_hand),
    ("I80", iterating, drawn_and_nowhere),
    ("I80", iterating, answered_before_its_end),
    ("I80", iterating, ended_and_still_there),
    ("I81", iterating, asleep_over_work),
    ("I82", asking, ended_at_the_engine),
    ("I82", asking, tokens_without_a_result),
    ("I82", waiting_for_the_other_half, tokens_without_a_result),
    ("I82", asking, open_and_finished),
]


@pytest.mark.parametrize(
    ("number", "made", "change"),
    PLANTED,
    ids=[f"{number}-{made.__name__}-{change.__name__}" for number, made, change in PLANTED],
)
def test_a_machine_that_was_changed_is_refused_by_number(
    number: str, made: Callable[[], Any], change: Callable[[Any], None]
) -> None:
    state = made()
    state.validate()
    change(state)
    with pytest.raises(AssertionError, match=re.escape(number) + " "):
        state.validate()
