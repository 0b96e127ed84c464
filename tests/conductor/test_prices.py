"""The price of attention elsewhere: what a step that borrows, or has its KV at attention workers, takes."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_scripts import MS, PROFILE, Script, arrived, finished, prefill, prefilled
from msgspec.structs import replace
from test_cache_places import HEADS, attention, model, refused
from test_lending import SEGMENTS, lender, placed
from test_moves import MOVING, begin, tick

from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.explain import explained, remarks
from halfmoon.conductor.replay.histories import RequestHistories
from halfmoon.conductor.replay.logfile import EventLine
from halfmoon.schemas.cost_profile import CostProfile, StepElsewhere
from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.events import DecodeStarted, FrontendJoined, WorkerHeartbeat, WorkerJoined

JOINED = FrontendJoined(frontend_id="f1", incarnation="i1")
#: 6 ms without attention, 2 µs of attention a token, 0.1 ms a round trip, 1 ns a byte.
TABLE = replace(
    PROFILE, linear_group_ns=6 * MS, group_rows=16, attention_token_ps=2_000_000, channel_trip_ns=100_000,
    channel_byte_ps=1_000, query_row_bytes=100,
)  # fmt: skip
#: Of an attention worker.
PLACE = CostProfile(attention_token_ps=2_000_000)


def lenders(*blocks: int, profile: CostProfile = TABLE, **policy: Any) -> Script:
    workers = [lender(number, count, profile=profile) for number, count in enumerate(blocks)]
    return Script(prefill(layout=SEGMENTS), *workers, JOINED, heartbeat_ns=10**12, **policy)


def models(*workers: WorkerJoined, **policy: Any) -> Script:
    return Script(prefill(layout=HEADS), *workers, JOINED, heartbeat_ns=10**12, **policy)


def started(order: StartDecode) -> DecodeStarted:
    return DecodeStarted(order_id=order.order_id, request_id=order.request_id, worker_id=order.worker_id)


def beat(worker_id: str, sequences: int, context: int, step_ns: int) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker_id=worker_id, incarnation="i1", steps=10, step_ns=step_ns, step_sequences=sequences,
        step_context_tokens=context,
    )  # fmt: skip


# --- parts at lenders ---------------------------------------------------------------------------------------


def test_a_step_waits_for_what_a_lender_takes_longer_than_the_owner() -> None:
    script = lenders(8, 20, 13)
    script.core.explain_requests = explain_all
    order = placed(script.orders(arrived(tokens=2_900)))
    first, second, _ = script.core.notes[0].decode
    assert [(loan.worker_id, loan.segments) for loan in first.loans] == [("d1", 10), ("d2", 1)]
    own_ns, attends_ns, trips_ns = 11_800_000, 4_000_000, 10 * 100_000
    payload_bytes = 10 * (100 + 10 * (100 + 2 * 4))
    assert first.tbt_ns == own_ns + attends_ns + trips_ns + payload_bytes - 800_000
    assert first.waits_ns == first.tbt_ns - own_ns
    # Who needs less of others waits less: without a price all three were alike.
    assert (order.worker_id, order.predicted.tbt_ns) == ("d1", second.tbt_ns)
    assert second.tbt_ns < first.tbt_ns


def test_what_the_owner_takes_longer_for_hides_the_lender() -> None:
    quick = replace(TABLE, attention_token_ps=1_000)
    script = lenders(28, 2, profile=quick)
    script.core.explain_requests = explain_all
    order = placed(script.orders(arrived(tokens=2_900)))
    assert order.loans
    owner = script.core.notes[0].decode[0]
    assert (owner.worker_id, owner.tbt_ns, owner.waits_ns) == ("d0", 11_000_000 + 2_800 * 1_000, 0)
    assert not any("d0: of a step" in line for line in remarks(script.core.notes[0], None))


@pytest.mark.parametrize("unmeasured", ["attention_token_ps", "channel_trip_ns"])
def test_where_a_part_was_not_measured_the_step_is_the_learned_one(unmeasured: str) -> None:
    script = lenders(8, 20, 13, profile=replace(TABLE, **{unmeasured: 0}))
    assert placed(script.orders(arrived(tokens=2_900))).predicted.tbt_ns == 14_000_000


def test_who_borrows_is_slower_for_those_that_come_after() -> None:
    script = lenders(30, 18)
    placed(script.orders(arrived("r1", tokens=3_400)))
    borrower = script.core.state.workers["d0"]
    assert borrower.orders
    second = placed(script.orders(arrived("r2", tokens=100, max_tokens=1)))
    assert second.worker_id == "d1"
    assert second.predicted.tbt_ns == 11_000_000 + 101_000


def test_a_step_that_waits_too_long_is_refused_and_one_that_is_hidden_is_taken() -> None:
    limits: dict[str, Any] = {"tbt_slo_ns": 13_500_000, "ttft_slo_ns": 10**12}
    assert refused(lenders(8, 20, 13, **limits).orders(arrived(tokens=2_900))).reason == "tbt_slo"
    quick = replace(TABLE, attention_token_ps=1_000, channel_trip_ns=10)
    placed(lenders(8, 20, 13, profile=quick, **limits).orders(arrived(tokens=2_900)))


def test_a_heartbeat_of_a_borrower_teaches_its_own_part_of_the_step() -> None:
    script = lenders(8, 20, 13)
    order = placed(script.orders(arrived(tokens=2_900)))
    script(prefilled(order.order_id))
    script(started(order))
    before = script.core.state.workers["d1"].cost
    for _ in range(20):
        script(beat("d1", 1, 3_000, order.predicted.tbt_ns))
    now = script.core.state.workers["d1"].cost
    assert now.step_ns(1, 2_000) == pytest.approx(before.step_ns(1, 2_000), rel=0.001)
    # Of another batch than the one that is known, nothing is learned.
    script(beat("d1", 2, 3_000, 10**12))
    assert script.core.state.workers["d1"].cost == now


@pytest.mark.parametrize(("trip_ns", "moves"), [(0, 1), (1_000, 1), (200_000, 1), (10 * MS, 0)])
def test_a_move_is_planned_where_it_gains_more_than_steps_wait_for_what_is_not_hidden(
    trip_ns: int, moves: int
) -> None:
    """With 0.2 ms a round trip steps of 11 ms wait for 2 ms, and make two tokens where they made one."""
    profile = replace(TABLE, channel_trip_ns=trip_ns, attention_token_ps=1_000_000)
    script = lenders(20, 20, profile=profile, **MOVING)
    script.core.explain_requests = explain_all
    begin(script, "long", 1_500)
    other = begin(script, "other", 1_500)
    waits = placed(script.orders(arrived("waits", tokens=500)))
    script(prefilled(waits.order_id, "waits"))
    script(finished(other.order_id, "other", "d1"))
    assert len(tick(script)) == moves
    if moves:
        histories, core = RequestHistories(), Core(checked=True)
        core.explain_requests = explain_all
        for stamped in script.log:
            line = EventLine(seq=stamped.seq, at_ns=stamped.at_ns, event=stamped.event)
            histories.see(line, core.step(stamped), core)
        assert "of a step, attention at d1 takes" in explained(histories.of["long"])


# --- all of it at attention workers -------------------------------------------------------------------------


def test_a_step_elsewhere_has_its_products_its_messages_and_attention_there() -> None:
    script = models(model(profile=TABLE), attention(0, 40, profile=PLACE))
    script.core.explain_requests = explain_all
    order = placed(script.orders(arrived(tokens=1_000)))
    payload_bytes = 10 * (2 * 100 + HEADS.token_layer_bytes)
    assert order.predicted.tbt_ns == 6 * MS + 2_200_000 + 1 * MS + payload_bytes
    assert "d0: of a step, 3.2 ms wait for attention elsewhere, in 1 group" in remarks(
        script.core.notes[0], None
    )


def test_by_heads_messages_are_divided() -> None:
    places = [attention(0, 40, 0, 2, profile=PLACE), attention(1, 40, 2, 2, profile=PLACE)]
    order = placed(models(model(profile=TABLE), *places).orders(arrived(tokens=1_000)))
    payload_bytes = 10 * (2 * 100 + HEADS.token_layer_bytes) // 2
    assert order.predicted.tbt_ns == 6 * MS + 2_200_000 + 1 * MS + payload_bytes


def test_by_sequence_each_place_has_the_attention_of_its_tokens_and_sends_states() -> None:
    places = [attention(number, 6, profile=PLACE, lends=True) for number in range(2)]
    order = placed(models(model(profile=TABLE), *places).orders(arrived(tokens=1_000)))
    assert [(one.first_segment, one.segments) for one in order.cache] == [(0, 3), (3, 0)]
    heads = 100 // (HEADS.head_dim * 2)
    first, last = (100 + 3 * (100 + 4 * heads) + more for more in (0, HEADS.token_layer_bytes))
    # 600 tokens at one; at the other, of the 500 others, three segments too, the last of them half.
    slower = max(1_200_000 + 10 * first, 1_000_000 + 10 * last)
    assert order.predicted.tbt_ns == 6 * MS + 1 * MS + slower


def test_a_place_that_others_keep_busy_makes_steps_longer() -> None:
    script = models(model(0, profile=TABLE), model(1, profile=TABLE), attention(0, 400, profile=PLACE))
    alone = placed(script.orders(arrived("r1", tokens=10_000, max_tokens=1)))
    second = placed(script.orders(arrived("r2", tokens=10_000, max_tokens=1)))
    assert (alone.worker_id, second.worker_id) == ("d0", "d1")
    assert alone.predicted.tbt_ns < 2 * 10_001 * 2_000 <= second.predicted.tbt_ns


@pytest.mark.parametrize("place", [CostProfile(), PROFILE])
def test_a_place_that_was_not_measured_leaves_the_learned_step(place: CostProfile) -> None:
    order = placed(
        models(model(profile=TABLE), attention(0, 40, profile=place)).orders(arrived(tokens=1_000))
    )
    assert order.predicted.tbt_ns == 12_100_000


def test_steps_elsewhere_are_corrected_by_what_they_take_and_their_profile_stays() -> None:
    script = models(model(profile=TABLE), attention(0, 400, profile=PLACE))
    order = placed(script.orders(arrived(tokens=1_000)))
    script(prefilled(order.order_id))
    script(started(order))
    before = placed(script.orders(arrived("r2", tokens=1_000))).predicted.tbt_ns
    for _ in range(30):
        script(beat("d0", 1, 1_100, 2 * order.predicted.tbt_ns))
    worker = script.core.state.workers["d0"]
    assert 1_900 < worker.batch.elsewhere_permille <= 2_000
    assert worker.cost == TABLE
    assert Core.restore(script.core.snapshot(), checked=True).digest() == script.core.digest()
    third = placed(script.orders(arrived("r3", tokens=1_000)))
    assert third.predicted.tbt_ns > 1.8 * before


def test_the_option_decides_the_groups_where_it_is_given() -> None:
    script = models(model(profile=TABLE, decode_groups=2), attention(0, 40, profile=PLACE))
    assert placed(script.orders(arrived(tokens=1_000))).predicted.tbt_ns == 12 * MS


# --- groups -------------------------------------------------------------------------------------------------


def step(
    linear: int, attends: int, *, trip: int = 0, group: int = 0, rows: int = 8, others: int = 0
) -> StepElsewhere:
    """Times of the whole batch, in ms; `group`: of each group's products."""
    cost = CostProfile(
        linear_group_ns=group * MS,
        linear_row_ns=linear * MS // rows,
        group_rows=16,
        channel_trip_ns=trip * MS,
    )
    place = CostProfile(attention_row_ns=attends * MS // rows)
    return StepElsewhere(
        cost=cost, place=place, layers=1, rows=rows, place_rows=rows, place_tokens=0, others_ns=others * MS,
        payload_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "groups", "ms"),
    [
        (step(40, 40), 2, 40),  # t_a = t_m / (n - 1)
        (step(40, 8), 2, 40),
        (step(8, 40), 2, 40),
        (step(40, 40, trip=8), 3, 40),  # messages are hidden behind one more
        (step(40, 40, trip=200), 8, 210),  # no more than so many
        (step(0, 40, group=40), 1, 80),  # a second group's products cost what it gains
        (step(0, 40, group=8), 2, 40),
        (step(40, 8, rows=1), 1, 48),  # one row is one group
        (step(0, 8, group=8, rows=40), 3, 24),  # more rows than two groups have
        (step(40, 8, others=60), 1, 68),  # who waits for the place has nothing of more
    ],
)
def test_as_few_groups_as_make_the_step_short(found: StepElsewhere, groups: int, ms: int) -> None:
    assert (found.groups, found.ns(found.groups)) == (groups, ms * MS)
