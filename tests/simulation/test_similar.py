"""Similar prompts in the simulator: as the core prices them, and shared with nobody."""

from __future__ import annotations

import pytest

from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.outcomes import Outcome
from halfmoon.conductor.simulation.profiles import LLAMA3_A800
from halfmoon.conductor.simulation.simulate import simulate
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.policy import Policy
from halfmoon.schemas.similar import NamedDocument
from tests.conductor.conductor_scripts import keys

S = 1_000_000_000
TOKENS, BLOCK_TOKENS = 8_192, 256
SKETCH = bytes(range(256))


Prompt = tuple[int, bytes | list[NamedDocument]]


def run(*prompts: Prompt, **policy: int) -> list[Outcome]:
    """One after the other: the seed of a prompt's keys, and its sketch or the documents in it."""
    found: dict[str, Outcome] = {}
    simulate(
        [
            Arrival(
                at_ns=(1 + 100 * place) * S,
                prompt_tokens=TOKENS + 1,
                output_tokens=2,
                block_keys=keys(TOKENS // BLOCK_TOKENS, seed),
                sketch=like if isinstance(like, bytes) else b"",
                documents=[] if isinstance(like, bytes) else like,
            )
            for place, (seed, like) in enumerate(prompts)
        ],
        ClusterShape(prefill=2, decode=1, block_tokens=BLOCK_TOKENS),
        Policy(admission="none", ttft_slo_ns=1_000 * S, **policy),
        LLAMA3_A800,
        outcomes=found,
    )
    return [found[f"r{place}"] for place in range(len(prompts))]


def test_it_takes_what_is_predicted_and_costs_are_not_learned_from_it() -> None:
    alone, near, plain, other = run((1, SKETCH), (2, SKETCH), (3, b""), (4, SKETCH))
    assert near.ttft_ns < 0.5 * alone.ttft_ns
    assert near.predicted_ttft_ns == pytest.approx(near.ttft_ns, rel=0.05)
    assert plain.predicted_ttft_ns == pytest.approx(plain.ttft_ns, rel=0.05)
    assert plain.ttft_ns == pytest.approx(alone.ttft_ns, rel=0.05)
    assert other.ttft_ns < 0.5 * alone.ttft_ns


def test_what_it_makes_is_found_by_nobody() -> None:
    _, near, again, exact = run((1, SKETCH), (2, SKETCH), (2, b""), (1, b""))
    assert near.local_tokens + near.fetched_tokens == 0
    assert again.local_tokens + again.fetched_tokens == 0
    assert exact.local_tokens + exact.fetched_tokens > 0


def test_switched_off_all_is_computed() -> None:
    alone, near = run((1, SKETCH), (2, SKETCH), similar_tokens_min=0)
    assert near.ttft_ns == pytest.approx(alone.ttft_ns, rel=0.05)


def halves(*numbers: int) -> list[NamedDocument]:
    """The two halves of a prompt."""
    half = TOKENS // 2
    return [
        NamedDocument(name=number.to_bytes(16, "big"), first_token=place * half, tokens=half)
        for place, number in enumerate(numbers)
    ]


def test_documents_of_other_prompts_stand_in() -> None:
    alone, other, both, half, none = run(
        (1, halves(1, 2)), (2, halves(3, 4)), (3, halves(4, 1)), (4, halves(5, 2)), (5, halves(5, 6))
    )
    assert other.ttft_ns == none.ttft_ns == pytest.approx(alone.ttft_ns, rel=0.05)
    assert both.ttft_ns < 0.5 * alone.ttft_ns
    assert both.ttft_ns < half.ttft_ns < 0.8 * alone.ttft_ns
    assert both.predicted_ttft_ns == pytest.approx(both.ttft_ns, rel=0.05)
