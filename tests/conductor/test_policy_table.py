"""The table of policies is whole, and it is all that a policy needs: one planted in it is chosen by and explained."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from conductor_scripts import Script, arrived, decode, keys, prefill, stored

from halfmoon.conductor.core.explanation import Explanation
from halfmoon.conductor.core.placement.best_first import earliest_first_token
from halfmoon.conductor.core.placement.decode_candidates import shortest_step
from halfmoon.conductor.core.placement.measures import (
    FIRST_TOKEN,
    ORDERS,
    STEP,
    TRANSFER,
    Candidate,
    CandidateMeasure,
)
from halfmoon.conductor.core.placement.policies import (
    EARLIEST_TOKEN,
    EARLIEST_TOKEN_WITH_COPIES,
    POLICIES,
    SHORTEST_STEP,
    Drawn,
    FetchRule,
    InTurn,
    Least,
    PolicyRules,
)
from halfmoon.conductor.core.placement.prefix_match import match_prefix
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.replay.explain import chosen, remarks
from halfmoon.conductor.replay.reasons import decode_reasons, prefill_reasons
from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.events import PolicyChanged
from halfmoon.schemas.policy import PolicyName


def cluster(name: str, **policy: Any) -> Script:
    """Three prefill and two decode workers; p2 has more prefix than p1, p0 has none."""
    script = Script(name=name, heartbeat_ns=10**12, **policy)
    for number in range(3):
        script(prefill(number))
    for number in range(2):
        script(decode(number))
    script(stored("p1", keys(2)))
    script(stored("p2", keys(4)))
    script.core.explain_requests = explain_all
    return script


def decided(script: Script, request_id: str) -> tuple[StartPrefill, Explanation]:
    order = script.orders(arrived(request_id, 1_000, block_keys=keys(9)))[0]
    assert isinstance(order, StartPrefill)
    return order, script.core.notes[0]


def test_every_policy_is_in_the_table_with_all_that_it_needs() -> None:
    assert tuple(POLICIES) == get_args(PolicyName)
    for rules in POLICIES.values():
        assert rules.fetch in get_args(FetchRule)
        for choice in (rules.prefill, rules.decode, rules.mixed):
            assert isinstance(choice, Least | InTurn | Drawn)
            measures = choice.measures if isinstance(choice, Least) else ()
            assert bool(measures) == isinstance(choice, Least)
            assert all(measure.words for measure in measures)
            assert len({measure.words for measure in measures}) == len(measures)


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_every_choice_of_every_policy_has_its_reasons(name: PolicyName) -> None:
    script = cluster(name)
    for number in range(6):
        _, why = decided(script, f"r{number}")
        prefill_id, decode_id = chosen(why.verdict)
        assert set(prefill_reasons(why, prefill_id)) == {"p0", "p1", "p2"}
        assert set(decode_reasons(why, decode_id)) == {"d0", "d1"}
        assert all([*prefill_reasons(why, prefill_id).values(), *decode_reasons(why, decode_id).values()])


#: No policy of ours: the most cached blocks, that is the fewest to compute, then the fewest orders.
MOST_CACHED = CandidateMeasure[Candidate]("blocks to compute", lambda c: c.uncached_blocks)


def test_a_planted_policy_is_chosen_by_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PolicyRules(prefill=Least((MOST_CACHED, ORDERS)), decode=Least((STEP,)), fetch="local_only")
    monkeypatch.setitem(POLICIES, "planted", planted)
    script = cluster("planted")
    for request_id in ("r0", "r1", "r2"):
        order, why = decided(script, request_id)
        assert (order.worker_id, order.fetches, order.local_blocks) == ("p2", [], 4)
        assert prefill_reasons(why, "p2") == {
            "p0": "blocks to compute 4 more",
            "p1": "blocks to compute 2 more",
            "p2": "least blocks to compute, by 2",
        }
    monkeypatch.setitem(POLICIES, "planted", PolicyRules(prefill=InTurn(), decode=Drawn(), fetch="cheapest"))
    order, why = decided(script, "r3")
    assert (order.worker_id, [fetch.node_id for fetch in order.fetches]) == ("p0", ["n-p2"])
    assert prefill_reasons(why, "p0") == {"p0": "next after p2", "p1": "not its turn", "p2": "not its turn"}
    assert sorted(decode_reasons(why, order.decode_worker_id).values()) == ["drawn", "not drawn"]


SHORT = [
    (PolicyRules(prefill=EARLIEST_TOKEN, decode=SHORTEST_STEP, fetch="cheapest"), True, True),
    (PolicyRules(prefill=EARLIEST_TOKEN_WITH_COPIES, decode=Least((STEP,)), fetch="cheapest"), True, False),
    # What is equal to a known order of choice is one.
    (
        PolicyRules(prefill=Least((FIRST_TOKEN, TRANSFER, ORDERS)), decode=Drawn(), fetch="as_printed"),
        True,
        False,
    ),
    (PolicyRules(prefill=Least((FIRST_TOKEN,)), decode=InTurn(), fetch="cheapest"), False, False),
    # The bounds contain the price of copies, which this order of choice leaves out.
    (
        PolicyRules(prefill=EARLIEST_TOKEN, decode=SHORTEST_STEP, fetch="cheapest", copies_priced=True),
        False,
        True,
    ),
]


@pytest.mark.parametrize(("rules", "prefills", "decodes"), SHORT)
def test_the_short_cut_is_taken_only_where_its_bounds_hold(
    rules: PolicyRules, prefills: bool, decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "planted", rules)
    script = cluster("planted")
    state, request = script.core.state, arrived("r0", 1_000, block_keys=keys(9))
    match = match_prefix(state, request, script.now_ns)
    assert (earliest_first_token(state, request, match, script.now_ns) is not None) == prefills
    assert (shortest_step(state, request, match, 10) is not None) == decodes


RIVALS = [name for name, rules in POLICIES.items() if isinstance(rules.prefill, Least)]


@pytest.mark.parametrize("name", RIVALS)
def test_an_explanation_names_the_policies_that_would_have_chosen_otherwise(name: PolicyName) -> None:
    """What a rival does is seen where it takes over just before the request."""
    why = decided(_loaded(name), "r")[1]
    pairs = {}
    for rival in RIVALS:
        order = decided(_loaded(rival), "r")[0]
        pairs[rival] = order.worker_id, order.decode_worker_id
    others = {rival: pair for rival, pair in pairs.items() if pair != chosen(why.verdict)}
    assert others
    assert why.rivals == others
    told = [line.split(": taken under policy ") for line in remarks(why, None) if "taken under" in line]
    assert {name: where for where, names in told for name in names.split(", ")} == {
        rival: f"{prefill_id} and {decode_id}" for rival, (prefill_id, decode_id) in others.items()
    }


def _loaded(name: PolicyName) -> Script:
    """Under `name` from now on: p2 has most of the prefix, and six prompts wait for it."""
    script = cluster("sticky")
    script(stored("p2", keys(8)))
    for number in range(6):
        script.orders(arrived(f"before{number}", 1_000, block_keys=keys(8)))
    script(PolicyChanged(policy=msgspec.structs.replace(script.core.state.policy, name=name)))
    return script
