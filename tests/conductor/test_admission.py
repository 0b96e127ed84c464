"""Early rejection: what is refused, why, and when to come back."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from conductor_scripts import (
    MS,
    NULL_LAYOUT,
    S,
    Script,
    arrived,
    decode,
    finished,
    keys,
    pair,
    prefill,
    prefilled,
    store,
    stored,
)
from msgspec.structs import replace

from halfmoon.conductor.core.placement.capacity import capacity
from halfmoon.conductor.core.state.overload import REFUSED_MAX, Offered, learn_refused
from halfmoon.schemas.codec import decode as decode_message
from halfmoon.schemas.codec import encode
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.decisions import Prediction, RejectRequest, SetTimer, StartDecode, StartPrefill
from halfmoon.schemas.events import WorkerDraining
from halfmoon.schemas.policy import AdmissionName
from halfmoon.schemas.types import KEY_BYTES

QUIET = {"heartbeat_ns": 10**12}
#: A prompt of 1,000 tokens takes 110 ms; so do a step with 100 ms + 10 ms a sequence, and nothing else.
STEPS = CostProfile(decode_base_ns=100 * MS, decode_per_sequence_ns=10 * MS)


def verdict(script: Script, request_id: str = "r1", **fields: Any) -> str:
    """ "" when it is placed, or the reason of its refusal."""
    first = script.orders(arrived(request_id, **fields))[0]
    if isinstance(first, RejectRequest):
        return first.reason
    assert isinstance(first, StartPrefill)
    return ""


def pool(**policy: Any) -> Script:
    return Script(prefill(), decode(profile=STEPS, kv_blocks=10_000), **QUIET, **policy)


@pytest.mark.parametrize("admission", get_args(AdmissionName))
def test_with_a_pool_empty_every_admission_refuses(admission: AdmissionName) -> None:
    script = Script(admission=admission)
    assert script.orders(arrived()) == [
        RejectRequest(
            request_id="r1",
            frontend_id="f1",
            reason="no_worker",
            message="no prefill worker is there",
            ttft_slo_ns=30 * S,
            tbt_slo_ns=1 * S,
            retry_after_ns=1 * S,
        )
    ]
    script(prefill())
    assert verdict(script, "r2") == "no_worker"
    script(decode())
    assert verdict(script, "r3") == ""
    script(WorkerDraining(worker_id="d0", incarnation="i1"))
    assert verdict(script, "r4") == "no_worker"


@pytest.mark.parametrize("admission", get_args(AdmissionName))
def test_what_no_worker_can_hold_is_too_long(admission: AdmissionName) -> None:
    script = Script(
        prefill(context_tokens_max=2_000, kv_blocks=15),
        decode(context_tokens_max=2_000, kv_blocks=15),
        admission=admission,
    )
    assert verdict(script, "a", tokens=1_400, max_tokens=100) == ""
    assert verdict(script, "b", tokens=1_401, max_tokens=100) == "too_long"
    assert verdict(script, "c", tokens=1, max_tokens=2_000) == "too_long"
    script(decode(1, context_tokens_max=1_501, kv_blocks=100))
    assert verdict(script, "d", tokens=1_401, max_tokens=100) == ""
    assert verdict(script, "e", tokens=1_501, max_tokens=100) == "too_long"
    script(prefill(1, kv_blocks=100))
    assert verdict(script, "f", tokens=1_502, max_tokens=1) == "too_long"


def test_a_prefill_worker_may_take_prompts_longer_than_its_cache_as_far_as_its_pool_holds_them() -> None:
    script = Script(
        prefill(context_tokens_max=2_000, kv_blocks=15, prompt_tokens_max=1_900),
        decode(context_tokens_max=3_000, kv_blocks=100),
        pools_bound=True,
    )
    assert capacity(script.core.state) == (1_900, 3_000)
    assert verdict(script, "a", tokens=1_900) == ""
    assert verdict(script, "b", tokens=1_901) == "too_long"
    script(replace(store("p0"), slots=17))
    assert capacity(script.core.state) == (1_700, 3_000)
    assert verdict(script, "c", tokens=1_700) == ""
    assert verdict(script, "d", tokens=1_701) == "too_long"
    script(prefill(context_tokens_max=2_000, kv_blocks=15))
    assert verdict(script, "e", tokens=1_501) == "too_long"


def test_queues_are_bounded_under_every_admission() -> None:
    for admission in get_args(AdmissionName):
        script = pool(admission=admission, queued_max_per_worker=2, tbt_slo_ns=100 * S)
        assert [verdict(script, f"r{n}") for n in range(3)] == ["", "", "queue_full"]
        refused = script.orders(arrived("x"))[0]
        assert isinstance(refused, RejectRequest)
        assert refused.retry_after_ns == 110 * MS  # the first of two at 110 ms each
        script(prefill(1))
        assert verdict(script, "y") == ""


def test_a_prompt_that_would_come_too_late_is_refused_until_the_queue_has_drained() -> None:
    script = pool(ttft_slo_ns=250 * MS)
    assert [verdict(script, f"r{n}") for n in range(2)] == ["", ""]
    assert script.orders(arrived("r2")) == [
        RejectRequest(
            request_id="r2",
            frontend_id="f1",
            reason="ttft_slo",
            message="predicted time to first token 330 ms is over 250 ms",
            predicted=Prediction(queue_ns=220 * MS, prefill_ns=110 * MS, ttft_ns=330 * MS, tbt_ns=130 * MS),
            ttft_slo_ns=250 * MS,
            tbt_slo_ns=1 * S,
            retry_after_ns=80 * MS,
        )
    ]
    script.now_ns += 80 * MS
    assert verdict(script, "r3") == ""


def test_a_prompt_that_is_too_late_even_alone_is_given_no_time_to_come_back() -> None:
    script = pool(ttft_slo_ns=100 * MS)
    refused = script.orders(arrived())[0]
    assert isinstance(refused, RejectRequest)
    assert (refused.reason, refused.retry_after_ns) == ("ttft_slo", 0)


def test_a_request_is_held_to_its_own_objectives() -> None:
    script = pool()
    assert verdict(script, "a", ttft_slo_ns=100 * MS) == "ttft_slo"
    assert verdict(script, "b", tbt_slo_ns=109 * MS) == "tbt_slo"
    assert verdict(script, "c", ttft_slo_ns=110 * MS, tbt_slo_ns=110 * MS) == ""


def decode_limit(script: Script, request_id: str, **fields: Any) -> int:
    """What a step may take where the request is decoded."""
    _, then = script.orders(arrived(request_id, **fields))
    assert isinstance(then, StartDecode)
    return then.tbt_slo_ns


def test_none_queues_everything_and_late_looks_at_prefill_only() -> None:
    script = pool(admission="none", ttft_slo_ns=100 * MS, tbt_slo_ns=105 * MS)
    assert [verdict(script, f"r{n}") for n in range(20)] == [""] * 20
    assert decode_limit(script, "own", tbt_slo_ns=1) == 0  # nor does a decode worker refuse it
    script = pool(admission="late", tbt_slo_ns=105 * MS)
    assert (decode_limit(script, "own", tbt_slo_ns=1), decode_limit(script, "other")) == (1, 105 * MS)
    script = pool(admission="late", ttft_slo_ns=250 * MS, tbt_slo_ns=105 * MS)
    assert [verdict(script, f"r{n}") for n in range(4)] == ["", "", "ttft_slo", "ttft_slo"]


def test_early_feels_decode_only_when_it_has_begun() -> None:
    script = pool(admission="early", tbt_slo_ns=125 * MS)
    # Two fit a step of 125 ms. Five are taken, because none is in decode: this is the fault of this
    # admission.
    assert [verdict(script, f"r{n}") for n in range(5)] == [""] * 5
    for number in range(2):
        script(prefilled(f"{6 + number}-1", f"r{number}"), after_ns=110 * MS)
    assert verdict(script, "late") == "tbt_slo"


def test_predicted_counts_those_whose_prefill_ends_before_this_one() -> None:
    script = pool(admission="predicted", tbt_slo_ns=125 * MS)
    assert [verdict(script, f"r{n}", max_tokens=1_000) for n in range(4)] == ["", "", "tbt_slo", "tbt_slo"]


def test_predicted_forgets_those_whose_decode_will_be_over() -> None:
    script = pool(admission="predicted", tbt_slo_ns=125 * MS)
    assert verdict(script, "seen", max_tokens=100) == ""
    script(prefilled("6-1", "seen"), after_ns=110 * MS)
    script(finished("6-1", "seen", completion_tokens=10, decode_ns=150 * MS), after_ns=150 * MS)
    # Decodes of this class last 150 ms: when the third prefill ends, 330 ms from now, the first two's are
    # over at 260 and 370.
    assert [verdict(script, f"r{n}", max_tokens=100) for n in range(3)] == ["", "", ""]
    # Refused when they are to last for long.
    script = pool(admission="predicted", tbt_slo_ns=125 * MS)
    assert [verdict(script, f"r{n}", max_tokens=100) for n in range(3)] == ["", "", "tbt_slo"]


def test_a_refusal_over_decode_says_when_a_sequence_will_have_ended() -> None:
    script = pool(admission="predicted", tbt_slo_ns=115 * MS)
    assert verdict(script, "r0", max_tokens=10) == ""
    refused = script.orders(arrived("r1", max_tokens=10))[0]
    assert isinstance(refused, RejectRequest)
    # The first ends its prefill in 110 ms and then takes 10 tokens of 110 ms.
    assert (refused.reason, refused.predicted.tbt_ns, refused.retry_after_ns) == (
        "tbt_slo",
        120 * MS,
        1_210 * MS,
    )


def test_no_room_is_what_will_be_when_prefill_ends() -> None:
    small = decode(profile=STEPS, kv_blocks=12)
    for admission, expected in (
        ("none", [""] * 3),
        ("late", [""] * 3),
        ("early", [""] * 3),
        ("predicted", ["", "no_room", "no_room"]),
    ):
        script = Script(prefill(), small, admission=admission, **QUIET)
        assert [verdict(script, f"r{n}", max_tokens=100) for n in range(3)] == expected, admission
    script = Script(prefill(), small, admission="early", **QUIET)
    assert verdict(script, "r0", max_tokens=100) == ""
    script(prefilled("6-1", "r0"), after_ns=110 * MS)
    refused = script.orders(arrived("r1", max_tokens=100))[0]
    assert isinstance(refused, RejectRequest)
    assert (refused.reason, refused.retry_after_ns) == ("no_room", 100 * 110 * MS)


def test_lower_priorities_are_refused_first() -> None:
    # Limits: half, three quarters, all, one and a half times 250 ms.
    for waiting, expected in (
        (0, ["", "", "", ""]),
        (1, ["ttft_slo", "ttft_slo", "", ""]),
        (2, ["ttft_slo", "ttft_slo", "ttft_slo", ""]),
        (3, ["ttft_slo", "ttft_slo", "ttft_slo", "ttft_slo"]),
    ):
        verdicts = []
        for priority in (-1_000, -500, 0, 1_000):
            script = pool(ttft_slo_ns=250 * MS)
            for number in range(waiting):
                assert verdict(script, f"w{number}", ttft_slo_ns=10 * S) == ""
            verdicts.append(verdict(script, "x", priority=priority))
        assert verdicts == expected, waiting


@pytest.mark.parametrize(
    "admission",
    ["predicted", *(pytest.param(name, marks=pytest.mark.slow) for name in ("early", "late", "none"))],
)
def test_with_a_null_engine_all_are_admitted(admission: AdmissionName) -> None:
    null = {"layout": NULL_LAYOUT, "profile": CostProfile(), "kv_blocks": 1, "batch_max": 1}
    script = Script(prefill(**null), decode(**null), admission=admission, ttft_slo_ns=1, tbt_slo_ns=1)
    for number in range(500):
        decisions = script.orders(arrived(f"r{number}", block_keys=b""))
        assert isinstance(decisions[0], StartPrefill)
        assert decisions[0].predicted == Prediction()
        script(prefilled(decisions[0].order_id, f"r{number}", compute_ns=12_345))


def test_the_mean_over_the_pool_refuses_when_one_worker_is_far_behind() -> None:
    # A step of d1 takes 1 s with one sequence. (1,000 + 0) / 2 is over 400 ms, though d0 alone would be fine.
    script = Script(
        prefill(), decode(1, profile=CostProfile(decode_base_ns=1 * S)), admission="early", **QUIET
    )
    assert verdict(script, "a", tbt_slo_ns=2 * S) == ""
    script(prefilled("6-1", "a"), after_ns=110 * MS)
    script(decode(0, profile=STEPS))
    assert verdict(script, "b", tbt_slo_ns=400 * MS) == "tbt_slo"
    assert verdict(script, "c", tbt_slo_ns=500 * MS) == ""


def test_a_long_prompt_within_its_objectives_is_taken() -> None:
    assert verdict(pair(), "r1", tokens=90_000, max_tokens=100) == ""


def overloaded(**policy: Any) -> Script:
    """Eighty prompts of 110 ms in 80 · 50 ms, and 20 of them in the queue."""
    script = pool(ttft_slo_ns=10 * S, **policy)
    order_ids = []
    for number in range(80):
        (start, *_) = script.orders(arrived(f"w{number}"), after_ns=50 * MS)
        assert isinstance(start, StartPrefill), number
        order_ids.append((start.order_id, f"w{number}"))
        if number >= 20:
            script(prefilled(*order_ids[number - 20]))
    return script


def test_under_overload_larger_prompts_are_refused_first() -> None:
    # The mean takes 110 ms and may find 5 s queued; 20 of them wait, about 2.1 s. So 210 ms may join and 310
    # may not.
    for tokens, expected in ((1_000, ""), (2_000, ""), (3_000, "ttft_slo"), (9_000, "ttft_slo")):
        assert verdict(overloaded(), "x", tokens=tokens) == expected, tokens
    refused = overloaded().orders(arrived("x", tokens=9_000))[0]
    assert isinstance(refused, RejectRequest)
    assert refused.message.startswith("overload: a prompt that takes 910 ms may find")
    assert refused.retry_after_ns > 1 * S


def test_a_text_that_many_ask_for_is_large_for_each_until_one_is_placed() -> None:
    """A text of 910 ms finds 2.2 s queued. As a whole it may find 0.6 s, a third of it 2.1 s, a fourth 3 s."""
    script, text, other = overloaded(overload_shared=True), keys(90, seed=7), keys(90, seed=8)

    def asked(name: str, block_keys: bytes) -> str:
        return verdict(script, name, tokens=9_000, block_keys=block_keys)

    assert [asked(f"a{n}", text) for n in range(4)] == ["ttft_slo"] * 3 + [""]
    # It was placed: the next one counts as the whole, while no node has the text.
    assert asked("b", text) == "ttft_slo"
    # So do another text, and each one without a whole block.
    assert asked("c", other) == "ttft_slo"
    assert [asked(f"d{n}", b"") for n in range(4)] == ["ttft_slo"] * 4
    refused = script.orders(arrived("e", 9_000, block_keys=text))[0]
    assert isinstance(refused, RejectRequest)
    assert refused.message.startswith(
        "overload: a prompt that takes 910 ms (divided by 2 requests for its text)"
    )


@pytest.mark.parametrize(("pause_ns", "placed"), [(50 * MS, True), (80 * MS, False)])
def test_a_burst_is_over_when_none_comes_for_half_the_time_of_a_mean_prompt(
    pause_ns: int, placed: bool
) -> None:
    script, text = overloaded(overload_shared=True), keys(90, seed=7)
    for number in range(3):
        assert verdict(script, f"a{number}", tokens=9_000, block_keys=text) == "ttft_slo"
    assert 100 * MS < script.core.state.offered.prefill_ns < 160 * MS
    first = script.orders(arrived("b", 9_000, block_keys=text), after_ns=pause_ns)[0]
    assert isinstance(first, StartPrefill) == placed


def test_a_text_whose_beginning_is_there_is_named_by_the_first_block_that_is_missing() -> None:
    script, text = overloaded(overload_shared=True), keys(90, seed=7)
    script(stored("p0", text[: 10 * KEY_BYTES]))
    for number in range(4):
        own = text[: 10 * KEY_BYTES] + keys(80, seed=10 + number)
        assert verdict(script, f"a{number}", tokens=9_000, block_keys=own) == "ttft_slo"
    assert verdict(script, "b", tokens=9_000, block_keys=own) == "ttft_slo"
    assert verdict(script, "c", tokens=9_000, block_keys=own) == ""


def test_in_older_logs_each_request_counts_as_its_whole_text() -> None:
    script = overloaded()
    assert [verdict(script, f"a{n}", tokens=9_000) for n in range(6)] == ["ttft_slo"] * 6
    assert not script.core.state.offered.refused


def test_the_counts_of_refused_texts_are_bounded_the_oldest_go_first() -> None:
    offered = Offered()
    for number in [*range(REFUSED_MAX), 0, REFUSED_MAX]:
        learn_refused(offered, number.to_bytes(KEY_BYTES), 0, refused=True)
    assert len(offered.refused) == REFUSED_MAX
    assert [int.from_bytes(key) for key in offered.refused][:1] == [2]
    assert [int.from_bytes(key) for key in offered.refused][-2:] == [0, REFUSED_MAX]


def test_larger_prompts_wait_with_the_rest_where_the_pool_keeps_up() -> None:
    assert verdict(overloaded(name="mooncake"), "x", tokens=9_000) == ""
    script = pool(ttft_slo_ns=10 * S)
    for number in range(80):  # as many at the same time, now and then
        pause_ns = 60 * S if number % 20 == 0 else 0
        (start, *_) = script.orders(arrived(f"w{number}"), after_ns=pause_ns)
        assert isinstance(start, StartPrefill)
        if number < 60:
            script(prefilled(start.order_id, f"w{number}"))
    assert verdict(script, "x", tokens=9_000) == ""


def test_a_decode_that_outlasts_its_class_still_counts() -> None:
    """Answers took 1 s so far. One more runs for 10 s already: it is not taken for ended."""
    script = Script(prefill(), decode(profile=STEPS), **QUIET)
    for request_id in ("a", "b"):
        (start, *_) = script.orders(arrived(request_id))
        assert isinstance(start, StartPrefill)
        script(prefilled(start.order_id, request_id), after_ns=110 * MS)
        if request_id == "a":
            script(finished(start.order_id, "a"), after_ns=1 * S)
    # Alone a step takes 110 ms, with b 120 ms.
    script(prefilled("77-1", "nobody"), after_ns=10 * S)
    assert verdict(script, "c", tbt_slo_ns=115 * MS) == "tbt_slo"
    assert verdict(script, "d", tbt_slo_ns=125 * MS) == ""


def test_a_worker_may_announce_any_cost() -> None:
    """Whatever stops one conductor stops them all, each time that they read the log."""
    endless = CostProfile(prefill_base_ns=2**63 - 1, prefill_per_token_ps=2**63 - 1)
    script = Script(prefill(profile=endless), decode(), **QUIET)
    assert verdict(script) == "ttft_slo"
    script(prefill(1))
    assert verdict(script, "r2") == ""


def test_a_policy_may_wait_for_any_time() -> None:
    script = pair(heartbeat_ns=10**9, lost_after_ns=2**63 - 1, unplaced_ns_max=2**63 - 1)
    timers = [decision for decision in script(prefill(2)) if isinstance(decision, SetTimer)]
    assert [decode_message(encode(timer), SetTimer) for timer in timers] == timers
