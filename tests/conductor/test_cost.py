"""The cost model: its formulas, what it learns, and that nonsense does not spoil it."""

from __future__ import annotations

import random

import pytest
from conductor_scripts import MS, PROFILE, S

from halfmoon.conductor.core.state.cost import (
    Answers,
    Link,
    decode_fit,
    expected_decode_ns,
    expected_tokens,
    learn_answer,
    measured_link,
    prefill_fit,
    refit_decode,
    refit_prefill,
    transfer_ns,
)
from halfmoon.schemas.cost_profile import CostProfile

TRUE = CostProfile(
    prefill_base_ns=29 * MS,
    prefill_per_token_ps=392_000_000,
    prefill_per_token2_fs=146_000_000,
    decode_base_ns=37_500_000,
    decode_per_sequence_ns=340_000,
    decode_per_context_token_ps=6_200_000,
)


def test_a_prediction_is_the_formula_in_whole_nanoseconds() -> None:
    assert TRUE.prefill_ns(1_000, 0) == 29 * MS + 392 * MS + 146 * MS
    assert TRUE.prefill_ns(1_000, 600) == 29 * MS + 392 * MS * 400 // 1_000 + 146 * (1_000_000 - 360_000)
    assert TRUE.step_ns(4, 1_000) == 37_500_000 + 4 * 340_000 + 6_200_000
    assert CostProfile().prefill_ns(10_000, 0) == CostProfile().step_ns(10, 10_000) == 0


def test_a_transfer_is_latency_and_bytes_over_its_share_of_the_bandwidth() -> None:
    assert transfer_ns(1_000_000, 1_000_000_000, 1, 7) == 1 * MS + 7
    assert transfer_ns(1_000_000, 1_000_000_000, 3, 7) == 3 * MS + 7


@pytest.mark.parametrize("joined", [CostProfile(), PROFILE, TRUE], ids=["nothing", "wrong", "right"])
def test_measurements_lead_to_the_true_costs_from_any_profile(joined: CostProfile) -> None:
    draw = random.Random(1)
    cost, fit = joined, prefill_fit(joined)
    for _ in range(300):
        tokens = draw.randrange(10, 8_000)
        cached = draw.choice([0, tokens // 2])
        seen = int(TRUE.prefill_ns(tokens, cached) * draw.uniform(0.93, 1.07))
        cost = refit_prefill(fit, cost, tokens, cached, seen)
    for tokens, cached in ((100, 0), (1_000, 0), (4_000, 3_000), (8_000, 0)):
        assert cost.prefill_ns(tokens, cached) == pytest.approx(TRUE.prefill_ns(tokens, cached), rel=0.12)
    step, fit = joined, decode_fit(joined)
    for _ in range(300):
        batch = draw.randrange(1, 64)
        context = batch * draw.randrange(10, 4_000)
        seen = int(TRUE.step_ns(batch, context) * draw.uniform(0.93, 1.07))
        step = refit_decode(fit, step, batch, context, seen)
    for batch, context in ((1, 100), (8, 8_000), (64, 100_000)):
        assert step.step_ns(batch, context) == pytest.approx(TRUE.step_ns(batch, context), rel=0.15)


def test_nonsense_keeps_coefficients_finite_and_not_negative() -> None:
    draw = random.Random(2)
    cost, fit = TRUE, prefill_fit(TRUE)
    for _ in range(2_000):
        tokens = draw.choice([1, 1, 5_000, 2**31 - 1])
        seen = draw.choice([0, 1, 10**6, 10**9, 2**63 - 1])
        cost = refit_prefill(fit, cost, tokens, draw.choice([0, tokens - 1]), seen)
        values = [cost.prefill_base_ns, cost.prefill_per_token_ps, cost.prefill_per_token2_fs]
        assert all(0 <= value <= 2**53 for value in values), values


def test_a_worker_that_takes_the_same_time_for_everything_is_learned_too() -> None:
    draw = random.Random(3)
    cost, fit = TRUE, prefill_fit(TRUE)
    for _ in range(500):
        cost = refit_prefill(fit, cost, draw.randrange(10, 8_000), 0, 50 * MS)
    for tokens in (100, 2_000, 8_000):
        assert cost.prefill_ns(tokens, 0) == pytest.approx(50 * MS, rel=0.15)


def test_one_stalled_measurement_counts_as_a_bounded_one() -> None:
    fit = prefill_fit(TRUE)
    stalled = refit_prefill(fit, TRUE, 1_000, 0, 3_600 * S)
    assert stalled.prefill_ns(1_000, 0) < 4 * TRUE.prefill_ns(1_000, 0)


def test_a_bandwidth_is_a_moving_average_and_grows_stale() -> None:
    link = measured_link(None, 1_000_000, 1 * MS, 1, 5 * S)
    assert link == Link(bytes_s=1_000_000_000, measured_ns=5 * S)
    assert measured_link(link, 1_000_000, 2 * MS, 1, 6 * S) == Link(bytes_s=850_000_000, measured_ns=6 * S)
    assert measured_link(link, 1_000_000, 2 * MS, 2, 6 * S) == Link(bytes_s=1_000_000_000, measured_ns=6 * S)
    assert measured_link(link, 1_000_000, 2 * MS, 1, 600 * S) == Link(
        bytes_s=500_000_000, measured_ns=600 * S
    )
    assert measured_link(link, 0, 0, 1, 6 * S) is link


def test_answers_are_expected_as_long_as_those_before() -> None:
    answers = Answers()
    assert (expected_tokens(None, 100), expected_tokens(answers, 1_000)) == (100, 256)
    learn_answer(answers, 10, 1 * S)
    learn_answer(answers, 21, 3 * S)
    assert (expected_tokens(answers, 100), expected_tokens(answers, 12)) == (16, 12)
    assert expected_decode_ns(answers, 16, 5) == 2 * S
    assert expected_decode_ns(None, 16, 5) == 80
