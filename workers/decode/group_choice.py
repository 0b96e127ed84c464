"""In how many groups the rows of a batch take turns, whose KV lies at attention workers.

Source: Lamina (arXiv 2405.01814), section 4.3, by the table of a step's parts (`StepElsewhere`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from halfmoon.schemas.cost_profile import CostProfile, StepElsewhere
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.workers.decode.sequence import DecodeSequence

log = logging.getLogger(__name__)
#: Where no cost was measured.
GROUPS = 2


class GroupChoice:
    """`given`: as many, always; 0: as few as make the step as short as it can be."""

    def __init__(self, given: int, profile: CostProfile, hello: ChannelHello) -> None:
        self._given, self._profile, self._hello = given, profile, hello
        self._members: list[str] = []
        self._count = given or GROUPS

    def groups(self, batch: Sequence[DecodeSequence]) -> int:
        """The number of groups of the batch's next step. It changes only with the batch, since then each place gets the
        lists of its rows anew.
        """
        if self._given or not self._profile.attention_token_ps:
            return self._count
        members = [sequence.order_id for sequence in batch]
        if members == self._members:
            return self._count
        self._members = members
        step = self._step(batch)
        if step.groups != self._count:
            log.info(
                "%d sequences take turns in %d groups: a step of %.1f ms, %.1f ms in one",
                len(batch), step.groups, step.ns(step.groups) / 1e6, step.ns(1) / 1e6,
            )  # fmt: skip
        self._count = step.groups
        return self._count

    def _step(self, batch: Sequence[DecodeSequence]) -> StepElsewhere:
        """The next step, at the place that has the most of it; places are taken to be as quick as this worker."""
        asked: dict[str, tuple[int, int, int]] = {}
        for sequence in batch:
            for part in sequence.parts:
                rows, tokens, _ = asked.get(part.worker_id, (0, 0, 0))
                tokens += part.size(sequence.length, self._hello.segment_tokens)
                asked[part.worker_id] = rows + 1, tokens, len(part.heads(self._hello.kv_heads))
        rows, tokens, kv_heads = max(asked.values(), key=lambda one: one[1])
        profile, every = self._profile, self._hello.kv_heads
        # Of each row q, k and v go up, and as much as q comes down.
        row_bytes = profile.query_row_bytes * 2 * (self._hello.heads + every) // self._hello.heads
        place = msgspec.structs.replace(
            profile,
            attention_row_ns=profile.attention_row_ns * kv_heads // every,
            attention_token_ps=profile.attention_token_ps * kv_heads // every,
        )
        return StepElsewhere(
            cost=profile,
            place=place,
            layers=self._hello.layers,
            rows=len(batch),
            place_rows=rows,
            place_tokens=tokens,
            others_ns=0,
            payload_bytes=self._hello.layers * rows * row_bytes * kv_heads // every,
        )
