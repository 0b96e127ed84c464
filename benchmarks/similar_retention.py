"""How near an answer is when each layer keeps the KV of fewer tokens of a prompt (`kv.retain`, SemShareKV).

The built-in model, f32, fast numerics, one thread; documents, edits and measures of `benchmarks/similar.py`. KV of the
document stands in for its edited prompt, and of the KV that comes of it each layer keeps a share; the text that follows
is teacher-forced. Against a prefill of the whole prompt: dNLL, KL and the same likeliest token; means over the
documents, and the least and the most dNLL. The ways:

- `all`: nothing is left out; `80 %`, `60 %`, `40 %`: ours, every layer as many (`workers.model.similar.retention`);
- `60 %, deep layers fewer`: the same mean, from 80 % in the first layer down by one factor each, as in the paper;
- `60 %, attended`: without the newest tokens that are kept in any case;
- controls at 60 %: the `newest` tokens and the first four; `random` ones.

Bytes are counted: tokens kept over tokens of the prompt, over all layers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from clusters import finish, parsed, parser
from similar import DOCUMENTS, EDITS, PROMPT, Bench, apart, means, sentences_of

from halfmoon.schemas.similar import kept_tokens
from halfmoon.workers.model.similar.retention import NEWEST_PERCENT, most_attended
from halfmoon.workers.model.similar.selective import SelectivePrefill

Tensor = torch.Tensor

SHOWN = ("identical", "10 % missing", "10 % replaced", "30 % replaced")
FIRST_SHARE = 0.8


class Judged(SelectivePrefill):
    """Leaves nothing out, and notes what each way would keep.

    `ways`: by name tokens of each layer, and how many percent of them are the newest.
    """

    ways: dict[str, tuple[list[int], int]]
    kept: dict[str, list[Tensor]]

    def _kept(self, q: Tensor, keys: Tensor, positions: Tensor) -> None:
        for way, (counts, newest) in self.ways.items():
            layers = self.kept.setdefault(way, [])
            layers.append(most_attended(q, keys, positions, 0, counts[len(layers)], newest))


def decaying(share: float, layers: int, tokens: int) -> list[int]:
    """From `FIRST_SHARE` in the first layer down by one factor each; their mean is `share`."""
    low, high = 0.5, 1.0
    for _ in range(60):
        factor = (low + high) / 2
        mean = sum(FIRST_SHARE * factor**layer for layer in range(layers)) / layers
        low, high = (low, factor) if mean > share else (factor, high)
    return [int(FIRST_SHARE * low**layer * tokens) for layer in range(layers)]


@torch.inference_mode()
def followed(
    bench: Bench, first: Tensor, prompt: int, ids: Sequence[int], kept: list[Tensor] | None
) -> Tensor:
    """Log probabilities `[tokens, vocab]` of the tokens that follow, which attend to what is kept of the prompt."""
    model, cache = bench.engine.transformer, bench.engine.cache
    count = len(ids) - 1
    model.rotary.reach(prompt + count)
    cos, sin = model.rotary.rows(torch.arange(prompt, prompt + count))
    x = model.embed(torch.tensor(ids[:-1]))
    for i, layer in enumerate(model.layers):
        q, k, v = layer.project(x, cos, sin)
        old = (part[i][PROMPT].flatten(0, 1)[:prompt] for part in (cache.k, cache.v))
        keys, values = (
            torch.cat([part if kept is None else part[kept[i]], own])
            for part, own in zip(old, (k, v), strict=True)
        )
        seen = torch.ones(count, len(keys), dtype=torch.bool).tril(len(keys) - count)
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1).unsqueeze(0) for part in (q, keys, values)),
            attn_mask=seen,
            enable_gqa=True,
        )
        x = layer.finish(x, attended[0].transpose(0, 1).reshape(count, -1))
    return torch.cat([first.unsqueeze(0), model.logits(x)]).log_softmax(dim=1)


def one_prompt(
    bench: Bench, prompt: list[int], follow: list[int], kv: list[tuple[Tensor, Tensor]]
) -> dict[str, dict[str, float]]:
    """By way."""
    tokens, layers = len(prompt), bench.engine.config.layers
    wanted = followed(bench, bench.prefill(prompt, PROMPT), tokens, follow, None)
    count = kept_tokens(tokens, 60)
    judged = Judged(bench.engine, prompt, 0, PROMPT)
    judged.ways = {
        f"{percent} %": ([kept_tokens(tokens, percent)] * layers, NEWEST_PERCENT) for percent in (80, 60, 40)
    }
    judged.ways["60 %, deep layers fewer"] = decaying(0.6, layers, tokens), NEWEST_PERCENT
    judged.ways["60 %, attended"] = [count] * layers, 0
    judged.kept = {}
    made = judged.run(kv.__getitem__)
    assert made is not None
    draw = torch.Generator().manual_seed(tokens)
    chance = torch.randperm(tokens, generator=draw)[:count].sort().values
    newest = torch.cat([torch.arange(4), torch.arange(tokens - count + 4, tokens)])
    kept: dict[str, list[Tensor] | None] = {"all": None, **judged.kept}
    kept |= {"60 %, newest": [newest] * layers, "60 %, random": [chance] * layers}
    found = {}
    for way, places in kept.items():
        share = 1.0 if places is None else sum(map(len, places)) / (layers * tokens)
        rows = followed(bench, made.logits, tokens, follow, places)
        found[way] = {"bytes": share, **apart(wanted, rows, follow)}
    return found


def of_document(bench: Bench, number: int, tokens: int, following: int, edits: int) -> dict[str, Any]:
    """By edit and way."""
    others = sentences_of(DOCUMENTS[(number + 1) % len(DOCUMENTS)])
    every, count = sentences_of(DOCUMENTS[number]), 1
    while len(bench.ids(every[:count])) < tokens:
        count += 1
    reference = bench.ids(every[:count])
    follow = bench.ids(every[: count + 10])[len(reference) :][:following]
    kv = bench.reference(reference)
    prompts = {
        name: bench.ids(EDITS[name](every[:count], others, random.Random(number))) for name in SHOWN[:edits]
    }
    return {name: one_prompt(bench, prompt, follow, kv) for name, prompt in prompts.items()}


def main() -> None:
    words = parser(__doc__ or "")
    words.add_argument("--tokens", type=int, default=700, help="of a document (700)")
    words.add_argument("--documents", type=int, default=3, choices=range(1, len(DOCUMENTS) + 1))
    words.add_argument(
        "--following", type=int, default=64, help="tokens behind a prompt that are compared (64)"
    )
    words.add_argument("--edits", type=int, default=len(SHOWN), help="only the first so many")
    options = parsed(words, tokens=100, documents=1, following=3, edits=1)
    bench = Bench()
    found = [
        of_document(bench, number, options.tokens, options.following, options.edits)
        for number in range(options.documents)
    ]
    quality = {
        name: {way: means([one[name][way] for one in found], "nll") for way in ways}
        for name, ways in found[0].items()
    }
    lines = ["edit, way: bytes kept, dNLL (least to most), KL, same likeliest token"] + [
        f"{edit}, {way}: {one['bytes']:.3f}, {one['nll']:+.3f} ({one['nll_least']:+.3f} to {one['nll_most']:+.3f}), "
        f"{one['kl']:.3f}, {one['same']:.2f}"
        for edit, ways in quality.items()
        for way, one in ways.items()
    ]
    result = {"tokens": options.tokens, "documents": list(DOCUMENTS[: options.documents]), "quality": quality}
    finish(options, result, lines)


if __name__ == "__main__":
    main()
