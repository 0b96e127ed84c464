"""Sampling from logits: masks exactly, draws by seed and index, penalties as OpenAI and vLLM define them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from halfmoon.workers.model.sampling import filtered, sample_batch, uniform
from halfmoon.workers.model.sampling import sample as sample_row
from halfmoon.workers.model.sampling_params import Sampled, SampleRequest, SamplingInvalid, SamplingParams

LOGITS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()


def sample(logits: torch.Tensor, params: SamplingParams, **fields: Any) -> Sampled:
    """One token; `fields` are those of its request."""
    return sample_row(logits, params, SampleRequest(params=params, **fields))


def kept(**options: Any) -> list[int]:
    return filtered(LOGITS, SamplingParams(**options)).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 1}, [0]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.41}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),
        ({"min_p": 0.3, "top_p": 0.83}, [0, 1, 2]),
        ({"min_p": 0.3, "top_p": 0.82}, [0, 1]),
    ],
)
def test_filters_keep_exactly_these(options: dict[str, Any], ids: list[int]) -> None:
    assert kept(**options) == ids


def test_what_is_kept_keeps_its_proportions() -> None:
    probabilities = filtered(LOGITS, SamplingParams(top_k=2))
    torch.testing.assert_close(probabilities[:2], torch.tensor([4 / 7, 3 / 7]).double(), atol=1e-6, rtol=0)
    warmer = filtered(LOGITS, SamplingParams(temperature=2.0))
    torch.testing.assert_close(warmer, LOGITS.double().div(2).softmax(0), atol=1e-6, rtol=0)


def test_ties_at_the_edge_go_to_the_smaller_ids() -> None:
    assert filtered(torch.zeros(9), SamplingParams(top_k=4)).nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(seed=42)
    counts = Counter(sample(LOGITS, params, index=i).token_id for i in range(4000))
    chi_square = sum((counts[i] - 4000 * p) ** 2 / (4000 * p) for i, p in enumerate(LOGITS.exp().tolist()))
    assert chi_square < 18.5  # 0.1 % of fair samplers exceed it, with 4 degrees of freedom


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))
    first = [sample(logits, SamplingParams(seed=7), index=i).token_id for i in range(50)]
    again = [sample(logits, SamplingParams(seed=7), index=i).token_id for i in reversed(range(50))]
    assert first == again[::-1]
    assert first != [sample(logits, SamplingParams(seed=8), index=i).token_id for i in range(50)]
    assert len(set(first)) > 20
    assert 0.0 <= uniform(-1, 0) < 1.0
    assert uniform(2**64 + 3, 5) == uniform(3, 5)


def test_without_a_seed_draws_are_fresh() -> None:
    logits = torch.zeros(100_000)
    assert len({sample(logits, SamplingParams(), index=0).token_id for _ in range(5)}) > 1


@pytest.mark.parametrize("temperature", [1e-9, 1e-30, 1e-300])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = torch.tensor([1.0, 50.0, 49.9, -3.0])
    assert sample(logits, SamplingParams(temperature=temperature, seed=1), index=0).token_id == 1


def chosen(logits: list[float], prompt: list[int], output: list[int], **options: Any) -> int:
    params = SamplingParams(temperature=0.0, **options)
    return sample(
        torch.tensor(logits), params, prompt_ids=prompt, output_ids=output, index=len(output)
    ).token_id


def test_presence_counts_generated_tokens_once() -> None:
    assert chosen([3.0, 2.5], [0], [], presence_penalty=0.6) == 0  # the prompt does not count
    assert chosen([3.0, 2.5], [], [0], presence_penalty=0.6) == 1
    assert chosen([3.0, 2.5], [], [0, 0, 0], presence_penalty=0.4) == 0


def test_frequency_counts_every_occurrence() -> None:
    assert chosen([3.0, 2.5], [], [0], frequency_penalty=0.3) == 0
    assert chosen([3.0, 2.5], [], [0, 0], frequency_penalty=0.3) == 1
    assert chosen([3.0, 2.5], [0, 0, 0], [], frequency_penalty=0.3) == 0


def test_repetition_divides_what_is_positive_and_multiplies_what_is_not() -> None:
    assert chosen([3.0, 2.0], [0], [], repetition_penalty=1.6) == 1
    assert chosen([-1.0, -1.5], [0], [0, 0], repetition_penalty=1.6) == 1
    assert chosen([-1.0, -1.7], [0], [0, 0], repetition_penalty=1.6) == 0


def test_bias_and_bans() -> None:
    assert chosen([3.0, 2.0, 0.0], [], [], logit_bias={2: 5.0, 99: 100.0}) == 2
    params = SamplingParams(temperature=0.0)
    assert sample(torch.tensor([3.0, 2.0, 0.0]), params, index=0, banned_ids=[0, 1]).token_id == 2
    drawn = {sample(LOGITS, SamplingParams(seed=i), index=0, banned_ids=[0, 3]).token_id for i in range(60)}
    assert drawn == {1, 2, 4}


def test_logprobs_are_of_the_models_own_distribution() -> None:
    params = SamplingParams(temperature=0.3, logprobs=3, top_k=1, logit_bias={4: 50.0}, seed=1)
    found = sample(LOGITS, params, index=0)
    assert found.token_id == 4
    assert found.logprob == pytest.approx(math.log(0.05), abs=1e-5)
    assert [token for token, _ in found.top_logprobs] == [0, 1, 2]
    assert found.top_logprobs[0][1] == pytest.approx(math.log(0.4), abs=1e-5)
    assert sample(LOGITS, SamplingParams(logprobs=0, seed=1), index=0).top_logprobs == ()
    assert sample(LOGITS, SamplingParams(seed=1), index=0).logprob is None


def test_a_batch_is_each_row_by_itself_and_leaves_the_logits_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    requests = [
        SampleRequest(params=SamplingParams(temperature=0.0), index=0),
        SampleRequest(params=SamplingParams(seed=3, top_p=0.9), index=5),
        SampleRequest(params=SamplingParams(temperature=0.0), index=0, banned_ids=[int(logits[2].argmax())]),
        SampleRequest(
            params=SamplingParams(temperature=0.0, repetition_penalty=9.0), index=1, prompt_ids=range(50)
        ),
    ]
    assert [request.plain_greedy for request in requests] == [True, False, False, False]
    alone = [sample_row(row, r.params, r) for row, r in zip(logits, requests, strict=True)]
    assert sample_batch(logits, requests) == alone
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("min_p", 2.0),
     ("presence_penalty", 2.1), ("frequency_penalty", -3.0), ("repetition_penalty", 0.0), ("logprobs", -1)],
)  # fmt: skip
def test_a_parameter_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(SamplingInvalid, match=field):
        SamplingParams(**{field: value})
