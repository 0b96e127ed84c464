"""The computation of a decode step, on the compute thread: one token of each sequence of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers import hold_points
from halfmoon.workers.decode.sequence import DecodeSequence
from halfmoon.workers.sample_requests import request_of, token_of

if TYPE_CHECKING:
    from halfmoon.workers.decode.borrower import Borrower


def next_tokens(
    engine: Any, borrower: Borrower | None, batch: Sequence[DecodeSequence]
) -> list[SampledToken]:
    """Known tokens (a replay) are not drawn. `borrower`: of a worker that has KV elsewhere. Raises LenderLost."""
    if hold_points.PLACE is not None:
        for sequence in batch:
            hold_points.reached(hold_points.DECODE_STEP, len(sequence.output), sequence.order_id)
    if borrower is not None:
        logits = borrower.decode(batch)
    else:
        logits = engine.decode(
            [s.output[-1] for s in batch],
            [s.position for s in batch],
            [s.table for s in batch],
            lengths=[s.length for s in batch],
        )
    requests = [request_of(engine, s.params, s.sampling, s.prompt, s.output, name=s.order_id) for s in batch]
    sampled = engine.sample_rows(logits, requests)
    return [
        s.next_known() or token_of(engine, one, s.sampling, logits[row])
        for row, (s, one) in enumerate(zip(batch, sampled, strict=True))
    ]
