"""The mixed machine: what it says, computes and keeps, whatever is heard when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.schemas.events import PrefillFailed, PrefillFinished, RequestFinished
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.sampling import Sampling
from halfmoon.schemas.tokens import ResendRequest, TakeReply
from halfmoon.workers.machines import (
    Announce,
    AnnounceRequested,
    AnswerResend,
    OrderCancelled,
    Report,
    ResendRequested,
    TokensTaken,
    WorkerStopped,
)
from halfmoon.workers.prefill.actions import EndOrder
from tests.workers.mixed_script import BLOCK_TOKENS, FAST, LAYOUT, MS, NULL, Script, answer_of, fetch, order


def the(script: Script, kind: type[Any]) -> Any:
    (found,) = [each.event for each in script.said if isinstance(each, Report) and type(each.event) is kind]
    return found


@pytest.mark.parametrize("layout", [LAYOUT, FAST])
def test_one_request(layout: Layout) -> None:
    script = Script(layout)
    script.begin(order())
    script.run()
    assert script.delivered == {"r1": answer_of(1, 10, 3)}
    assert script.reports() == ["PrefillFinished", "RequestFinished"]
    # Of ten tokens two blocks are whole, and have keys.
    assert script.committed == {"1-1": {0, 1}}
    finished = the(script, RequestFinished)
    assert (finished.completion_tokens, finished.finish_reason, finished.worker_id) == (3, "length", "m0")
    assert the(script, PrefillFinished).pushed_bytes == 0
    assert [type(each) for each in script.said].count(EndOrder) == 1
    assert script.state.kv_blocks_used == 0
    # A budget of 8: two blocks, then the rest; then a decode each.
    assert [(len(step.chunks), len(step.decodes)) for step in script.steps][-2:] == [(0, 1), (0, 1)]
    assert sum(len(chunk.token_ids) for chunk in script.steps[0].chunks) == 8


def test_what_is_cached_is_loaded_and_not_computed() -> None:
    script = Script()
    script.begin(order(prompt=14, fetches=[fetch(1, 2)]), present=1)
    script.run()
    assert script.delivered == {"r1": answer_of(1, 14, 3)}
    first = script.steps[0]
    assert (first.chunks[0].start, [len(load.blocks) for load in first.loads]) == (12, [3])
    prefilled = the(script, PrefillFinished)
    assert (prefilled.cached_local_tokens, prefilled.cached_fetched_tokens) == (4, 8)
    assert script.committed == {}


def loading_slowly() -> Script:
    """Number 1 decodes, and ten blocks of number 2 are to be loaded: how long a block takes is known from number 1."""
    script = Script(FAST, kv_blocks=64, iteration_ns=24 * MS, budget_tokens=64)
    script.load_ns = 3 * MS
    script.begin(order(1, 5, 30), present=1)
    while not script.delivered:
        script.advance()
    script.begin(order(2, 42), present=10)
    return script


def test_a_long_prefix_is_loaded_over_several_iterations_and_decodes_are_not_held_up() -> None:
    script = loading_slowly()
    script.begin(order(3, 2))
    script.run()
    loading = [step for step in script.steps if step.loads][1:]
    assert [[len(load.blocks) for load in step.loads] for step in loading] == [[4], [4], [2]]
    assert all(len(step.decodes) == 1 for step in loading)
    assert [[row.sequence.order_id for row in step.chunks] for step in loading] == [[], [], ["2-1", "3-1"]]
    assert script.delivered["r2"] == answer_of(2, 42, 3)
    # A step that was made beside a load is as long as one without.
    assert script.state.heartbeat(0).step_ns == pytest.approx(10 * MS, abs=MS // 2)


def test_slots_that_are_read_go_back_when_the_iteration_is_over() -> None:
    script = loading_slowly()
    while not (script.step and script.step.loads):
        script.advance()
    assert script.step.chunks == []
    script.hear(OrderCancelled, order_id="2-1")
    assert not any(isinstance(each, EndOrder) and each.order_id == "2-1" for each in script.said)
    script.compute()
    assert any(isinstance(each, EndOrder) and each.order_id == "2-1" for each in script.said)
    script.run()
    assert script.delivered["r1"] == answer_of(1, 5, 30)


def test_a_whole_prompt_that_is_cached_still_computes_its_last_block() -> None:
    script = Script()
    script.begin(order(prompt=8), present=2)
    script.run()
    assert script.steps[0].chunks[0].start == 4
    assert script.steps[0].chunks[0].stores == ()  # others may be reading it
    assert script.delivered == {"r1": answer_of(1, 8, 3)}


def test_a_fetch_that_fails_is_computed() -> None:
    script = Script()
    script.begin(order(prompt=14, fetches=[fetch(0, 3)]))
    script.prepare()
    script.prepare()
    script.prepare(fails=True)
    script.run()
    assert script.steps[0].chunks[0].start == 0
    assert script.delivered == {"r1": answer_of(1, 14, 3)}


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    script = Script(kv_blocks=40)
    script.begin(order(1, prompt=4, answer=12))
    while not script.delivered:
        script.advance()
    begun_ns = script.now_ns + MS
    script.begin(order(2, prompt=60, answer=2))
    while "r2" not in script.delivered:
        script.advance()
        drawn_ns = script.now_ns - MS  # then it heard that the engine is idle
    script.run()
    both = [step for step in script.steps if step.chunks and step.decodes]
    assert len(both) >= 10
    told = [each.event for each in script.said if isinstance(each, Report)]
    first_token_ns = {each.request_id: each.ttft_ns for each in told if isinstance(each, RequestFinished)}
    assert first_token_ns["r2"] == drawn_ns - begun_ns
    assert all(sum(len(chunk.token_ids) for chunk in step.chunks) <= 8 for step in both)
    assert script.delivered == {"r1": answer_of(1, 4, 12), "r2": answer_of(2, 60, 2)}


def test_a_prompt_advances_by_a_block_beside_any_number_of_decodes() -> None:
    script = Script(kv_blocks=64, batch_max=8, budget_tokens=4)
    for number in range(1, 6):
        script.begin(order(number, prompt=2, answer=30))
    while len(script.delivered) < 5:
        script.advance()
    script.begin(order(6, prompt=12, answer=1))
    script.run()
    chunks = [chunk for step in script.steps for chunk in step.chunks if chunk.sequence.order_id == "6-1"]
    assert [chunk.start for chunk in chunks] == [0, 4, 8]


def test_who_is_preempted_gives_the_same_answer_and_repeats_no_token() -> None:
    script = Script(kv_blocks=7)
    script.begin(order(1, prompt=8, answer=12))
    script.begin(order(2, prompt=8, answer=12))
    script.run()
    assert script.delivered == {"r1": answer_of(1, 8, 12), "r2": answer_of(2, 8, 12)}
    finished = [each.event for each in script.said if isinstance(each, Report)]
    preemptions = {
        each.request_id: each.preemptions for each in finished if isinstance(each, RequestFinished)
    }
    assert preemptions["r1"] == 0 < preemptions["r2"]
    # Its prompt was answered once, and its slots of the pool were given back then.
    assert script.reports().count("PrefillFinished") == 2


def test_a_request_placed_again_goes_on_after_what_its_client_has() -> None:
    known = answer_of(1, 10, 5)
    script = Script()
    script.delivered["r1"] = known[:3]
    script.begin(order(answer=5, placement=2), output_ids=pack_tokens(known[:3]))
    script.run()
    assert script.delivered == {"r1": known}
    # The tokens that its client has went through decode again.
    assert len([step for step in script.steps if step.decodes]) == 4
    assert the(script, RequestFinished).completion_tokens == 5


def test_a_request_whose_end_was_lost_ends_again() -> None:
    script = Script()
    known = answer_of(1, 10, 3)
    script.delivered["r1"] = list(known)
    script.begin(order(placement=2), output_ids=pack_tokens(known))
    script.run()
    assert script.reports() == ["PrefillFinished", "RequestFinished"]


def test_a_frontend_that_does_not_answer_fails_the_order_once() -> None:
    script = Script()
    script.begin(order())
    script.prepare(fails=True)
    failed = the(script, PrefillFailed)
    assert (failed.retryable, script.reports()) == (True, ["PrefillFailed"])
    assert script.state.orders_open() == 0


def test_a_request_that_can_never_fit_is_refused_by_name() -> None:
    script = Script(kv_blocks=3)
    script.begin(order(prompt=10, answer=3))
    script.prepare()
    assert the(script, PrefillFailed).reason == "prompt and answer take 4 blocks of the worker's 3"
    script.begin(order(2, prompt=9, answer=3))
    script.run()
    assert script.delivered == {"r2": answer_of(2, 9, 3)}


def test_what_was_loaded_from_slots_of_others_is_not_answered() -> None:
    script = Script()
    script.begin(order(prompt=14), present=3)
    while script.step is None:
        script.advance()
    script.compute(lost=("1-1",))
    assert script.delivered == {}
    assert the(script, PrefillFailed).retryable
    assert script.state.kv_blocks_used == 0


def test_rows_of_a_request_that_is_cancelled_meanwhile_have_their_blocks_to_the_end() -> None:
    script = Script()
    script.begin(order(1))
    while "r1" not in script.delivered:
        script.advance()
    (row,) = script.steps[-1].decodes
    script.hear(OrderCancelled, order_id="1-1")
    script.begin(order(2))
    while script.todo:
        script.prepare()
    assert len(row.table) == 3
    script.run()
    assert script.delivered["r2"] == answer_of(2, 10, 3)


def test_a_cancelled_request_gives_its_slots_back_when_the_iteration_is_over() -> None:
    script = Script()
    script.begin(order())
    while script.step is None:
        script.advance()
    script.hear(OrderCancelled, order_id="1-1")
    assert script.state.orders_open() == 1
    assert script.said == []  # its slots are being written
    script.compute()
    assert [type(each) for each in script.said] == [EndOrder]
    assert (script.state.kv_blocks_used, script.state.orders_open(), script.delivered) == (0, 0, {})


def test_who_joins_again_drops_what_it_has() -> None:
    script = Script()
    for number in (1, 2, 3):
        script.begin(order(number))
    for _ in range(6):
        script.advance()
    assert isinstance(script.hear(AnnounceRequested)[-1], Announce)
    script.run()
    assert (script.state.orders_open(), script.state.kv_blocks_used) == (0, 0)
    assert "RequestFinished" not in script.reports()


def test_tokens_are_sent_again_also_after_the_end() -> None:
    script = Script()
    script.begin(order())
    script.run()

    def asked(frontend_id: str) -> Any:
        request = ResendRequest(request_id="r1", order_id="1-1", frontend_id=frontend_id, index=1)
        (answer,) = script.state.on(ResendRequested(at_ns=script.now_ns, request=request))
        assert isinstance(answer, AnswerResend)
        return answer.reply

    assert [token.token_id for token in asked("f1").delivery.tokens] == answer_of(1, 10, 3)[1:]
    assert not asked("f2").known


def test_an_engine_that_computes_nothing() -> None:
    script = Script(NULL)
    for number in range(1, 9):
        script.begin(order(number))
    script.run()
    assert script.reports().count("RequestFinished") == 8
    assert script.committed == {}


def test_heartbeats_tell_steps_of_decodes_alone() -> None:
    script = Script()
    script.begin(order(answer=4))
    script.run()
    beat = script.state.heartbeat(7)
    assert (beat.steps, beat.step_ns, beat.step_sequences) == (3, 10 * MS, 1)
    assert beat.step_context_tokens == (11 + 12 + 13) // 3
    assert (beat.orders, beat.obeyed_seq) == ([], 7)


def test_a_part_of_an_iteration_is_its_prompts() -> None:
    script = Script(kv_blocks=40)
    script.begin(order(1, prompt=4, answer=40))
    while not script.delivered:
        script.advance()
    script.begin(order(2, prompt=8, answer=1))
    script.run()
    computed = [each.event for each in script.said if isinstance(each, Report)]
    (second,) = [e for e in computed if isinstance(e, PrefillFinished) and e.request_id == "r2"]
    # Two iterations of 30 ms, in each of which a decode takes what it takes alone.
    assert second.compute_ns == pytest.approx(2 * (30 - 11) * MS, abs=2 * MS)


#: What may happen between two iterations.
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "prepare", "fail", "compute", "lose", "idle", "cancel", "announce"]),
        st.integers(0, 5),
    ),
    max_size=120,
)


@pytest.mark.parametrize("known_first", [0, 1])
def test_a_prompt_waits_for_blocks_that_one_before_it_computes(known_first: int) -> None:
    script = Script(kv_blocks=64, batch_max=8, budget_tokens=8)
    script.begin(order(1, 20, 12))
    script.begin(order(2, 9), like="1-1")
    script.begin(order(3, 5))
    script.prepare(known_first)
    script.run()
    # The third one, of another text, does not wait; the second one computes what the first one leaves.
    starts = {name: [] for name in ("1-1", "2-1", "3-1")}
    for step in script.steps:
        for row in step.chunks:
            starts[row.sequence.order_id].append(row.start)
    assert starts == {"1-1": [0, 8, 16], "2-1": [8], "3-1": [0, 4]}
    assert script.delivered["r2"] == answer_of(1, 9, 3)
    said = [
        (type(each.event).__name__, each.event.request_id) for each in script.said if isinstance(each, Report)
    ]
    assert said.index(("PrefillFinished", "r3")) < said.index(("PrefillFinished", "r2"))
    assert said.index(("PrefillFinished", "r2")) < said.index(("RequestFinished", "r1")), (
        "it waits for no answer"
    )


@pytest.mark.parametrize("ends", ["cancelled", "lost"])
def test_a_prompt_waits_no_longer_than_the_one_before_it_is_there(ends: str) -> None:
    script = Script(kv_blocks=64, batch_max=8, budget_tokens=8)
    script.begin(order(1, 20))
    script.begin(order(2, 9), like="1-1")
    while script.step is None:
        script.advance()
    while script.todo:
        script.prepare()
    if ends == "cancelled":
        script.hear(OrderCancelled, order_id="1-1")
        script.compute()
    else:
        script.compute(lost=("1-1",))
    script.run()
    assert script.delivered["r2"] == answer_of(1, 9, 3)


@settings(max_examples=120, deadline=None)
@given(
    events=EVENTS,
    blocks=st.integers(8, 24),
    budget=st.integers(1, 20),
    fast=st.booleans(),
    bounded=st.booleans(),
)
def test_whatever_is_heard(
    events: list[tuple[str, int]], blocks: int, budget: int, fast: bool, bounded: bool
) -> None:
    """Each request that is not cancelled is answered once; what is delivered is what the request gets alone."""
    script = Script(
        FAST if fast else LAYOUT,
        kv_blocks=blocks,
        budget_tokens=budget,
        batch_max=3,
        iteration_ns=24 * MS if bounded else 0,
    )
    script.load_ns = 9 * MS
    begun: dict[str, tuple[int, int]] = {}
    ended: set[str] = set()
    for kind, which in events:
        match kind:
            case "begin" if len(begun) < 12:
                number, prompt, answer = len(begun) + 1, 1 + 5 * which % 17, 1 + which
                begun[f"{number}-1"] = (prompt, answer)
                usable = (prompt - 1) // BLOCK_TOKENS
                fetches = [fetch(usable // 2, usable - usable // 2)] if which % 2 and usable else []
                # Two and two have one text.
                given = order(number, prompt, answer, fetches=fetches)
                script.begin(given, present=usable // 2, like=f"{(number + 1) // 2}-1")
            case "prepare" | "fail" if script.todo:
                script.prepare(which % len(script.todo), fails=kind == "fail")
            case "compute" if script.step is not None:
                script.compute()
            case "lose" if script.step is not None:
                loads = [load.order_id for load in script.step.loads]
                script.compute(lost=tuple(loads[:1]))
            case "idle":
                script.idle()
            case "cancel":
                ended.add(f"{which}-1")
                script.hear(OrderCancelled, order_id=f"{which}-1")
            case "announce" if which == 5:
                ended.update(script.state.requests)
                script.hear(AnnounceRequested)
            case _:
                pass
    script.run()
    assert (script.state.orders_open(), script.state.kv_blocks_used) == (0, 0)
    ends = [each.order_id for each in script.said if isinstance(each, EndOrder)]
    assert sorted(ends) == sorted(begun), "slots that are never given back, or twice"
    answers = [
        each.event
        for each in script.said
        if isinstance(each, Report) and not isinstance(each.event, PrefillFinished)
    ]
    assert len(answers) == len({each.order_id for each in answers}), "answered twice"
    assert {each.order_id for each in answers} | ended >= set(begun), "not answered"
    for each in answers:
        if isinstance(each, RequestFinished):
            prompt, answer = begun[each.order_id]
            text = (int(each.order_id.partition("-")[0]) + 1) // 2
            assert script.delivered[each.request_id] == answer_of(text, prompt, answer)


def choice_keys(script: Script) -> list[bytes]:
    return [chunk.kept_key for step in script.steps for chunk in step.chunks]


def test_a_short_prompt_with_further_choices_has_one_key() -> None:
    script = Script()
    for number in (1, 2):
        script.begin(order(number, prompt=4), choices=3, root_key=b"tenant")
        # The choices of one request have the same prompt.
        reply = script.replies[f"{number}-1"]
        script.replies[f"{number}-1"] = msgspec.structs.replace(reply, token_ids=pack_tokens([5, 6, 7, 8]))
    script.run()
    assert choice_keys(script) == [b"tenant" + pack_tokens([5, 6, 7, 8])] * 2


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (4, {"choices": 1}),
        (5, {"choices": 3}),  # of two blocks: the pool has the first
        (4, {"choices": 3, "sampling": Sampling(prompt_logprobs=1, ignore_eos=True)}),
    ],
)
def test_what_is_computed_for_one_choice_alone_has_no_key(prompt: int, fields: dict[str, Any]) -> None:
    script = Script()
    script.begin(order(prompt=prompt), **fields)
    script.run()
    assert set(choice_keys(script)) == {b""}


def test_a_prompt_that_was_kept_counts_as_cached_and_took_no_time() -> None:
    script = Script()
    script.kept = frozenset({"2-1"})
    for number in (1, 2):
        script.begin(order(number, prompt=4), choices=3)
    while script.todo:
        script.prepare()
    script.run()
    said = [each.event for each in script.said if isinstance(each, Report)]
    first, second = [each for each in said if isinstance(each, PrefillFinished)]
    assert (first.cached_local_tokens, second.cached_local_tokens) == (0, 4)
    assert first.compute_ns > 0
    assert second.compute_ns == 0


def test_an_iteration_whose_prompts_were_all_kept_is_one_of_decodes() -> None:
    script = Script()
    script.kept = frozenset({"2-1"})
    script.begin(order(1, prompt=4, answer=9), choices=3)
    while not script.delivered:
        script.advance()
    script.begin(order(2, prompt=4), choices=3)
    script.run()
    beside = [step for step in script.steps if step.chunks and step.decodes]
    assert len(beside) == 1, "it was not computed beside a decode"
    assert script.state.heartbeat(0).steps == sum(bool(step.decodes) for step in script.steps)


def test_a_stopped_worker_begins_nothing() -> None:
    script = Script()
    script.begin(order())
    for _ in range(3):
        script.advance()
    script.hear(WorkerStopped)
    assert [type(each) for each in script.said] == [EndOrder]
    script.begin(order(2))
    script.hear(TokensTaken, order_id="2-1", reply=TakeReply())
    assert script.state.orders_open() == 0
