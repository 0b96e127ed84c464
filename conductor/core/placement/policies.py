"""The table of policies: how each one chooses a prefill and a decode worker, or a mixed one, and which blocks it moves.

To add a policy, add an entry here and its name to `schemas.policy.PolicyName`: the choice, its short cut and the
explanation all read this table. Every choice is a total order that ends in an id, so that it does not depend on the
order of iteration.

Other packages bring policies too: the process that runs a core adds theirs to the table before it begins
(`conductor/plugins.py`), each under its name and version, which the log names.

Source: Mooncake (FAST'25), Algorithm 1 (`mooncake`, `halfmoon`), and its baselines; `dynamo` is the published cost of
NVIDIA Dynamo's KV router; `lmetric` the product of Zhang et al., LMetric (arXiv 2603.15202); `sticky` is session
affinity, a session being the requests that repeat one prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Generic, Literal, assert_never

import msgspec

from halfmoon.conductor.core.placement.fetch_plan import FetchRule
from halfmoon.conductor.core.placement.measures import (
    BLOCKS_TIMES_BATCH,
    FIRST_TOKEN,
    FIRST_TOKEN_AND_COPIES,
    KV_BLOCKS,
    MISSING_HERE,
    MISSING_PREFIX,
    MIXED_BLOCKS,
    MIXED_BLOCKS_TIMES_BATCH,
    MIXED_DELAYS,
    MIXED_FIRST_TOKEN,
    MIXED_MISSING_HERE,
    MIXED_ORDERS,
    MIXED_QUEUE,
    MIXED_STEP,
    ORDERS,
    PREFILL_BLOCKS,
    QUEUE,
    SEQUENCES,
    STEP,
    TRANSFER,
    C,
    Candidate,
    CandidateMeasure,
    DecodeCandidate,
    MixedCandidate,
)
from halfmoon.conductor.core.state.core_state import State
from halfmoon.conductor.core.state.records import Half
from halfmoon.schemas.policy import Policy


class Least(msgspec.Struct, Generic[C], frozen=True):
    """The candidate whose measures are least: the first decides, the next ones between equals, then the id."""

    measures: tuple[CandidateMeasure[C], ...]

    def rank(self, candidate: C) -> tuple[int | str, ...]:
        return (*[measure.of(candidate) for measure in self.measures], candidate.worker_id)


class InTurn(msgspec.Struct, frozen=True):
    """The worker whose id follows that of the last one chosen, around the end."""


class Drawn(msgspec.Struct, frozen=True):
    """Any worker, drawn from the policy's seed and the place in the log."""


#: Where nothing is predicted (the null engine) the number of orders tells candidates apart.
EARLIEST_TOKEN = Least((FIRST_TOKEN, TRANSFER, ORDERS))
EARLIEST_TOKEN_WITH_COPIES = Least((FIRST_TOKEN_AND_COPIES, TRANSFER, ORDERS))
SHORTEST_STEP = Least((STEP, MISSING_PREFIX, SEQUENCES))
#: A rule for mixed workers.
MixedRule = Least[MixedCandidate] | InTurn | Drawn
#: The price of copies is 0 under policies that have none.
EARLIEST_TOKEN_MIXED = Least((MIXED_FIRST_TOKEN, MIXED_STEP, MIXED_ORDERS))
#: A prompt keeps everybody at its worker waiting. By its own first token alone, which decodes beside it hardly delay,
#: long answers crowd on one worker while others are idle.
LEAST_DELAYS_MIXED = Least((MIXED_DELAYS, MIXED_STEP, MIXED_ORDERS))


class PolicyRules(msgspec.Struct, frozen=True, kw_only=True):
    """One policy."""

    prefill: Least[Candidate] | InTurn | Drawn
    decode: Least[DecodeCandidate] | InTurn | Drawn
    #: One worker for both halves (`Policy.mixed_by_policy`).
    mixed: MixedRule = EARLIEST_TOKEN_MIXED
    fetch: FetchRule
    #: Whether a copy of blocks that are elsewhere has a price (`Candidate.copies_ns`).
    copies_priced: bool = False
    #: Whether blocks of a prompt that the worker has accepted before count as held (`Policy.coming_blocks`).
    coming_counted: bool = False
    #: Whether a prompt passes longer ones that wait (`Policy.passing_durations`).
    passes: bool = False
    #: Whether under overload, with admission `predicted`, larger prompts are refused first.
    large_refused_first: bool = False


POLICIES: dict[str, PolicyRules] = {
    "halfmoon": PolicyRules(
        prefill=EARLIEST_TOKEN_WITH_COPIES,
        decode=SHORTEST_STEP,
        mixed=LEAST_DELAYS_MIXED,
        fetch="cheapest",
        copies_priced=True,
        coming_counted=True,
        passes=True,
        large_refused_first=True,
    ),
    "mooncake": PolicyRules(prefill=EARLIEST_TOKEN, decode=SHORTEST_STEP, fetch="as_printed"),
    "local_cache_aware": PolicyRules(
        prefill=EARLIEST_TOKEN,
        decode=SHORTEST_STEP,
        # Other people's engines are mixed workers under this policy, since nothing is fetched between them.
        mixed=LEAST_DELAYS_MIXED,
        fetch="local_only",
    ),
    "least_loaded": PolicyRules(
        prefill=Least((QUEUE, ORDERS)),
        decode=SHORTEST_STEP,
        mixed=Least((MIXED_QUEUE, MIXED_ORDERS)),
        fetch="local_only",
    ),
    "round_robin": PolicyRules(prefill=InTurn(), decode=InTurn(), mixed=InTurn(), fetch="local_only"),
    "random": PolicyRules(prefill=Drawn(), decode=Drawn(), mixed=Drawn(), fetch="local_only"),
    "dynamo": PolicyRules(
        prefill=Least((PREFILL_BLOCKS,)),
        decode=Least((KV_BLOCKS, SEQUENCES)),
        mixed=Least((MIXED_BLOCKS,)),
        fetch="local_only",
    ),
    "lmetric": PolicyRules(
        prefill=Least((BLOCKS_TIMES_BATCH, ORDERS)),
        decode=Least((SEQUENCES, KV_BLOCKS)),
        mixed=Least((MIXED_BLOCKS_TIMES_BATCH, MIXED_ORDERS)),
        fetch="local_only",
    ),
    "sticky": PolicyRules(
        prefill=Least((MISSING_HERE, QUEUE, ORDERS)),
        decode=Least((MISSING_PREFIX, STEP, SEQUENCES)),
        mixed=Least((MIXED_MISSING_HERE, MIXED_QUEUE, MIXED_ORDERS)),
        fetch="local_only",
    ),
}


class PolicyMissing(ValueError):
    """The policy is of another package that is not here, or not in that version: nothing can be decided as it does."""


def installed() -> list[str]:
    """Titles of all plug-ins that are in the table, a later version of one behind its earlier ones."""
    return [name for name in POLICIES if "@" in name]


def check_known(policy: Policy) -> None:
    """Raises PolicyMissing, which names it."""
    if policy.name not in POLICIES:
        there = ", ".join(installed()) or "none"
        raise PolicyMissing(f"policy {policy.name} is not installed here (plug-ins that are: {there})")


def rules_of(state: State) -> PolicyRules:
    """The rules of the policy in force."""
    return POLICIES[state.policy.name]


def choose_prefill(state: State, found: Sequence[Candidate], draw: str) -> Candidate | None:
    """The candidate that the policy in force takes; None when there is none. `draw` names this choice, for `Drawn`.

    Where `best_first` has found the best already, `found` is that one candidate.
    """
    return choose_by(rules_of(state).prefill, "prefill", state, found, draw)


def choose_decode(state: State, found: Sequence[DecodeCandidate], draw: str) -> DecodeCandidate | None:
    """As `choose_prefill`, of decode workers."""
    return choose_by(rules_of(state).decode, "decode", state, found, draw)


def mixed_rule(name: str, by_policy: bool) -> MixedRule:
    """How a mixed worker is chosen under the policy of that name; `by_policy` is `Policy.mixed_by_policy`."""
    return POLICIES[name].mixed if by_policy else EARLIEST_TOKEN_MIXED


def choose_by(
    choice: Least[C] | InTurn | Drawn,
    part: Half | Literal["mixed"],
    state: State,
    found: Sequence[C],
    draw: str,
) -> C | None:
    """The candidate that `choice` takes, of those for one half or for both."""
    if not found:
        return None
    match choice:
        case Least():
            return min(found, key=choice.rank)
        case InTurn():
            return found[_next([c.worker_id for c in found], state.round_robin.get(part, ""))]
        case Drawn():
            return found[_drawn(state.policy.seed, f"{part}:{draw}", len(found))]
        case _:
            assert_never(choice)


def _next(ids: Sequence[str], last: str) -> int:
    """Place of the first id after `last`, around the end; `ids` are sorted."""
    return next((place for place, worker_id in enumerate(ids) if worker_id > last), 0)


def _drawn(seed: int, draw: str, count: int) -> int:
    """A number below `count`, from the seed and the name of the draw alone."""
    raw = blake2b(f"{seed}:{draw}".encode(), digest_size=8).digest()
    # Scaled down, and no remainder taken: that would favour the first few.
    return int.from_bytes(raw, "big") * count >> 64
