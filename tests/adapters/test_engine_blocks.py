"""An engine's events, and our blocks that follow from them: keys as the frontend computes them, and lies contained."""

from __future__ import annotations

import random

import msgspec
import pytest

from halfmoon.schemas.keys import chain_keys, split_keys
from halfmoon.workers.adapters.engine_blocks import BlockSizeInvalid, EngineBlocks, salt_of
from halfmoon.workers.adapters.kv_events import EngineCleared, EngineRemoved, EngineStored, read_batch

OURS, THEIRS = 64, 16
ROOT, OTHER_ROOT = b"r" * 16, b"s" * 16
TOKENS = list(range(1000, 1000 + 3 * OURS))
KEYS = split_keys(chain_keys(ROOT, TOKENS, OURS))


def stored(
    first: int, blocks: int, *, root: bytes = ROOT, tokens: list[int] = TOKENS, **fields: object
) -> EngineStored:
    """Blocks `first` and on of the prompt, whose hashes are its root and their place."""
    names = [_name(root, tokens, place) for place in range(first, first + blocks)]
    event = EngineStored(
        block_hashes=names,  # type: ignore[arg-type]
        parent_block_hash=_name(root, tokens, first - 1) if first else None,
        token_ids=tokens[first * THEIRS : (first + blocks) * THEIRS],
        block_size=THEIRS,
        medium="GPU",
        extra_keys=[[salt_of(root)], *[None] * (blocks - 1)] if first == 0 else None,
    )
    return msgspec.structs.replace(event, **fields)


def removed(*places: int, root: bytes = ROOT, tokens: list[int] = TOKENS) -> EngineRemoved:
    return EngineRemoved(block_hashes=[_name(root, tokens, place) for place in places])


def _name(root: bytes, tokens: list[int], place: int) -> bytes:
    return root + b"%d" % hash(tuple(tokens[: (place + 1) * THEIRS]))


def mirror(blocks_max: int = 100) -> EngineBlocks:
    return EngineBlocks(block_tokens=OURS, blocks_max=blocks_max)


def told(
    blocks: EngineBlocks, *events: EngineStored | EngineRemoved | EngineCleared
) -> list[tuple[bool, bytes]]:
    return [(change.stored, change.key) for change in blocks.apply(events)]


def test_a_block_of_ours_is_there_when_all_of_the_engines_that_make_it_are() -> None:
    blocks = mirror()
    assert told(blocks, stored(0, 3)) == []
    assert told(blocks, stored(3, 2)) == [(True, KEYS[0])]
    assert told(blocks, stored(5, 7)) == [(True, KEYS[1]), (True, KEYS[2])]
    assert blocks.leading(b"".join(KEYS)) == 3
    assert told(blocks, removed(6)) == [(False, KEYS[1])]
    assert blocks.leading(b"".join(KEYS)) == 1
    assert told(blocks, stored(6, 1)) == [(True, KEYS[1])]


def test_a_block_that_the_engine_has_twice_is_there_until_both_are_gone() -> None:
    blocks = mirror()
    told(blocks, stored(0, 4), stored(0, 4))
    assert told(blocks, removed(3)) == []
    assert told(blocks, removed(3)) == [(False, KEYS[0])]


def test_roots_are_kept_apart_and_what_has_none_of_ours_is_not_told_of() -> None:
    blocks = mirror()
    theirs = split_keys(chain_keys(OTHER_ROOT, TOKENS, OURS))
    assert told(blocks, stored(0, 4, root=OTHER_ROOT)) == [(True, theirs[0])]
    assert told(blocks, stored(0, 4)) == [(True, KEYS[0])]
    unsalted = TOKENS[::-1]
    for keys in (None, [None] * 4, [["their salt"], None, None, None], [[salt_of(ROOT), "lora"], None]):
        assert told(blocks, stored(0, 4, tokens=unsalted, extra_keys=keys)) == [], keys
    assert told(blocks, stored(0, 4, tokens=unsalted, lora_name="a", lora_id=1)) == []
    assert blocks.passed_over["of_others"] == 20
    assert told(blocks, stored(4, 4, tokens=unsalted)) == []
    assert blocks.passed_over["parent_unknown"] == 4


def test_sglang_tells_the_salt_of_each_event() -> None:
    blocks = mirror()
    own = {"extra_keys": None, "cache_salt": salt_of(ROOT)}
    assert told(blocks, stored(0, 3, **own), stored(3, 5, **own)) == [(True, KEYS[0]), (True, KEYS[1])]
    nobodys = [stored(0, 4, root=OTHER_ROOT, extra_keys=None, cache_salt=salt) for salt in ("theirs", None)]
    assert told(blocks, *nobodys) == []
    assert blocks.passed_over["of_others"] == 8


def test_prompts_that_part_within_a_block_share_none_of_it() -> None:
    blocks = mirror()
    other = [*TOKENS[: 2 * THEIRS], *range(5000, 5000 + 2 * THEIRS)]
    told(blocks, stored(0, 4))
    assert told(blocks, stored(2, 2, tokens=other, parent_block_hash=_name(ROOT, TOKENS, 1))) == [
        (True, chain_keys(ROOT, other, OURS))
    ]
    gone = told(blocks, removed(1))
    assert sorted(gone) == sorted([(False, KEYS[0]), (False, chain_keys(ROOT, other, OURS))])


def test_clearing_takes_all() -> None:
    blocks = mirror()
    told(blocks, stored(0, 12))
    assert sorted(told(blocks, EngineCleared())) == sorted((False, key) for key in KEYS)
    assert (blocks.keys(), len(blocks)) == ([], 0)
    assert told(blocks, stored(0, 4)) == [(True, KEYS[0])]


def test_after_lost_events_nothing_is_certain_but_what_new_blocks_follow() -> None:
    blocks = mirror()
    told(blocks, stored(0, 8))
    assert sorted((change.stored, change.key) for change in blocks.doubt()) == sorted(
        [(False, KEYS[0]), (False, KEYS[1])]
    )
    assert blocks.keys() == []
    # The engine would not store these were those before them not there.
    assert told(blocks, stored(8, 4)) == [(True, KEYS[1]), (True, KEYS[0]), (True, KEYS[2])]
    blocks.doubt()
    assert told(blocks, stored(3, 1)) == [(True, KEYS[0])]


def test_lies_change_nothing() -> None:
    blocks = mirror()
    told(blocks, stored(0, 4))
    lies = [
        stored(4, 2, token_ids=TOKENS[:THEIRS]),  # too few tokens
        stored(0, 4, token_ids=TOKENS[THEIRS : THEIRS + OURS]),  # other tokens under the same hash
        stored(8, 4),  # behind a block that nobody told of
        stored(4, 4, block_size=32, token_ids=TOKENS[: 4 * 32]),  # blocks of another size
        stored(4, 4, kv_cache_spec_kind="sliding_window"),
        removed(9, 10),  # never stored
    ]
    for lie in lies:
        assert told(blocks, lie) == [], lie
    assert blocks.keys() == [KEYS[0]]
    assert set(blocks.passed_over) == {
        "tokens_do_not_fit",
        "contradiction",
        "parent_unknown",
        "of_another_size",
        "of_another_kind",
    }


def test_an_engine_that_tells_of_more_than_it_can_have_is_not_believed() -> None:
    blocks = mirror(blocks_max=6)
    told(blocks, stored(0, 12))
    assert (len(blocks), blocks.keys(), blocks.passed_over["more_than_fit"]) == (6, [KEYS[0]], 6)


def test_a_chain_that_bites_its_tail_ends() -> None:
    blocks = mirror()
    told(blocks, stored(0, 4), removed(0))
    circle = stored(0, 1, parent_block_hash=_name(ROOT, TOKENS, 3), extra_keys=None)
    told(blocks, circle, stored(1, 1), removed(1), stored(1, 1))
    blocks.doubt()
    assert told(blocks, stored(2, 1)) == []


def test_blocks_that_do_not_make_up_ours_are_refused_by_size() -> None:
    with pytest.raises(BlockSizeInvalid, match=r"64 tokens are no multiple of the engine's 48"):
        mirror().apply([stored(0, 1, block_size=48, token_ids=TOKENS[:48])])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_told_of_is_what_a_plain_count_says(seed: int) -> None:
    """Random stores and removals of three prompts that begin alike, against a set of all the engine's blocks."""
    draw = random.Random(seed)
    prompts = [
        [*TOKENS[:shared], *(9000 + 500 * n + each for each in range(len(TOKENS) - shared))]
        for n, shared in enumerate((0, 40, 100))
    ]
    blocks, there = mirror(1_000), {}
    announced: dict[bytes, bool] = {}
    for _ in range(300):
        tokens = draw.choice(prompts)
        have = 0
        while have < 12 and there.get(_name(ROOT, tokens, have)):
            have += 1
        if have < 12 and draw.random() < 0.6:
            count = draw.randint(1, 12 - have)
            event: EngineStored | EngineRemoved = stored(have, count, tokens=tokens)
            there.update({_name(ROOT, tokens, place): True for place in range(have, have + count)})
        elif have:
            # From the end of a prompt, as an engine does; not from under another one that goes on.
            place = have - 1
            name = _name(ROOT, tokens, place)
            children = {
                _name(ROOT, other, place + 1) for other in prompts if _name(ROOT, other, place) == name
            }
            if any(there.get(child) for child in children):
                continue
            event = removed(place, tokens=tokens)
            there[name] = False
        else:
            continue
        for change in blocks.apply([event]):
            assert (change.key in announced) != change.stored, "told twice"
            announced.pop(change.key, None)
            if change.stored:
                announced[change.key] = True
        expected = {
            key
            for tokens in prompts
            for number, key in enumerate(split_keys(chain_keys(ROOT, tokens, OURS)))
            if all(there.get(_name(ROOT, tokens, place)) for place in range(4 * number, 4 * number + 4))
        }
        assert set(announced) == set(blocks.keys()) == expected


def test_bad_payloads_cost_themselves_alone() -> None:
    good = {"type": "BlockRemoved", "block_hashes": [1, b"x"], "medium": None}
    bad = [
        {"type": "BlockRemoved", "block_hashes": [b"n" * 65]},
        {"type": "BlockRemoved"}, {"type": "Unheard"}, {"type": "BlockRemoved", "block_hashes": ["a"]}, 7, None, [],
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [-1], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 0},
    ]  # fmt: skip
    for form in ([1.5, [*bad, good], 0], {"ts": 1.5, "events": [*bad, good]}):
        batch = read_batch(msgspec.msgpack.encode(form))
        assert (batch.events, batch.malformed, batch.at_s) == (
            [EngineRemoved(block_hashes=[1, b"x"])],
            len(bad),
            1.5,
        )
    for payload in (
        b"",
        b"\xc1",
        b"\x91" * 5000,
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode({"ts": 1}),
    ):
        assert read_batch(payload)[:2] == ([], 1)


@pytest.mark.parametrize("time_s", [float("inf"), float("-inf"), float("nan"), 1e12, -1.0, None, "x", 7])
def test_a_time_that_no_clock_shows_is_none(time_s: object) -> None:
    assert read_batch(msgspec.msgpack.encode([time_s, [], 0])) == ([], 0, 0.0)
