"""Mixed workers under every policy: which one it takes, its short cut, and the reasons that an explanation gives."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from conductor_scripts import MS, S, Script, arrived, decode, keys, prefill, prefilled, stored, worker

from halfmoon.conductor.core.placement.measures import (
    MIXED_FIRST_TOKEN,
    Candidate,
    CandidateMeasure,
    of_prompt,
)
from halfmoon.conductor.core.placement.policies import (
    EARLIEST_TOKEN_MIXED,
    POLICIES,
    SHORTEST_STEP,
    Least,
    PolicyRules,
)
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.plugins import Plugin, install
from halfmoon.conductor.replay.explain import remarks
from halfmoon.conductor.replay.reasons import mixed_reasons
from halfmoon.schemas.decisions import RejectRequest, StartMixed
from halfmoon.schemas.events import FrontendJoined, WorkerJoined
from halfmoon.schemas.policy import PolicyName


def mixed(number: int, **fields: Any) -> WorkerJoined:
    return worker(f"m{number}", "mixed", **{"token_budget": 10_000, **fields})


def fleet(name: PolicyName, count: int = 3, **policy: Any) -> Script:
    # Over such a link nothing is worth a fetch.
    link = {"link_bytes_s": 1_000}
    fields = {"mixed_by_policy": True, "admission": "none", "heartbeat_ns": 10**12, **link, **policy}
    script = Script(FrontendJoined(frontend_id="f1", incarnation="i1"), name=name, **fields)
    for number in range(count):
        script(mixed(number))
    script.core.explain_requests = explain_all
    return script


def taken(script: Script, request_id: str, **fields: Any) -> StartMixed:
    (order,) = script.orders(arrived(request_id, **fields))
    assert isinstance(order, StartMixed), order
    return order


def answering(script: Script, worker_id: str, count: int) -> None:
    """So many requests write their answers at the worker, with nothing in common."""
    others = [one for one in script.core.state.workers if one != worker_id]
    for number in range(count):
        request_id = f"{worker_id}-{number}"
        # Nobody else has blocks of this prompt, and the others' queues are long.
        script(stored(worker_id, keys(10, seed=1_000 + number)))
        order = taken(script, request_id, tokens=1_000, block_keys=keys(10, seed=1_000 + number))
        assert order.worker_id == worker_id, (order.worker_id, others)
        script(prefilled(order.order_id, request_id, worker_id), after_ns=20 * MS)


def test_no_answer_waits_long_for_a_prompt_that_another_worker_would_compute_as_soon() -> None:
    """m0 has half of the prompt and five answers to write; m1 has nothing."""
    for name, where in (
        ("halfmoon", "m1"),
        ("local_cache_aware", "m1"),
        ("mooncake", "m0"),
        ("sticky", "m0"),
    ):
        script = fleet("sticky", 2)
        answering(script, "m0", 5)
        script(stored("m0", keys(5)))
        # 100 ms or 60 ms of its own, and five wait for as long: 60 + 300 against 110.
        request = arrived("r", tokens=1_000, block_keys=keys(10))
        script.core.state.policy = fleet(name).core.state.policy
        (order,) = script.orders(request)
        assert isinstance(order, StartMixed)
        assert order.worker_id == where, name


def test_an_older_log_keeps_no_turn_of_mixed_workers() -> None:
    script = fleet("round_robin", mixed_by_policy=False)
    taken(script, "r")
    assert script.core.state.round_robin == {}


def test_an_older_logs_mixed_worker_is_that_of_the_first_token_whatever_the_policy() -> None:
    for name in get_args(PolicyName):
        script = fleet("sticky", 2)
        answering(script, "m0", 5)
        script(stored("m0", keys(5)))
        script.core.state.policy = fleet(name, mixed_by_policy=False).core.state.policy
        assert taken(script, "r", tokens=1_000, block_keys=keys(10)).worker_id == "m0"


def test_policies_that_take_turns_and_draw_do_so_among_mixed_workers() -> None:
    script = fleet("round_robin")
    turns = [taken(script, f"r{number}", block_keys=b"").worker_id for number in range(5)]
    assert turns == ["m0", "m1", "m2", "m0", "m1"]
    drawn = [
        [taken(script, f"s{number}", block_keys=b"").worker_id for number in range(12)]
        for script in (fleet("random", seed=1), fleet("random", seed=1), fleet("random", seed=2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {"m0", "m1", "m2"}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        # By blocks to compute, and those in hand: m0 lacks 8 and has 30 reserved; m1 lacks 10.
        ("dynamo", "m1"),
        # Eight blocks times four prompts, against ten times one.
        ("lmetric", "m1"),
        # It has two blocks, and the queue counts only between equals.
        ("sticky", "m0"),
        # None of them has a queue; orders decide.
        ("least_loaded", "m1"),
    ],
)
def test_each_policy_weighs_a_mixed_worker_by_its_own_measures(name: PolicyName, where: str) -> None:
    script = fleet("sticky", 2)
    answering(script, "m0", 3)
    script(stored("m0", keys(2)))
    script.core.state.policy = fleet(name).core.state.policy
    assert taken(script, "r", tokens=1_000, block_keys=keys(10)).worker_id == where


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_every_choice_of_a_mixed_worker_has_its_reasons(name: PolicyName) -> None:
    script = fleet(name)
    script(stored("m2", keys(4)))
    for number in range(6):
        order = taken(script, f"r{number}")
        (why,) = script.core.notes
        reasons = mixed_reasons(why, order.worker_id)
        assert set(reasons) == {"m0", "m1", "m2"}
        told = remarks(why, None)
        for place, worker_id in enumerate(("m0", "m1", "m2")):
            assert reasons[worker_id]
            assert told[place].endswith(f"; {reasons[worker_id]}")


def test_an_explanation_names_the_measure_and_the_policies_that_would_have_taken_another() -> None:
    script = fleet("sticky", 2)
    answering(script, "m0", 5)
    script(stored("m0", keys(5)))
    script.core.state.policy = fleet("halfmoon").core.state.policy
    assert taken(script, "r").worker_id == "m1"
    (why,) = script.core.notes
    told = remarks(why, None)
    # 110 ms at m1. At m0 60 ms, a step of five with 5 * 1,100 tokens, and 5 * 60 ms of others.
    assert told[0].endswith("; first token + copies + waits of others 270.5 ms more")
    assert told[1].endswith("; least first token + copies + waits of others, by 270.5 ms")
    assert "m0: taken under policy mooncake, sticky" in told
    assert set(why.rivals) == {"mooncake", "sticky"}


def test_a_refusal_names_what_is_over_the_limit_at_each_mixed_worker() -> None:
    script = fleet("halfmoon", 2, admission="early", ttft_slo_ns=50 * MS)
    script(arrived("r"))
    (why,) = script.core.notes
    over = "60.0 ms over the limit of 50.0 ms"
    assert mixed_reasons(why, "") == {"m0": over, "m1": over}


def test_no_request_is_refused_that_another_mixed_worker_serves_in_time() -> None:
    """At m1 nobody would wait, but its own first token would be late: 110 ms. At m0 it takes 20 ms and a step."""
    script = fleet("sticky", 2)
    answering(script, "m0", 5)
    script(stored("m0", keys(9)))
    slos = {"admission": "early", "ttft_slo_ns": 60 * MS, "tbt_slo_ns": 10 * S}
    script.core.state.policy = fleet("halfmoon", **slos).core.state.policy
    assert taken(script, "r").worker_id == "m0"
    (why,) = script.core.notes
    reasons = mixed_reasons(why, "m0")
    assert reasons["m0"].endswith("; where it would delay others least, it would be refused")
    assert reasons["m0"].startswith("least first token + copies, by ")
    # Nobody is in time: the prediction told is the earliest there is.
    slos["ttft_slo_ns"] = 30 * MS
    script.core.state.policy = fleet("halfmoon", **slos).core.state.policy
    (refused,) = script(arrived("s", block_keys=keys(10)))
    assert isinstance(refused, RejectRequest)
    assert refused.predicted is not None
    assert refused.predicted.ttft_ns < 110 * MS


def test_a_pair_that_is_better_leaves_the_mixed_worker_with_a_reason() -> None:
    script = fleet("halfmoon", 1)
    script(prefill())
    script(decode())
    taken(script, "r1")
    script(arrived("r2"))
    (why,) = script.core.notes
    assert mixed_reasons(why, "p0") == {"m0": "a pair does it"}


def test_a_policy_of_another_package_may_choose_among_mixed_workers() -> None:
    most = CandidateMeasure[Candidate]("cached", lambda c: -c.local_blocks)
    broken = CandidateMeasure[Candidate]("broken", lambda c: 1 // 0)
    before = dict(POLICIES)
    try:
        for version, rule in (("1", Least((of_prompt(most),))), ("2", Least((of_prompt(broken),)))):
            rules = PolicyRules(prefill=Least((most,)), decode=SHORTEST_STEP, mixed=rule, fetch="local_only")
            install(Plugin(name="cached", version=version, rules=rules))
        plain = PolicyRules(prefill=Least((most,)), decode=SHORTEST_STEP, fetch="local_only")
        install(Plugin(name="plain", version="1", rules=plain))
        # Without a rule of its own: the short cut of the first token serves it.
        assert POLICIES["plain@1"].mixed == EARLIEST_TOKEN_MIXED == Least(EARLIEST_TOKEN_MIXED.measures)
        assert MIXED_FIRST_TOKEN in EARLIEST_TOKEN_MIXED.measures
        for version, where in (("1", "m2"), ("2", "m0")):
            script = fleet(f"cached@{version}")  # type: ignore[arg-type]
            script(stored("m2", keys(4)))
            assert taken(script, "r").worker_id == where
        with pytest.raises(ValueError, match="something else than measures"):
            install(
                Plugin(
                    name="cached",
                    version="3",
                    rules=PolicyRules(
                        prefill=Least((most,)), decode=SHORTEST_STEP, mixed=3, fetch="local_only"
                    ),  # type: ignore[arg-type]
                )
            )
    finally:
        POLICIES.clear()
        POLICIES.update(before)
