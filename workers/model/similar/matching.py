"""Which token of a reference stands in for each token of a prompt: runs of the same tokens in both.

The paper matches each token alone, by the nearest embedding at about the same place. A run says more: the KV of its
tokens was computed behind the same tokens, except for the first ones. And a run may lie anywhere, so what is moved is
found too.

The reference's token ids are not stored anywhere. In layer 0 the value of a token depends on the token alone, so
`same_tokens` reads them off the cached values, as far as they are the prompt's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor

#: Shorter runs are chance: their tokens stand behind others.
RUN_TOKENS_MIN = 4
#: Of places where a run could begin, so many are looked at: a text that repeats itself has thousands.
_PLACES_MAX = 32
#: Of the squared length of a value, how far another of the same token may be: products of other shapes round otherwise.
_SAME_MAX = 1e-3
#: No token of the prompt.
UNKNOWN = -1
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Matching:
    """One entry for each of the prompt's tokens that are matched."""

    #: Position in the reference of the token whose KV stands in, int64; where nothing does, 0.
    rows: Tensor
    #: True where nothing stands in: the token is computed in every layer.
    forced: Tensor

    @property
    def found(self) -> int:
        """Tokens that something stands in for."""
        return int((~self.forced).sum())

    def on(self, device: torch.device) -> Matching:
        """The same in the memory of `device`."""
        return Matching(self.rows.to(device), self.forced.to(device))


def match_runs(prompt: Sequence[int], start: int, reference: Sequence[int]) -> Matching:
    """Greedy: from each token on the longest run that the reference has too; of equals, the nearest to the run before.

    `prompt` from `start` on is matched; `reference` may have `UNKNOWN` entries.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for at in range(len(reference) - RUN_TOKENS_MIN + 1):
        run = tuple(reference[at : at + RUN_TOKENS_MIN])
        if UNKNOWN not in run:
            places.setdefault(run, []).append(at)
    rows = [0] * (len(prompt) - start)
    forced = [True] * len(rows)
    at, offset = start, 0
    while at < len(prompt):
        found = places.get(tuple(prompt[at : at + RUN_TOKENS_MIN]), [])
        near = sorted(found, key=lambda place: abs(place - at - offset))[:_PLACES_MAX]
        length, place = max(
            ((_run_length(prompt, at, reference, one), one) for one in near),
            key=lambda run: run[0],
            default=(0, 0),
        )
        for step in range(length):
            rows[at - start + step], forced[at - start + step] = place + step, False
        offset = place - at if length else offset
        at += length or 1
    return Matching(torch.tensor(rows, dtype=torch.int64), torch.tensor(forced))


def _run_length(prompt: Sequence[int], at: int, reference: Sequence[int], place: int) -> int:
    length, most = 0, min(len(prompt) - at, len(reference) - place)
    while length < most and prompt[at + length] == reference[place + length]:
        length += 1
    return length


def same_tokens(token_ids: Sequence[int], values: Tensor, reference_values: Tensor) -> list[int]:
    """The reference's tokens, read off its values of layer 0: those of the prompt's, or `UNKNOWN`.

    `values` `[tokens, kv_heads, head_dim]` are the prompt's own of that layer.
    """
    distinct = {token_id: row for row, token_id in enumerate(token_ids)}
    known = values[list(distinct.values())].flatten(1).float()
    names = [*distinct, UNKNOWN]
    lengths = (known * known).sum(dim=1)
    found: list[int] = []
    for some in torch.split(reference_values.flatten(1).float(), _ROWS_AT_ONCE):
        apart = lengths.unsqueeze(0) - 2 * some @ known.T + (some * some).sum(dim=1, keepdim=True)
        nearest = apart.min(dim=1)
        alike = nearest.values <= _SAME_MAX * lengths[nearest.indices]
        found += torch.where(alike, nearest.indices, len(distinct)).tolist()
    return [names[index] for index in found]
