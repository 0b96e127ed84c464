"""Predictions follow what was seen: the middle of the last measurements, by neighbours, and what is queued with it."""

from __future__ import annotations

import pytest
from conductor_scripts import MS, Script, arrived, decode, finished, prefill, prefilled
from msgspec.structs import replace

from halfmoon.conductor.core.corrections import typical_cost
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.correction import (
    EXACT_PERMILLE,
    SeenPrefill,
    middle_permille,
    nearest_permille,
    prefills_permille,
    scaled,
)
from halfmoon.conductor.core.state.load_index import queue_ns
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Prediction, StartPrefill
from halfmoon.schemas.events import PolicyChanged, StoreJoined, WorkerHeartbeat
from halfmoon.schemas.types import INT_MAX

#: A prompt of 1,000 tokens takes 110 ms, a step 20 ms and 1 ms a sequence.
COST = CostProfile(
    prefill_base_ns=10 * MS,
    prefill_per_token_ps=100_000_000,
    decode_base_ns=20 * MS,
    decode_per_sequence_ns=1 * MS,
)
#: No process is missed, however far the clock goes.
QUIET = {"heartbeat_ns": 10**12}


def test_the_middle_of_few_measurements_counts_what_was_thought_before() -> None:
    assert middle_permille([], 1_000) == 1_000
    assert middle_permille([3_000], 1_000) == 2_000
    assert middle_permille([3_000, 3_100], 1_000) == 3_000
    assert middle_permille([900, 1_100, 1_000], 5_000) == 1_000


def test_one_stalled_measurement_moves_nothing_and_two_in_a_row_tell_of_another_speed() -> None:
    steady = [990, 1_010, 1_000, 980, 1_020, 1_005]
    assert middle_permille([*steady, 9_000], 1_000) == 1_005
    assert middle_permille([*steady, 9_000, 1_000], 1_000) == 1_002
    assert middle_permille([*steady, 2_000, 2_200], 1_000) == 2_100
    assert middle_permille([*steady, 500, 520], 1_000) == 510
    assert middle_permille([*steady, 2_000, 500], 1_000) == 1_002


def test_where_little_was_measured_the_nearest_class_counts() -> None:
    ratios = {0: [1_000] * 3, 2: [2_000] * 5}
    assert [nearest_permille(ratios, wanted) for wanted in (0, 1, 2, 3)] == [1_000, 1_000, 2_000, 2_000]
    assert nearest_permille({**ratios, 3: [4_000]}, 3) == 3_000


def test_a_measurement_is_compared_with_what_is_fitted_now() -> None:
    seen = {0: [SeenPrefill(1_000, 0, 220 * MS)] * 3}
    assert prefills_permille(seen, COST)[0] == 2_000
    assert prefills_permille(seen, scaled(COST, 2_000, EXACT_PERMILLE))[0] == 1_000


def test_a_scaled_cost_is_a_number_that_a_message_can_carry() -> None:
    absurd = replace(COST, prefill_base_ns=INT_MAX, decode_base_ns=INT_MAX)
    found = scaled(absurd, 20_000, 20_000)
    assert (found.prefill_base_ns, found.decode_base_ns) == (INT_MAX, INT_MAX)


# --- in the core --------------------------------------------------------------------------------------------


def cluster(window: int = 5, *, one_host: bool = False) -> Script:
    script = Script(prefill(profile=COST), decode(profile=COST), correction_window=window, **QUIET)
    for stamped in list(script.log):
        if isinstance(stamped.event, StoreJoined):
            script(replace(stamped.event, host="host" if one_host else f"of {stamped.event.node_id}"))
    return script


def place(script: Script, request_id: str) -> StartPrefill:
    return next(d for d in script(arrived(request_id)) if isinstance(d, StartPrefill))


def serve(script: Script, request_id: str, took_ns: int, *, tbt_ns: int = 0, step_ns: int = 0) -> Prediction:
    """A request of 1,000 tokens alone, whose prefill takes so long; its prediction."""
    order = place(script, request_id)
    script(prefilled(order.order_id, request_id, compute_ns=took_ns, prompt_tokens=1_000), took_ns)
    if step_ns:
        script(
            WorkerHeartbeat(
                worker_id="d0",
                incarnation="i1",
                steps=9,
                step_ns=step_ns,
                step_sequences=1,
                step_context_tokens=1_100,
            ),
            1 * MS,
        )
    script(finished(order.order_id, request_id, tbt_ns=tbt_ns, decode_ns=99 * (step_ns or 1)), 1 * MS)
    return order.predicted


@pytest.mark.parametrize("times", [0.5, 2.0, 3.0])
def test_prefills_are_predicted_as_the_last_ones_went(times: float) -> None:
    script, took_ns = cluster(), int(110 * MS * times)
    first = serve(script, "r0", took_ns)
    assert first.ttft_ns == 110 * MS
    for number in range(1, 4):
        serve(script, f"r{number}", took_ns)
    assert serve(script, "r4", took_ns).ttft_ns == pytest.approx(took_ns, rel=0.02)
    # One stalled machine changes nothing.
    serve(script, "r5", 20 * took_ns)
    assert serve(script, "r6", took_ns).ttft_ns == pytest.approx(took_ns, rel=0.1)


def test_without_a_window_predictions_are_the_fit_s_alone_and_nothing_is_kept() -> None:
    script = cluster(window=0)
    for number in range(5):
        serve(script, f"r{number}", 330 * MS, tbt_ns=60 * MS, step_ns=21 * MS)
    for worker in script.core.state.workers.values():
        assert worker.learning.fitted is None, worker
        assert worker.prompts is None or not worker.prompts.seen, worker
        assert worker.batch is None or not (worker.batch.steps_seen or worker.batch.answers_seen), worker


def test_what_is_queued_is_priced_anew_when_prefills_go_slower() -> None:
    script = cluster()
    for number in range(3):
        serve(script, f"r{number}", 110 * MS)
    orders = [place(script, f"q{number}") for number in range(6)]
    assert orders[-1].predicted.queue_ns == 5 * 110 * MS
    for number in range(3):
        request_id = f"q{number}"
        script(
            prefilled(orders[number].order_id, request_id, compute_ns=330 * MS, prompt_tokens=1_000), 330 * MS
        )
    worker = script.core.state.workers["p0"]
    assert queue_ns(worker, script.now_ns) == pytest.approx(3 * 330 * MS, rel=0.02)
    ends = [script.core.state.orders[order.order_id].prefill.end_ns for order in orders[3:]]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(script.now_ns + 3 * 330 * MS, abs=20 * MS)


def test_an_operator_may_switch_corrections_on_and_off_while_prompts_are_queued() -> None:
    script = cluster(window=0)
    orders = [place(script, f"q{number}") for number in range(4)]
    policy = script.core.state.policy
    script(PolicyChanged(policy=replace(policy, correction_window=5)))
    worker = script.core.state.workers["p0"]
    script(prefilled(orders[0].order_id, "q0", compute_ns=110 * MS, prompt_tokens=1_000), 110 * MS)
    assert queue_ns(worker, script.now_ns) == 3 * 110 * MS
    orders += [place(script, f"r{number}") for number in range(4)]
    for order in orders[1:-1]:
        script(
            prefilled(order.order_id, order.request_id, compute_ns=330 * MS, prompt_tokens=1_000), 330 * MS
        )
    assert worker.learning.fitted is not None
    script(PolicyChanged(policy=replace(policy, correction_window=0)))
    script(
        prefilled(orders[-1].order_id, orders[-1].request_id, compute_ns=330 * MS, prompt_tokens=1_000),
        330 * MS,
    )
    assert worker.learning.fitted is None


def test_a_prefill_beside_a_busy_neighbour_has_a_correction_of_its_own() -> None:
    script = cluster(one_host=True)
    for number in range(4):
        serve(script, f"alone{number}", 110 * MS)
    for number in range(4):  # one that decodes goes on meanwhile
        first = place(script, f"a{number}")
        script(prefilled(first.order_id, f"a{number}", compute_ns=110 * MS, prompt_tokens=1_000), 110 * MS)
        serve(script, f"b{number}", 220 * MS)
        script(finished(first.order_id, f"a{number}"))
    assert serve(script, "alone", 110 * MS).ttft_ns == pytest.approx(110 * MS, rel=0.05)
    typical = typical_cost(script.core.state.workers["p0"])
    assert typical.prefill_ns(1_000, 0) == pytest.approx(165 * MS, rel=0.05), "on the whole it is in between"
    first = place(script, "a")
    script(prefilled(first.order_id, "a", compute_ns=110 * MS, prompt_tokens=1_000), 110 * MS)
    assert place(script, "b").predicted.ttft_ns == pytest.approx(220 * MS, rel=0.05)
    # Behind it another: the one before will be decoding by then.
    assert place(script, "c").predicted.prefill_ns == pytest.approx(220 * MS, rel=0.05)


def test_hosts_apart_are_no_neighbours() -> None:
    script = cluster()
    first = place(script, "a")
    script(prefilled(first.order_id, "a", compute_ns=110 * MS, prompt_tokens=1_000), 110 * MS)
    place(script, "b")
    workers = script.core.state.workers.values()
    assert [one.prompts.neighbours for one in workers if one.prompts is not None] == [0]


def test_the_time_between_tokens_is_that_of_the_longest_intervals() -> None:
    script = cluster()
    assert serve(script, "r0", 110 * MS, tbt_ns=63 * MS, step_ns=42 * MS).tbt_ns == 21 * MS
    for number in range(1, 5):
        serve(script, f"r{number}", 110 * MS, tbt_ns=63 * MS, step_ns=42 * MS)
    assert place(script, "r5").predicted.tbt_ns == pytest.approx(63 * MS, rel=0.05)


def test_the_time_between_tokens_is_that_of_the_batch_that_will_be() -> None:
    script = cluster()
    for number in range(4):  # answers are over after 42 ms; a prompt takes 110 ms
        serve(script, f"r{number}", 110 * MS, step_ns=21 * MS, tbt_ns=21 * MS)
    script.core.state.answers.clear()
    for number in range(4):
        serve(script, f"s{number}", 110 * MS, step_ns=21 * MS, tbt_ns=21 * MS)
    for answers in script.core.state.answers.values():
        answers.decode_ns = 42 * MS
    orders = [place(script, f"q{number}") for number in range(8)]
    # Of the eight that are reserved, those before the last will have ended.
    assert orders[-1].predicted.tbt_ns == pytest.approx(21 * MS, rel=0.1)


def test_an_explanation_tells_the_corrections() -> None:
    script = cluster()
    assert script.core.explain(arrived("r"), script.now_ns).corrections == {}
    for number in range(20):  # slower from the fifteenth on
        times = 1 + number // 15
        serve(script, f"r{number}", 110 * MS * times, tbt_ns=21 * MS, step_ns=21 * MS * times)
    why = script.core.explain(arrived("r"), script.now_ns)
    worker = script.core.state.workers["p0"]
    assert why.corrections["p0"] == ("prefill", worker.prompts.permille[0], 0)
    assert why.corrections["p0"][1] > 1_500
    assert why.corrections["d0"][:1] == ("decode",)
    assert why.prefill[0].prefill_ns == pytest.approx(220 * MS, rel=0.05)


def test_a_correction_goes_on_from_a_snapshot_and_after_its_worker_joined_again() -> None:
    script = cluster()
    for number in range(4):
        serve(script, f"r{number}", 330 * MS, tbt_ns=63 * MS, step_ns=42 * MS)
    script(prefill(profile=COST))
    script(decode(profile=COST))
    copy = Core.restore(script.core.snapshot(), checked=True)
    assert copy.digest() == script.core.digest()
    assert place(script, "r9").predicted.ttft_ns == pytest.approx(330 * MS, rel=0.02)
