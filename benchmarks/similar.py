"""KV of a similar prompt in place of computing it (SemShareKV): how near the answer is, how much is computed, how long.

The built-in model, f32, fast numerics, one thread. Quality: prompts of three documents of this repository, each edited
in several ways, with the document's own KV as the reference; the text that follows is teacher-forced after the prompt.
Against a prefill of the whole prompt: the difference of the mean negative log likelihood of that text, the divergence
of the distributions (KL) and how often the likeliest token is the same; means over the documents. By the resemblance of
prompt and reference, as their sketches tell it, the core decides whether one stands in. The ways:

- `runs`: ours, `workers.model.similar`; `runs, more`: with the paper's first share, 0.4, and all places alike;
- `paper`: each token's nearest by the hash of its embedding, turned by its position, and computed in every layer where
  that is another token (SemShareKV with the repair of its calibration); `paper, plain`: without the repair; `paper, no
  rotation`: hashes of embeddings that were not turned;
- controls that must be bad: `random` rows of the reference, `zeroed` KV, and K that is `not turned` to its new place.

Documents (`kv.documents`): three of them, the KV of each computed behind other text, stand in for a prompt of them in
another order, three orders in all; what follows the last one is teacher-forced. Beside ours `nothing more`, where they
are turned to their places and behind layer 0 no more than a tile of their tokens is computed.

Time: by turns, the prefill of the whole prompt and with a reference, of which one sentence in fifty or in ten is
another; of the engine alone, with the reference in the same process.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from clusters import finish, parsed, parser, spread

from halfmoon.schemas.similar import resemblance_percent
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import load_model
from halfmoon.workers.model.similar.matching import Matching, match_runs
from halfmoon.workers.model.similar.selective import Schedule, SelectivePrefill
from halfmoon.workers.model.text.tokenizer import Tokenizer
from halfmoon.workers.sketches import sketch_of

Tensor = torch.Tensor
Kv = list[tuple[Tensor, Tensor]]

ROOT_KEY = b"benchmark"
MODEL = "smollm2-135m-instruct"
ROOT = Path(__file__).parents[1]
#: None of them is among those that the schedule was tuned on: LICENSE, ARCHITECTURE.md, docs/security.md, docs/store.md
#: and docs/conductor.md.
DOCUMENTS = ("docs/operations.md", "docs/api.md", "docs/vllm.md", "docs/replay.md", "docs/attention.md")
BLOCK_TOKENS, BLOCKS = 256, 64
REFERENCE, PROMPT = list(range(BLOCKS // 2)), list(range(BLOCKS // 2, BLOCKS))
SIGNATURE_BITS = 512
#: Of the paper's matching, over the whole width of an embedding.
MATCH_ROPE_BASE = 10_000.0
LENGTHS = (300, 500, 800, 1_600, 2_800)

Edit = Callable[[list[str], list[str], random.Random], list[str]]


def missing(share: float) -> Edit:
    def edit(sentences: list[str], _: list[str], draw: random.Random) -> list[str]:
        gone = chosen(sentences, share, draw)
        return [one for place, one in enumerate(sentences) if place not in gone]

    return edit


def replaced(share: float) -> Edit:
    def edit(sentences: list[str], others: list[str], draw: random.Random) -> list[str]:
        gone = chosen(sentences, share, draw)
        return [draw.choice(others) if place in gone else one for place, one in enumerate(sentences)]

    return edit


def chosen(sentences: list[str], share: float, draw: random.Random) -> set[int]:
    """Places of that share of the sentences, one at least."""
    return set(draw.sample(range(len(sentences)), max(1, round(share * len(sentences)))))


def other_words(sentences: list[str], others: list[str], draw: random.Random) -> list[str]:
    """One word in twenty is another one."""
    words = [word for sentence in others for word in sentence.split()]
    return [
        " ".join(draw.choice(words) if draw.random() < 0.05 else word for word in sentence.split())
        for sentence in sentences
    ]


def shuffled(sentences: list[str], _: list[str], draw: random.Random) -> list[str]:
    return draw.sample(sentences, len(sentences))


EDITS: dict[str, Edit] = {
    "identical": lambda sentences, *_: sentences,
    "one word in twenty": other_words,
    "10 % missing": missing(0.1),
    "10 % replaced": replaced(0.1),
    "30 % missing": missing(0.3),
    "30 % replaced": replaced(0.3),
    "50 % replaced": replaced(0.5),
    "shuffled": shuffled,
}


def sentences_of(path: str) -> list[str]:
    """Prose alone: no tables, code or headings."""
    text = (ROOT / path).read_text()
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "    "))]
    return [one.strip() for one in re.split(r"(?<=[.:;])\s+", " ".join(lines)) if len(one) > 20]


class Bench:
    """One engine, whose cache has room for a reference and a prompt."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.engine = Engine(
            load_model(MODEL, dtype=torch.float32), num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, exact=False
        )
        self.tokenizer = Tokenizer.load(MODEL)

    def ids(self, sentences: list[str]) -> list[int]:
        return self.tokenizer.encode(" ".join(sentences))

    def prefill(self, ids: list[int], table: list[int]) -> Tensor:
        logits = self.engine.prefill_chunk(ids, 0, table, want_logits=True)
        assert logits is not None
        return logits

    def reference(self, ids: list[int]) -> Kv:
        self.prefill(ids, REFERENCE)
        caches = zip(self.engine.cache.k, self.engine.cache.v, strict=True)
        return [tuple(c[REFERENCE].flatten(0, 1)[: len(ids)].clone() for c in kv) for kv in caches]  # type: ignore[misc]

    def following(self, first: Tensor, prompt: int, ids: list[int]) -> Tensor:
        """Log probabilities `[tokens, vocab]` of what follows the prompt, whose KV is cached."""
        rows = [first]
        for place, token in enumerate(ids[:-1]):
            rows.append(self.engine.decode([token], [prompt + place], [PROMPT])[0])
        return torch.stack(rows).log_softmax(dim=1)


# --- the paper's matching -----------------------------------------------------------------------------------


class Signatures:
    """Bits that say on which side of random planes an embedding lies (Charikar 2002); two differ in a share of them
    that is the angle between the embeddings over pi.
    """

    def __init__(self, engine: Engine) -> None:
        draw = torch.Generator().manual_seed(2509)
        self._engine = engine
        self._planes = torch.randn(engine.config.hidden, SIGNATURE_BITS, generator=draw)

    def nearest(self, prompt: list[int], reference: list[int], *, rotary: bool) -> Tensor:
        """For each token of the prompt the place of the reference's nearest one; of equals the nearest place."""
        ours, theirs = (self._signs(ids, rotary=rotary) for ids in (prompt, reference))
        apart = (torch.arange(len(prompt)).unsqueeze(1) - torch.arange(len(reference))).abs()
        return (ours @ theirs.T - apart / (2 * max(len(prompt), len(reference)))).argmax(dim=1)

    def _signs(self, ids: list[int], *, rotary: bool) -> Tensor:
        rows = self._engine.transformer.embed(torch.tensor(ids)).float()
        if rotary:
            pairs = rows.shape[1] // 2
            angles = torch.outer(
                torch.arange(len(ids)).float(), MATCH_ROPE_BASE ** (-torch.arange(pairs) / pairs)
            )
            a, b = rows[:, 0 : 2 * pairs : 2], rows[:, 1::2]
            rows = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], 1)
        return torch.where(rows @ self._planes >= 0, 1.0, -1.0)


def matchings(signatures: Signatures, prompt: list[int], reference: list[int]) -> dict[str, Matching]:
    """By way; `zeroed` and `not turned` are ours with other KV, `runs, more` with another schedule."""
    ids, there = torch.tensor(prompt), torch.tensor(reference)
    turned = signatures.nearest(prompt, reference, rotary=True)
    plain = signatures.nearest(prompt, reference, rotary=False)
    runs = match_runs(prompt, 0, reference)
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(0, len(reference), (len(prompt),), generator=draw)
    nothing = torch.zeros(len(prompt), dtype=torch.bool)
    return {
        "runs": runs,
        "runs, more": runs,
        "paper": Matching(turned, there[turned] != ids),
        "paper, plain": Matching(turned, nothing),
        "paper, no rotation": Matching(plain, nothing),
        "random": Matching(rows, nothing),
        "zeroed": runs,
        "not turned": runs,
    }


# --- quality ------------------------------------------------------------------------------------------------


def quality(bench: Bench, options: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    """By edit and way: means over the documents, and the spread of KL."""
    signatures = Signatures(bench.engine)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number, path in enumerate(DOCUMENTS[: options.documents]):
        others = sentences_of(DOCUMENTS[(number + 1) % len(DOCUMENTS)])
        sentences, count = [], 0
        every = sentences_of(path)
        while count < options.tokens:
            sentences.append(every[len(sentences)])
            count = len(bench.ids(sentences))
        whole = bench.ids(every[: len(sentences) + 10])
        reference = bench.ids(sentences)
        follow = whole[len(reference) :][: options.following]
        kv = bench.reference(reference)
        for name, edit in list(EDITS.items())[: options.edits]:
            prompt = bench.ids(edit(sentences, others, random.Random(number)))
            wanted = bench.following(bench.prefill(prompt, PROMPT), len(prompt), follow)
            alike = resemblance_percent(sketch_of(ROOT_KEY, prompt), sketch_of(ROOT_KEY, reference))
            for way, matching in matchings(signatures, prompt, reference).items():
                measured = one_way(bench, way, prompt, follow, kv, matching, wanted)
                measured["resemblance"] = alike
                found.setdefault(name, {}).setdefault(way, []).append(measured)
    return {
        name: {way: means(measured, "kl") for way, measured in ways.items()} for name, ways in found.items()
    }


def one_way(
    bench: Bench, way: str, prompt: list[int], follow: list[int], kv: Kv, matching: Matching, wanted: Tensor
) -> dict[str, float]:
    if way == "zeroed":
        kv = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in kv]
    elif way == "not turned":
        # From its own place, so that the prefill turns by nothing.
        kv = [(k[matching.rows], v[matching.rows]) for k, v in kv]
        matching = Matching(torch.arange(len(prompt)), matching.forced)
    schedule = Schedule(first=0.4, last_over_first=1.0) if way == "runs, more" else Schedule()
    made = SelectivePrefill(bench.engine, prompt, 0, PROMPT, matching=matching, schedule=schedule).run(
        kv.__getitem__
    )
    assert made is not None
    got = bench.following(made.logits, len(prompt), follow)
    return {"computed": made.computed_tokens / len(prompt), **apart(wanted, got, follow)}


def apart(wanted: Tensor, got: Tensor, follow: list[int]) -> dict[str, float]:
    """Two rows of log probabilities of each token that follows."""
    places, next_ids = torch.arange(len(follow)), torch.tensor(follow)
    return {
        "nll": float((wanted[places, next_ids] - got[places, next_ids]).mean()),
        "kl": float((wanted.exp() * (wanted - got)).sum(dim=1).mean()),
        "same": float((wanted.argmax(dim=1) == got.argmax(dim=1)).float().mean()),
    }


def means(measured: list[dict[str, float]], spread: str) -> dict[str, Any]:
    """Of each figure, and of the one that is named `spread` the least and the most."""
    mean = {name: round(statistics.fmean(one[name] for one in measured), 4) for name in measured[0]}
    every = [round(one[spread], 4) for one in measured]
    return {**mean, f"{spread}_least": min(every), f"{spread}_most": max(every)}


# --- documents ----------------------------------------------------------------------------------------------


def documents(bench: Bench, tokens: int, following: int) -> dict[str, dict[str, Any]]:
    """By way: means over the orders, and the spread of KL."""
    before = bench.ids(sentences_of("README.md"))[:100]
    texts, nexts, kvs = [], [], []
    for path in DOCUMENTS[:3]:
        every = bench.ids(sentences_of(path))
        texts.append(every[: tokens // 3])
        nexts.append(every[tokens // 3 :][:following])
        kvs.append([(k[100:], v[100:]) for k, v in bench.reference([*before, *texts[-1]])])
    found: dict[str, list[dict[str, float]]] = {}
    for order in ((2, 0, 1), (1, 2, 0), (0, 2, 1)):
        prompt = [token for each in order for token in texts[each]]
        wanted = bench.following(bench.prefill(prompt, PROMPT), len(prompt), nexts[order[-1]])
        # The reference is all of them in the order of the list, each behind other text.
        reference = [token for text in texts for token in text]
        kv = [
            tuple(torch.cat([each[layer][part] for each in kvs]) for part in (0, 1))
            for layer in range(len(kvs[0]))
        ]
        places = torch.cat([torch.arange(100, 100 + len(text)) for text in texts])
        runs = match_runs(prompt, 0, reference)
        ways: dict[str, dict[str, Any]] = {
            "documents": {"places": places},
            "documents, nothing more": {"places": places, "schedule": Schedule(first=0.0)},
            "documents, not turned": {"places": torch.arange(len(reference))},
        }
        for way, more in ways.items():
            made = SelectivePrefill(bench.engine, prompt, 0, PROMPT, matching=runs, **more).run(
                kv.__getitem__
            )
            assert made is not None
            got = bench.following(made.logits, len(prompt), nexts[order[-1]])
            measured = {
                "computed": made.computed_tokens / len(prompt),
                **apart(wanted, got, nexts[order[-1]]),
                "resemblance": 100 * runs.found / len(prompt),
            }
            found.setdefault(way, []).append(measured)
    return {way: means(each, "kl") for way, each in found.items()}


# --- time ---------------------------------------------------------------------------------------------------


def times(bench: Bench, rounds: int, lengths: int) -> dict[str, Any]:
    """By share of other sentences and length: whole over with a reference, by turns, and how much was computed."""
    return {
        f"{share:.0%}": {str(length): time_of(bench, rounds, share, length) for length in LENGTHS[:lengths]}
        for share in (0.02, 0.1)
    }


def time_of(bench: Bench, rounds: int, share: float, length: int) -> dict[str, Any]:
    sentences = [one for path in DOCUMENTS for one in sentences_of(path)]
    others = sentences_of("README.md")
    count = 1
    while len(bench.ids(sentences[:count])) < length:
        count += 1
    reference = bench.ids(sentences[:count])[:length]
    prompt = bench.ids(replaced(share)(sentences[:count], others, random.Random(length)))[:length]
    kv = bench.reference(reference)
    ratios, seconds, computed = [], [], 0
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        bench.prefill(prompt, PROMPT)
        middle = time.perf_counter()
        made = SelectivePrefill(bench.engine, prompt, 0, PROMPT).run(kv.__getitem__)
        end = time.perf_counter()
        assert made is not None
        computed = made.computed_tokens
        ratios.append((middle - begin) / (end - middle))
        seconds.append(middle - begin)
    # The first round packs products of new shapes.
    return {
        "whole_s": spread(seconds[1:]),
        "faster": spread(ratios[1:]),
        "computed": round(computed / len(prompt), 3),
    }


def main() -> None:
    words = parser(__doc__ or "")
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--tokens", type=int, default=700, help="of a document (700)")
    words.add_argument("--documents", type=int, default=3, choices=range(1, len(DOCUMENTS) + 1))
    words.add_argument(
        "--following", type=int, default=64, help="tokens behind a prompt that are compared (64)"
    )
    words.add_argument("--part", choices=("all", "quality", "time"), default="all")
    words.add_argument("--edits", type=int, default=len(EDITS), help="only the first so many")
    words.add_argument("--lengths", type=int, default=len(LENGTHS), help="only the first so many")
    options = parsed(words, rounds=1, tokens=100, documents=1, following=3, edits=1, lengths=1)
    bench = Bench()
    found: dict[str, Any] = {}
    lines = []
    if options.part in ("all", "time"):
        found["time"] = times(bench, options.rounds, options.lengths)
        lines += [
            f"{share} of sentences other, {length} tokens: {one['whole_s']['p50']:.3f} s whole, "
            f"{one['faster']['p50']:.2f} times faster with a reference ({one['faster']['min']:.2f} to "
            f"{one['faster']['max']:.2f}), {one['computed']:.1%} computed"
            for share, lengths in found["time"].items()
            for length, one in lengths.items()
        ]
    if options.part in ("all", "quality"):
        found["quality"] = quality(bench, options)
        found["quality"]["in another order"] = documents(bench, options.tokens, options.following)
        found["tokens"], found["documents"] = options.tokens, list(DOCUMENTS[: options.documents])
        lines.append("edit (resemblance), way: computed, dNLL, KL (least to most), same likeliest token")
        lines += [
            f"{edit} ({one['resemblance']:.0f} %), {way}: {one['computed']:.3f}, {one['nll']:+.3f}, "
            f"{one['kl']:.3f} ({one['kl_least']:.3f} to {one['kl_most']:.3f}), {one['same']:.2f}"
            for edit, ways in found["quality"].items()
            for way, one in ways.items()
        ]
    finish(options, found, lines)


if __name__ == "__main__":
    main()
