"""A model that was loaded, and packed, before this process was forked: workers of one machine share its memory.

Packed weights are private to the process that packs them: they are shared by a fork after packing. Nothing ever writes
to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Preloaded:
    """`model` without its weights: all that is needed of them is in `transformers`, by their `query_first`."""

    model: LoadedModel
    transformers: dict[bool, Transformer]


_preloaded: list[Preloaded] = []


def preload(model: LoadedModel, query_first: Iterable[bool]) -> None:
    """Packs the weights for each form that the workers to be forked will ask for."""
    # Rows and the embeddings alone are kept as they were read: the file need not stay mapped for these.
    kept = {name for name, weight in model.weights.items() if weight.ndim == 1 or name == "embed"}
    weights = {name: weight.clone() if name in kept else weight for name, weight in model.weights.items()}
    with torch.inference_mode():
        forms = {form: Transformer(model.config, weights, query_first=form) for form in query_first}
    _preloaded.append(Preloaded(replace(model, weights={}), forms))


def preloaded(
    fingerprint: str, dtype: torch.dtype, *, query_first: bool
) -> tuple[LoadedModel, Transformer] | None:
    """None: this process has to load the model itself."""
    for each in _preloaded:
        if (each.model.fingerprint, each.model.dtype) == (
            fingerprint,
            dtype,
        ) and query_first in each.transformers:
            return each.model, each.transformers[query_first]
    return None
