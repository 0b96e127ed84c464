"""The index against a plain model of it: a set of keys for each node and tier."""

from __future__ import annotations

import random

import pytest
from conductor_scripts import keys

from halfmoon.conductor.core.state.block_index import BlockIndex
from halfmoon.schemas.keys import split_keys


def index_of(**held: bytes) -> BlockIndex:
    index = BlockIndex()
    for node_id, block_keys in held.items():
        index.join(node_id)
        index.add(node_id, block_keys, "dram")
    return index


def test_every_node_is_matched_at_once_up_to_its_own_run() -> None:
    chain = keys(300)
    index = index_of(a=chain, b=chain[: 16 * 17], c=chain[: 16 * 16], d=keys(5, seed=2), e=b"")
    assert index.match(chain, 300) == {"a": 300, "b": 17, "c": 16}
    assert index.match(chain, 16) == {"a": 16, "b": 16, "c": 16}
    assert index.match(chain, 0) == {}
    assert index.match(b"", 10) == {}


def test_a_run_ends_at_the_first_block_that_is_missing() -> None:
    chain = keys(10)
    index = index_of(a=chain)
    index.discard("a", chain[16 * 4 : 16 * 5], "dram")
    assert index.match(chain, 10) == {"a": 4}
    index.discard("a", chain[:16], "dram")
    assert index.match(chain, 10) == {}


def test_a_block_is_there_while_one_tier_has_it() -> None:
    chain = keys(4)
    index = index_of(a=chain)
    index.add("a", chain, "ssd")
    index.discard("a", chain[32:], "dram")
    assert (index.match(chain, 4), index.runs(chain, 4, dram_only=True)) == ({"a": 4}, [(2, ["a"])])
    index.discard("a", chain[32:], "ssd")
    assert index.match(chain, 4) == {"a": 2}
    assert index.holders(chain[:16]) == ["a"]


def test_a_node_that_leaves_takes_its_blocks_and_its_bit_is_used_again() -> None:
    chain = keys(4)
    index = index_of(a=chain, b=chain[:32])
    index.leave("a")
    index.join("c")
    assert (index.match(chain, 4), index.node_ids, index.blocks) == ({"b": 2}, ["b", "c"], 2)
    index.join("b")
    assert (index.match(chain, 4), index.blocks) == ({}, 0)


def test_an_image_gives_the_same_index() -> None:
    index = index_of(**{f"n{number}": keys(number) for number in range(20)})
    index.leave("n7")
    again = BlockIndex.from_image(index.image())
    assert again.image() == index.image()
    assert again.match(keys(20), 20) == index.match(keys(20), 20)


def test_random_histories_match_as_a_plain_model_does() -> None:
    for seed in range(10):
        draw = random.Random(seed)
        index = BlockIndex()
        model: dict[str, dict[str, set[bytes]]] = {}
        chain = keys(60)
        split = split_keys(chain)
        for _ in range(300):
            node_id = f"n{draw.randrange(12)}"
            start = draw.choice([0, 0, 0, draw.randrange(60)])
            part = split[start : start + draw.randrange(60)]
            tier = draw.choice(["dram", "dram", "ssd"])
            match draw.randrange(6):
                case 0 | 1 | 2 if node_id in model:
                    index.add(node_id, b"".join(part), tier)
                    model[node_id][tier].update(part)
                case 3 if node_id in model:
                    index.discard(node_id, b"".join(part), tier)
                    model[node_id][tier].difference_update(part)
                case 4:
                    index.join(node_id)
                    model[node_id] = {"dram": set(), "ssd": set()}
                case 5 if draw.random() < 0.3:
                    index.leave(node_id)
                    model.pop(node_id, None)
            index.check()
            expected = {}
            for name, held in model.items():
                run = next((i for i, key in enumerate(split) if key not in held["dram"] | held["ssd"]), 60)
                if run:
                    expected[name] = run
            assert index.match(chain, 60) == expected


@pytest.mark.parametrize("nodes", [0, 1, 8, 9, 16, 17, 33, 64, 65, 200])
def test_an_index_comes_back_from_its_image_as_it_was(nodes: int) -> None:
    draw = random.Random(nodes)
    index = BlockIndex()
    for number in range(nodes):
        index.join(f"n{number}")
        index.add(f"n{number}", keys(draw.randrange(1, 30)), draw.choice(["dram", "ssd"]))
    again = BlockIndex.from_image(index.image())
    again.check()
    assert again.image() == index.image()
    assert again.match(keys(30), 30) == index.match(keys(30), 30)
    assert len(again.match(keys(30), 30)) == nodes


def test_the_nodes_that_are_named_hold_between_them_all_that_any_node_holds() -> None:
    chain = keys(8)
    index = index_of(
        a=chain[: 16 * 5],
        b=chain[16 * 4 : 16 * 7],
        c=chain[16 * 3 : 16 * 5],
        d=chain[:16],
        e=b"",
        f=keys(3, seed=2),
    )
    # `a` has five of the eight and `b` the two that are left; nobody has the last. Two more, as replicas.
    assert index.nodes_with(chain) == ["a", "b", "c", "d"]
    assert index.nodes_with(chain, ["a", "nobody"]) == ["b", "c", "d"]
    assert index.nodes_with(chain[16 * 7 :]) == []
    assert index.nodes_with(b"") == []


def test_blocks_on_an_ssd_are_found_and_a_replica_is_named_once() -> None:
    chain = keys(2)
    index = index_of(a=chain[:16], b=b"")
    index.add("a", chain, "ssd")
    index.add("b", chain, "ssd")
    assert index.nodes_with(chain) == ["a", "b"]
    index.leave("a")
    assert index.nodes_with(chain) == ["b"]


@pytest.mark.parametrize("seed", range(20))
def test_a_cover_leaves_no_block_out(seed: int) -> None:
    draw = random.Random(seed)
    chain = keys(40, seed=seed)
    names = split_keys(chain)
    held = {f"n{node}": [key for key in names if draw.random() < 0.15] for node in range(12)}
    index = index_of(**{node: b"".join(own) for node, own in held.items()})
    besides = draw.sample(sorted(held), 3)
    found = index.nodes_with(chain, besides)
    assert not {*found} & {*besides}
    assert len({*found}) == len(found)
    anywhere = {key for node, own in held.items() if node not in besides for key in own}
    assert {key for node in found for key in held[node]} == anywhere
