"""The end of a prompt computed with the KV of a similar one, which lies in the node's pool or is on its way there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halfmoon.schemas.similar import SimilarReuse
from halfmoon.workers.model.layer_hooks import LayerHooks
from halfmoon.workers.model.similar.selective import NotAlike, ReferenceLayer, SelectivePrefill
from halfmoon.workers.prefill.actions import ReferenceSlots
from halfmoon.workers.prefill.layer_progress import LayerLoads, LayersMissing

Tensor = torch.Tensor


class ReferenceMissing(Exception):
    """Its layers do not come, or too few of the prompt's tokens are in it. The prompt can be computed whole."""


def reference_layers(engine: Any, pool: Any, slots: Sequence[int], loads: LayerLoads) -> ReferenceLayer:
    """K and V of a layer out of these slots of the pool, once it is readable there; else ReferenceMissing."""

    def read(layer: int) -> tuple[Tensor, Tensor]:
        try:
            loads.wait_fetched(layer)
        except LayersMissing as missing:
            raise ReferenceMissing(str(missing)) from None
        cache = engine.cache
        shape = (2, cache.block_tokens, *cache.k.shape[-2:])
        blocks = [
            torch.from_numpy(pool.layer_block(slot, layer)).view(cache.dtype).view(shape) for slot in slots
        ]
        k, v = (torch.cat([block[part] for block in blocks]).to(engine.device) for part in (0, 1))
        return k, v

    return read


def compute_similar(
    engine: Any,
    token_ids: Sequence[int],
    reference: ReferenceSlots,
    block_table: Sequence[int],
    read: ReferenceLayer,
    hooks: LayerHooks,
) -> tuple[Tensor, SimilarReuse] | None:
    """On the compute thread: the last token's logits, and what stood in; None when `should_stop` said so.

    Raises ReferenceMissing, and what the hooks raise.
    """
    kept = reference.kept(len(token_ids))
    size = engine.block_tokens
    places = torch.tensor([block * size for block in reference.blocks], device=engine.device)
    prefill = SelectivePrefill(
        engine,
        token_ids,
        reference.first_token,
        block_table,
        places=(places.unsqueeze(1) + torch.arange(size, device=engine.device)).flatten(),
        keep=kept - reference.first_token,
    )
    try:
        result = prefill.run(read, hooks)
    except NotAlike as problem:
        raise ReferenceMissing(str(problem)) from None
    if result is None:
        return None
    return result.logits, SimilarReuse(
        tokens=result.found,
        computed_tokens=result.computed_tokens,
        resemblance=reference.resemblance,
        retained_tokens=kept if reference.retain_percent else 0,
    )
