"""Which candidate is taken, by the name of the policy. Every choice is a total order that ends in an id.

Two candidates with the same prediction are told apart by how many orders they have (which matters only where
nothing is predicted: the null engine), then by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from halfmoon.conductor.core.placement import Candidate, DecodeCandidate
from halfmoon.conductor.core.state import State


def choose_prefill(state: State, found: Sequence[Candidate], draw: str) -> Candidate | None:
    """The candidate that the policy in force takes; None when there is none. `draw` names this choice, for
    `random`.

    Source: Mooncake (FAST'25), Algorithm 1 (`mooncake`, `halfmoon`), and its baselines.
    """
    if not found:
        return None
    match state.policy.name:
        case "halfmoon":
            return min(found, key=lambda c: (c.ttft_ns + c.copies_ns, c.transfer_ns, c.orders, c.worker_id))
        case "mooncake" | "local_cache_aware":
            return min(found, key=lambda c: (c.ttft_ns, c.transfer_ns, c.orders, c.worker_id))
        case "least_loaded":
            return min(found, key=lambda c: (c.queue_ns, c.orders, c.worker_id))
        case "round_robin":
            return found[_next([c.worker_id for c in found], state.round_robin.get("prefill", ""))]
        case "random":
            return found[_drawn(state.policy.seed, f"prefill:{draw}", len(found))]
        case "dynamo":
            # Blocks still to compute, this prompt's among them, and blocks in hand.
            return min(
                found, key=lambda c: (c.pending_blocks + c.prompt_blocks + c.uncached_blocks, c.worker_id)
            )


def choose_decode(state: State, found: Sequence[DecodeCandidate], draw: str) -> DecodeCandidate | None:
    """The candidate that the policy in force takes; None when there is none.

    A prefix that is on the node already need not be pushed: it decides between equals.
    """
    if not found:
        return None
    match state.policy.name:
        case "halfmoon" | "mooncake" | "local_cache_aware" | "least_loaded":
            return min(found, key=lambda c: (c.tbt_ns, -c.prefix_blocks, c.sequences, c.worker_id))
        case "round_robin":
            return found[_next([c.worker_id for c in found], state.round_robin.get("decode", ""))]
        case "random":
            return found[_drawn(state.policy.seed, f"decode:{draw}", len(found))]
        case "dynamo":
            return min(found, key=lambda c: (c.reserved_blocks + c.blocks, c.sequences, c.worker_id))


def _next(ids: Sequence[str], last: str) -> int:
    """Place of the first id after `last`, around the end; `ids` are sorted."""
    return next((place for place, worker_id in enumerate(ids) if worker_id > last), 0)


def _drawn(seed: int, draw: str, count: int) -> int:
    """A number below `count`, from the seed and the name of the draw alone."""
    raw = blake2b(f"{seed}:{draw}".encode(), digest_size=8).digest()
    return int.from_bytes(raw, "big") * count >> 64
