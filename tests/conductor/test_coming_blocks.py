"""Blocks that a worker is to compute for a prompt before this one count as held there."""

from __future__ import annotations

import pytest
from conductor_scripts import MS, Script, arrived, decode, keys, prefill, prefilled, worker

from halfmoon.schemas.decisions import StartMixed, StartPrefill
from halfmoon.schemas.events import PolicyChanged, RequestArrived, RequestCancelled
from halfmoon.schemas.policy import Policy, PolicyName
from halfmoon.schemas.types import KEY_BYTES

#: 1,000 tokens take 110 ms. The last block is computed whatever is there.
TEXT = keys(10)


def cluster(*, coming: bool = True, name: PolicyName = "halfmoon") -> Script:
    return Script(prefill(0), prefill(1), decode(), name=name, admission="none", coming_blocks=coming)


def alike(request_id: str, tokens: int = 1_000) -> RequestArrived:
    """The same text, and what comes after it in this one."""
    rest = keys((tokens - 1_000) // 100, seed=sum(request_id.encode()))
    return arrived(request_id, tokens, block_keys=TEXT + rest)


def placed(script: Script, event: RequestArrived) -> StartPrefill:
    """Its order; 50 ms pass before it comes, and p0 has computed that much of the first one."""
    (order,) = [one for one in script.orders(event, 50 * MS) if isinstance(one, StartPrefill)]
    return order


def test_a_prompt_goes_where_its_beginning_is_being_computed() -> None:
    script = cluster()
    first = placed(script, alike("a"))
    order = placed(script, alike("b"))
    assert order.worker_id == first.worker_id == "p0"
    # It waits 60 ms and computes one block of ten; on p1 it would take 110 ms.
    predicted = order.predicted
    assert (order.local_blocks, predicted.queue_ns, predicted.prefill_ns) == (9, 60 * MS, 20 * MS)


def test_the_wait_must_be_shorter_than_computing_it_elsewhere() -> None:
    script = cluster()
    placed(script, alike("a"))
    # Two blocks of ten are coming there, 60 ms from now.
    order = placed(script, arrived("b", block_keys=TEXT[: 2 * KEY_BYTES] + keys(8, seed=7)))
    assert (order.worker_id, order.local_blocks) == ("p1", 0)


@pytest.mark.parametrize(("coming", "name"), [(False, "halfmoon"), (True, "mooncake")])
def test_in_older_logs_and_under_other_policies_only_what_is_readable_counts(
    coming: bool, name: PolicyName
) -> None:
    script = cluster(coming=coming, name=name)
    placed(script, alike("a"))
    order = placed(script, alike("b"))
    assert (order.worker_id, order.local_blocks) == ("p1", 0)


def test_what_is_computed_or_cancelled_is_not_coming() -> None:
    script = cluster()
    order = placed(script, alike("a"))
    script(prefilled(order.order_id, "a"))
    assert placed(script, alike("b")).local_blocks == 0  # its blocks were not announced
    script(RequestCancelled(request_id="b"))
    assert placed(script, alike("c")).local_blocks == 0


def test_a_policy_that_counts_them_begins_with_the_prompts_in_hand() -> None:
    script = cluster(coming=False)
    placed(script, alike("a"))
    script(PolicyChanged(policy=Policy(admission="none", coming_blocks=True)))
    assert placed(script, alike("b")).local_blocks == 9


@pytest.mark.parametrize("tokens", [(1_000, 3_000), (3_000, 1_000)])
def test_the_longest_of_several_counts(tokens: tuple[int, int]) -> None:
    script = Script(prefill(), decode(), admission="none", coming_blocks=True)
    first, second = (alike(f"{count}", count) for count in tokens)
    for event in (first, second):
        placed(script, event)
    longest = max(first.block_keys, second.block_keys, key=len)
    assert placed(script, arrived("c", 3_000, block_keys=longest)).local_blocks == 29


def test_what_ended_under_another_policy_is_not_coming_under_this_one() -> None:
    script = cluster()
    order = placed(script, alike("a"))
    script(PolicyChanged(policy=Policy(admission="none")))
    script(prefilled(order.order_id, "a"))
    script(PolicyChanged(policy=Policy(admission="none", coming_blocks=True)))
    assert placed(script, alike("b")).local_blocks == 0


@pytest.mark.parametrize(("waits", "expected"), [(True, ("m0", 9)), (False, ("m1", 0))])
@pytest.mark.parametrize("by_policy", [True, False])
def test_a_mixed_worker_will_have_what_prompts_before_it_there_compute(
    waits: bool, expected: tuple[str, int], by_policy: bool
) -> None:
    fleet = [worker(f"m{number}", "mixed", token_budget=216) for number in range(2)]
    rules = {"coming_blocks": True, "coming_at_mixed": waits, "mixed_by_policy": by_policy}
    script = Script(*fleet, admission="none", **rules)
    (first,) = script.orders(alike("a"))
    assert isinstance(first, StartMixed)
    (second,) = script.orders(alike("b"), 50 * MS)
    assert isinstance(second, StartMixed)
    assert (second.worker_id, second.local_blocks) == expected
    # What is computed there and was not announced is not coming any more.
    script(prefilled(first.order_id, "a", "m0"))
    script(RequestCancelled(request_id="b"))
    (third,) = script.orders(alike("c"))
    assert isinstance(third, StartMixed)
    assert third.local_blocks == 0
