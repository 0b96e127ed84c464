"""References of prompts that are alike: which are known, when one is used, and from where."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from conductor_scripts import (
    LAYOUT,
    S,
    Script,
    arrived,
    decode,
    finished,
    keys,
    prefill,
    prefilled,
    stored,
)

from halfmoon.cli.status import describe
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.state.similar_index import (
    DOCUMENTS_KNOWN_MAX,
    PROMPTS_MAX,
    KnownDocument,
    SimilarIndex,
)
from halfmoon.conductor.replay.explain import reference_line
from halfmoon.conductor.replay.histories import PlacementAttempt
from halfmoon.schemas.decisions import Decision, StartPrefill
from halfmoon.schemas.events import (
    BlocksEvicted,
    FrontendJoined,
    PrefillFailed,
    RequestArrived,
    StoreSuspected,
)
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.similar import (
    NamedDocument,
    SimilarReuse,
    bands_of,
    named_document,
    resemblance_percent,
)
from halfmoon.workers.sketches import SHINGLE_TOKENS, sketch_of

ROOT = b"r" * 16
FAST = Layout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | {"numerics": "fast"})
REUSE = SimilarReuse(tokens=800, computed_tokens=300, resemblance=70)
KEPT = SimilarReuse(tokens=800, computed_tokens=300, resemblance=70, retained_tokens=610)


def tokens(count: int = 1_000, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(50_000) for _ in range(count)]


def edited(ids: list[int], percent: int, run: int = 20) -> list[int]:
    """Some runs of tokens are others."""
    draw = random.Random(percent)
    out: list[int] = []
    for at in range(0, len(ids), run):
        out += tokens(run, seed=at) if draw.randrange(100) < percent else ids[at : at + run]
    return out


def cluster(prefills: int = 1, layout: Layout = FAST, **policy: Any) -> Script:
    workers = [prefill(number, layout=layout) for number in range(prefills)]
    joined = FrontendJoined(frontend_id="f1", incarnation="i1")
    return Script(*workers, decode(layout=layout), joined, ttft_slo_ns=100 * S, **policy)


def known(ids: list[int], seed: int, tenant: str = "") -> RequestArrived:
    """A prompt as the index takes it."""
    return arrived(
        str(seed), block_keys=keys(len(ids) // 100, seed), sketch=sketch_of(ROOT, ids), tenant=tenant
    )


def asked(script: Script, name: str, ids: list[int], seed: int, **fields: Any) -> StartPrefill:
    sketch = fields.pop("sketch", sketch_of(ROOT, ids))
    event = arrived(name, len(ids), block_keys=keys(len(ids) // 100, seed=seed), sketch=sketch, **fields)
    return start(script(event))


def start(decisions: list[Decision]) -> StartPrefill:
    return next(one for one in decisions if isinstance(one, StartPrefill))


def computed(script: Script, order: StartPrefill, seed: int, **fields: Any) -> None:
    """Its prefill is over, and its blocks are on the worker's node."""
    if "similar" not in fields:
        script(stored(order.worker_id, keys(order.prompt_tokens // 100, seed=seed)))
    script(prefilled(order.order_id, order.request_id, order.worker_id, **fields))
    script(finished(order.order_id, order.request_id))


def after_one(script: Script) -> list[int]:
    ids = tokens()
    order = asked(script, "r1", ids, seed=1)
    assert order.reference is None
    computed(script, order, seed=1)
    return ids


# --- sketches -----------------------------------------------------------------------------------------------


def test_resemblance_is_about_the_share_of_common_shingles() -> None:
    ids = tokens(2_000)
    for percent in (0, 10, 30, 50, 100):
        other = edited(ids, percent)
        runs = [
            {tuple(each[at : at + SHINGLE_TOKENS]) for at in range(len(each) - SHINGLE_TOKENS + 1)}
            for each in (ids, other)
        ]
        true = 100 * len(runs[0] & runs[1]) / len(runs[0] | runs[1])
        assert abs(resemblance_percent(sketch_of(ROOT, ids), sketch_of(ROOT, other)) - true) < 15, percent


def test_prompts_under_other_roots_have_nothing_in_common() -> None:
    ids = tokens()
    one, other = sketch_of(ROOT, ids), sketch_of(b"s" * 16, ids)
    assert resemblance_percent(one, other) == 0
    assert not {*bands_of(one)} & {*bands_of(other)}


@pytest.mark.parametrize("count", range(SHINGLE_TOKENS))
def test_a_prompt_shorter_than_a_shingle_has_no_sketch(count: int) -> None:
    assert sketch_of(ROOT, tokens(count)) == b""
    assert bands_of(b"") == []


def test_what_is_alike_shares_a_band() -> None:
    ids = tokens(2_000)
    sketch = sketch_of(ROOT, ids)
    for percent in (10, 20, 30):
        assert {*bands_of(sketch)} & {*bands_of(sketch_of(ROOT, edited(ids, percent)))}, percent


# --- the index ----------------------------------------------------------------------------------------------


def test_the_most_alike_comes_first_and_of_equals_the_newest() -> None:
    index, ids = SimilarIndex(), tokens(2_000)
    for seed, percent in ((1, 30), (2, 10), (3, 10), (4, 100)):
        index.add(known(edited(ids, percent), seed))
    found = [prompt.block_keys[:8] for _, prompt in index.like("", sketch_of(ROOT, ids), 40)]
    assert found == [keys(1, seed)[:8] for seed in (3, 2, 1)]


def test_the_index_is_bounded_and_forgets_the_oldest() -> None:
    index = SimilarIndex()
    for seed in range(PROMPTS_MAX + 5):
        sketch = seed.to_bytes(8, "little") * 32
        index.add(arrived(str(seed), block_keys=keys(2, seed), sketch=sketch))
    assert len(index.prompts) == PROMPTS_MAX
    assert not list(index.like("", (2).to_bytes(8, "little") * 32, 100))
    assert list(index.like("", (5).to_bytes(8, "little") * 32, 100))


def test_a_restored_index_forgets_as_the_one_it_was_made_of() -> None:
    index, first, other = SimilarIndex(), tokens(seed=1), tokens(seed=3)
    for seed in (1, 2):
        index.add(known(tokens(seed=seed), seed))
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(index), type=SimilarIndex)
    for each in (index, restored):
        each.add(known(other, 1))
        assert not list(each.like("", sketch_of(ROOT, first), 40))
        assert list(each.like("", sketch_of(ROOT, other), 40))


def test_a_prompt_that_comes_again_is_one_entry() -> None:
    index, ids = SimilarIndex(), tokens()
    for _ in range(3):
        index.add(known(ids, 1))
    assert len(list(index.like("", sketch_of(ROOT, ids), 40))) == len(index.prompts) == 1


def test_a_tenant_finds_none_of_another_s_even_by_an_equal_sketch() -> None:
    index, ids = SimilarIndex(), tokens()
    index.add(known(ids, 1, "acme"))
    assert list(index.like("acme", sketch_of(ROOT, ids), 40))
    assert not list(index.like("other", sketch_of(ROOT, ids), 40))


# --- documents ----------------------------------------------------------------------------------------------

ONE, TWO, THREE = (tokens(500, seed) for seed in (21, 22, 23))


def document(ids: list[int], prompt: list[int], root: bytes = ROOT) -> NamedDocument:
    found = named_document(root, pack_tokens(prompt), pack_tokens(ids))
    assert found is not None
    return found


@pytest.mark.parametrize("joined", [0, 3])
def test_a_document_is_found_in_a_prompt_though_its_ends_are_joined_with_others(joined: int) -> None:
    prompt = [*tokens(70, 9), *ONE, *tokens(30, 8)]
    prompt[70 : 70 + joined] = [1] * joined
    found = document(ONE, prompt)
    ends = 4 if joined else 0
    assert (found.first_token, found.tokens) == (70 + ends, 500 - 2 * ends)
    assert found.name == document(ONE, ONE).name
    assert found.name != document(ONE, ONE, b"s" * 16).name
    assert named_document(ROOT, pack_tokens(prompt), pack_tokens(TWO)) is None
    assert named_document(ROOT, pack_tokens(ONE), pack_tokens(ONE[:31])) is None, "too short to be worth it"
    # Bytes that begin in the middle of a token are other tokens.
    assert named_document(ROOT, b"\0" + pack_tokens(ONE) + b"\0" * 3, pack_tokens(ONE)) is None


def read(script: Script, name: str, seed: int, *documents: list[int], tenant: str = "", **fields: Any) -> Any:
    """A prompt of some tokens of its own and these documents; the order."""
    prompt = [*tokens(100, seed + 50), *(token for one in documents for token in one)]
    named = [document(one, prompt) for one in documents]
    return asked(script, name, prompt, seed, sketch=b"", documents=named, tenant=tenant, **fields)


def test_documents_of_two_prompts_stand_in_in_another_order() -> None:
    script = cluster()
    for number, ids in enumerate((ONE, TWO), 1):
        order = read(script, f"r{number}", number, ids)
        assert order.reference is None
        computed(script, order, seed=number, prompt_tokens=600)
    whole = read(script, "plain", 8, tokens(500, 41), tokens(500, 42))
    order = read(script, "r3", 3, TWO, ONE)
    first = order.reference
    assert first is not None
    assert [(one.node_id, one.block_keys, one.first_block) for one in first.parts] == [
        ("n-p0", keys(6, 2)[16:], 1),
        ("n-p0", keys(6, 1)[16:], 1),
    ]
    assert first.named
    assert first.resemblance == 90
    assert order.predicted.prefill_ns < 0.7 * whole.predicted.prefill_ns
    went = prefilled(order.order_id, "r3", similar=REUSE, prompt_tokens=1_100)
    line = reference_line(first, PlacementAttempt(order=order, seq=1, at_ns=1, prefilled=went))
    assert line.startswith(
        "KV of documents stands in: 5 blocks at n-p0, 5 blocks at n-p0; 90 % of the tokens"
    )


def test_no_block_is_asked_for_twice() -> None:
    """Two documents of one prompt have the block between them in common; the same one is named twice."""
    script = cluster()
    half = [*tokens(50, 31), *ONE]
    computed(script, read(script, "r1", 1, half, TWO), seed=1, prompt_tokens=1_150)
    order = read(script, "r2", 2, TWO, half, TWO)
    assert order.reference is not None
    assert [(one.block_keys, one.first_block) for one in order.reference.parts] == [
        (keys(11, 1)[16 * 6 :], 6),
        (keys(11, 1)[16 : 16 * 6], 1),
    ]


def test_tokens_of_two_documents_count_once() -> None:
    """One is a part of the other, and was computed in a prompt of its own."""
    script = cluster()
    for number, ids in enumerate((ONE, ONE[100:400]), 1):
        computed(script, read(script, f"r{number}", number, ids), seed=number, prompt_tokens=100 + len(ids))
    prompt = [*ONE, *tokens(400, 77)]
    named = [document(one, prompt) for one in (ONE[100:400], ONE)]
    order = asked(script, "r3", prompt, 3, sketch=b"", documents=named)
    assert order.reference is not None
    assert order.reference.resemblance == 100 * len(ONE) // len(prompt)


@pytest.mark.parametrize("why", ["tenant", "root", "gone", "a document of four", "in the prefix"])
def test_what_is_not_known_or_of_no_use_does_not_stand_in(why: str) -> None:
    script = cluster()
    order = read(script, "r1", 1, ONE, TWO, tenant="acme")
    computed(script, order, seed=1, prompt_tokens=1_100)
    match why:
        case "tenant":
            assert read(script, "r2", 2, ONE, TWO, tenant="other").reference is None
        case "root":
            named = [document(one, [*ONE, *TWO], b"s" * 16) for one in (ONE, TWO)]
            order = asked(script, "r2", [*ONE, *TWO], 2, sketch=b"", documents=named, tenant="acme")
            assert order.reference is None
        case "gone":
            script(BlocksEvicted(node_id="n-p0", incarnation="i1", block_keys=keys(11, 1)[16:]))
            assert read(script, "r2", 2, ONE, TWO, tenant="acme").reference is None
        case "a document of four":
            assert read(script, "r2", 2, ONE, *[THREE] * 3, tenant="acme").reference is None
        case "in the prefix":
            order = read(script, "r2", 1, ONE, TWO, *[THREE] * 2, tenant="acme")
            assert order.local_blocks == 11
            assert order.reference is None


def test_documents_that_stood_in_are_known_of_no_further_prompt() -> None:
    script = cluster()
    computed(script, read(script, "r1", 1, ONE), seed=1, prompt_tokens=600)
    order = read(script, "r2", 2, ONE, THREE[:200])
    assert order.reference is not None
    before = script.core.state.similar.documents
    computed(script, order, seed=2, similar=REUSE, prompt_tokens=800)
    assert script.core.state.similar.documents == before
    assert list(before.values()) == [KnownDocument("", 1, keys(6, 1)[16:])]


def test_the_documents_that_are_known_are_bounded() -> None:
    index = SimilarIndex()
    for number in range(DOCUMENTS_KNOWN_MAX + 2):
        name = number.to_bytes(16, "big")
        named = [NamedDocument(name=name, first_token=0, tokens=150)]
        index.add_documents(arrived(str(number), block_keys=keys(2, number), documents=named), 100)
    assert len(index.documents) == DOCUMENTS_KNOWN_MAX
    assert index.document("", (1).to_bytes(16, "big")) is None
    assert index.document("", (2).to_bytes(16, "big")) == KnownDocument("", 0, keys(2, 2))


# --- decisions ----------------------------------------------------------------------------------------------


def test_a_similar_prompt_stands_in_and_the_prediction_is_shorter() -> None:
    script = cluster()
    ids = after_one(script)
    whole = asked(script, "plain", tokens(seed=9), seed=9, sketch=b"")
    order = asked(script, "r2", edited(ids, 10), seed=2)
    assert order.reference is not None
    assert order.reference.node_id == "n-p0"
    assert order.reference.block_keys == keys(10, 1)
    assert order.reference.resemblance > 60
    assert order.predicted.prefill_ns < 0.7 * whole.predicted.prefill_ns


def test_a_prompt_whose_answer_ends_before_its_prefill_is_known_too() -> None:
    """As those of one token do."""
    script = cluster()
    ids = tokens()
    order = asked(script, "r1", ids, seed=1)
    script(finished(order.order_id, "r1"))
    script(stored("p0", keys(10, 1)))
    script(prefilled(order.order_id, "r1", prompt_tokens=1_000))
    assert asked(script, "r2", edited(ids, 10), seed=2).reference is not None


def test_what_stood_in_is_no_reference_and_teaches_no_cost() -> None:
    script = cluster(correction_window=8)
    ids = after_one(script)
    order = asked(script, "r2", edited(ids, 10), seed=2)
    before = script.core.state.workers["p0"].cost
    computed(script, order, seed=2, similar=REUSE, compute_ns=1, prompt_tokens=1_000)
    assert script.core.state.workers["p0"].cost == before
    assert [prompt.block_keys for prompt in script.core.state.similar.prompts.values()] == [keys(10, 1)]
    counters = script.core.state.counters
    assert (counters.similar_requests, counters.similar_tokens, counters.similar_computed_tokens) == (
        1,
        800,
        300,
    )


def test_what_is_left_out_needs_no_room_at_the_decode_worker() -> None:
    script = cluster()
    ids = after_one(script)
    order = asked(script, "r2", edited(ids, 10), seed=2, max_tokens=100)
    worker = script.core.state.workers["d0"]
    assert worker.batch is not None
    blocks, context = worker.reserved_blocks, worker.batch.context_tokens
    event = prefilled(order.order_id, "r2", similar=KEPT, prompt_tokens=1_000)
    script(event)
    assert (blocks - worker.reserved_blocks, context - worker.batch.context_tokens) == (3, 390)
    script(event)
    assert (blocks - worker.reserved_blocks, context - worker.batch.context_tokens) == (3, 390), (
        "counted twice"
    )
    script(finished(order.order_id, "r2"))
    assert (worker.reserved_blocks, worker.batch.context_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("similar", "told"),
    [
        (REUSE, "for 800 tokens, 300 computed on the mean over layers"),
        (KEPT, "; each layer keeps 610 tokens of the prompt"),
        (None, "it was not used"),
    ],
)
def test_an_explanation_says_what_stood_in(similar: SimilarReuse | None, told: str) -> None:
    script = cluster()
    ids = after_one(script)
    order = asked(script, "r2", edited(ids, 10), seed=2)
    assert order.reference is not None
    went = prefilled(order.order_id, "r2", similar=similar, prompt_tokens=1_000)
    line = reference_line(order.reference, PlacementAttempt(order=order, seq=1, at_ns=1, prefilled=went))
    assert "10 blocks at n-p0" in line
    assert told in line, line


def test_status_says_what_stood_in() -> None:
    counts = ("blocks", "prompt_tokens", "cached_local_tokens", "cached_fetched_tokens", "similar_requests")
    cache = dict.fromkeys(counts, 1) | {"similar_tokens": 800, "similar_computed_tokens": 300}
    status = {"model": "m", "ready": True, "nats": "n", "http": "h", "nodes": [], "conductors": []}
    assert "stood in for 800 tokens of 1 requests; of these 300" in describe({**status, "cache": cache})
    assert "similar" not in describe({**status, "cache": cache | {"similar_requests": 0}})


@pytest.mark.parametrize(
    "why",
    ["no sketch", "unlike", "another root", "another tenant", "short", "exact", "off", "gone", "suspected"],
)
def test_without_a_reference_a_prompt_is_computed(why: str) -> None:
    policy = {"similar_tokens_min": 0} if why == "off" else {}
    script = cluster(layout=LAYOUT if why == "exact" else FAST, **policy)
    ids = after_one(script)
    match why:
        case "gone":
            script(BlocksEvicted(node_id="n-p0", incarnation="i1", block_keys=keys(10, 1)[16 * 5 :]))
        case "suspected":
            script(StoreSuspected(node_id="n-p0", reporter_id="n-d0", reason="x"))
        case _:
            pass
    other = {"unlike": tokens(seed=7), "short": ids[:600]}.get(why, edited(ids, 10))
    sketch = {"no sketch": b"", "another root": sketch_of(b"s" * 16, other)}.get(why, sketch_of(ROOT, other))
    tenant = "other" if why == "another tenant" else ""
    assert asked(script, "r2", other, seed=2, sketch=sketch, tenant=tenant).reference is None


def test_the_exact_prefix_goes_first_and_what_it_leaves_must_be_worth_it() -> None:
    script = cluster()
    ids = after_one(script)
    same_head = keys(4, 1) + keys(6, 2)
    event = arrived("r2", 1_000, block_keys=same_head, sketch=sketch_of(ROOT, edited(ids, 10)))
    order = start(script(event))
    assert order.local_blocks == 4
    assert order.reference is None, "600 tokens are left"
    longer = [*ids, *tokens(500, seed=3)]
    event = arrived("r3", 1_500, block_keys=keys(4, 1) + keys(11, 3), sketch=sketch_of(ROOT, longer))
    order = start(script(event))
    assert order.local_blocks == 4
    assert order.reference is not None


def test_a_copy_on_the_workers_own_node_is_read_before_another() -> None:
    script = cluster(2, fetch_replicas=1)
    ids = after_one(script)
    held = next(iter(script.core.state.index.holders(keys(1, 1))))
    first = asked(script, "r2", edited(ids, 10), seed=2)
    # The one that is idle; from another node the reference is fetched.
    second = asked(script, "r3", edited(ids, 11), seed=3)
    assert {first.worker_id, second.worker_id} == {"p0", "p1"}
    for order in (first, second):
        assert order.reference is not None
        assert order.reference.node_id == held
    both = cluster(2, fetch_replicas=1)
    after_one(both)
    for worker_id in ("p0", "p1"):
        both(stored(worker_id, keys(10, 1)))
    order = asked(both, "r2", edited(ids, 10), seed=2)
    assert order.reference is not None
    assert order.reference.node_id == f"n-{order.worker_id}"
    assert order.reference.replicas == [f"n-{'p1' if order.worker_id == 'p0' else 'p0'}"]


def test_a_request_that_is_placed_again_is_computed_whole() -> None:
    script = cluster()
    ids = after_one(script)
    order = asked(script, "r2", edited(ids, 10), seed=2)
    assert order.reference is not None
    failed = PrefillFailed(order_id=order.order_id, request_id="r2", worker_id="p0", reason="x")
    assert start(script(failed)).reference is None


def test_a_restored_core_chooses_the_same_reference() -> None:
    script = cluster()
    ids = after_one(script)
    for seed in range(3, 6):
        order = asked(script, f"r{seed}", edited(ids, 10 * seed), seed=seed, sketch=b"")
        computed(script, order, seed=seed)
    restored = Core.restore(script.core.snapshot(), examined=True)
    assert restored.digest() == script.core.digest()
    order = asked(script, "r9", edited(ids, 10), seed=9)
    again = start(restored.step(script.log[-1]))
    assert again == order
    assert again.reference is not None
