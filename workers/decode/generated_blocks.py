"""Blocks that a sequence has generated, for the next turn of a conversation: whether they may be shared, and which."""

from __future__ import annotations

from halfmoon.schemas.policy import Layout
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.decode.actions import ShareOutput
from halfmoon.workers.decode.sequence import DecodeSequence


def shares_generated(sequence: DecodeSequence, layout: Layout) -> bool:
    """It has whole blocks beyond its prompt's that others may use.

    Only in fast numerics: in exact ones generated KV differs in bits from a prefill of the same tokens. And only where
    the order's slots were its own until the prompt's KV had been copied: a process that stood still may have copied
    bytes that others wrote there meanwhile. Its client has another worker's answer then, but KV computed from those
    bytes would stay in the pool under the keys of this prompt. Nor behind a prompt for part of which KV of a similar
    one stood in.
    """
    return bool(
        layout.numerics == "fast"
        and sequence.lease_held
        and (sequence.result is None or sequence.result.similar is None)
        and layout.block_bytes
        and sequence.root_key
        and sequence.prompt
        and sequence.table
        and sequence.length // layout.block_tokens > len(sequence.block_keys) // KEY_BYTES
    )


def generated_blocks(sequence: DecodeSequence, layout: Layout) -> ShareOutput:
    """Where they lie, and all the tokens that name them."""
    return ShareOutput(
        order_id=sequence.order_id,
        root_key=sequence.root_key,
        tokens=[*sequence.prompt, *sequence.output][: sequence.length],
        known_blocks=len(sequence.block_keys) // KEY_BYTES,
        table=list(sequence.table),
        tenant=sequence.tenant,
    )
