"""`halfmoon audit`: a sample of a node's cached blocks is computed again by the model, and compared bit by bit.

A checksum proves that a block has the bytes that were put. Only computing proves that these are the KV of the block's
tokens, and in exact numerics it must give the same bits. A block's tokens are stored nowhere: they are in the KV events
of the node's store agent, where it publishes them with tokens.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import orjson

from halfmoon.cli import model as models
from halfmoon.cli.audit.cached_blocks import Chain, in_computing_order, read_events
from halfmoon.cli.declared import add_options
from halfmoon.cli.operator.policy import operator_bus
from halfmoon.cli.options import OptionInvalid, add_bus, add_config
from halfmoon.cli.shared_options import ModelOptions
from halfmoon.schemas.policy import Layout
from halfmoon.store.client import StoreClient
from halfmoon.store.errors import BlockMissing, StoreError
from halfmoon.workers.options import WorkerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedBlock:
    """`layer`: the first one whose bits differ; -1: none does. `problem`: why the block was not compared."""

    chain: Chain
    layer: int = -1
    problem: StoreError | None = None

    @property
    def result(self) -> str:
        if isinstance(self.problem, BlockMissing):
            return "gone"
        return "unreadable" if self.problem is not None else "wrong" if self.layer >= 0 else "right"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", help="whose blocks are looked at; its store agent is on this host")
    parser.add_argument(
        "--kv-events-replay", metavar="ADDRESS", default="", help="that of the node's store agent"
    )
    parser.add_argument("--sample", type=int, default=16, metavar="N", help="blocks, drawn from all")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; else another one each time")
    parser.add_argument("--tenant", default="", help="whose blocks; else those that are nobody's")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_options(parser, ModelOptions)
    add_options(parser, WorkerOptions, only=("attention_kernel", "threads"))
    add_bus(parser)
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0 when each block that could be read is right, 2 when one is wrong, 1 when none could be compared."""
    if not args.kv_events_replay:
        raise OptionInvalid("--kv-events-replay: without it nobody tells which tokens a block is of")
    if args.sample < 1:
        raise OptionInvalid(f"--sample {args.sample}: at least 1")
    layout = models.layout_of(args)
    if layout.numerics != "exact" or layout.layers == 0:
        raise OptionInvalid("--numerics: only exact numerics give the same bits again")
    cached = await read_events(args.kv_events_replay)
    known = cached.known()
    drawn = random.Random(args.seed).sample(known, min(args.sample, len(known)))
    chains = in_computing_order([chain for key in drawn if (chain := cached.chain(key)) is not None])
    bus = await operator_bus(args, "audit")
    try:
        client = StoreClient(bus, node_id=args.node, tenant=args.tenant)
        try:
            await client.attach()
            verdicts = await compare(args, layout, client, chains) if chains else []
        finally:
            await client.close()
    finally:
        await bus.close()
    return told(verdicts, known=len(known), as_json=args.json)


async def compare(
    args: argparse.Namespace, layout: Layout, client: StoreClient, chains: list[Chain]
) -> list[AuditedBlock]:
    """Raises OptionInvalid: the node's blocks are another model's, or of another layout."""
    different = [
        f"{name} {getattr(client.layout, name)}, not {getattr(layout, name)}"
        for name in layout.__struct_fields__
        if name != "model" and getattr(client.layout, name) != getattr(layout, name)
    ]
    if different:
        raise OptionInvalid(f"the blocks of {args.node} have {', '.join(different)}")
    from halfmoon.cli.audit.recomputing import Recomputing

    blocks_max = max(len(chain.keys) for chain in chains)
    engine = models.build_engine(args, layout, kv_blocks=blocks_max)
    _, doubt = models.prepare_numerics(engine, layout)
    if doubt:
        raise OptionInvalid(doubt)
    recomputing = Recomputing(engine, blocks_max=blocks_max)
    verdicts, there = [], np.empty((layout.layers, layout.block_bytes // layout.layers), np.uint8)
    for chain in chains:
        (problem,) = await client.batch_get_into([chain.keys[-1]], [there], verify=True)
        if problem is not None:
            verdicts.append(AuditedBlock(chain=chain, problem=problem))
            continue
        differing = np.flatnonzero((recomputing.last_block(chain) != there).any(axis=1))
        verdicts.append(AuditedBlock(chain=chain, layer=int(differing[0]) if len(differing) else -1))
    return verdicts


def told(verdicts: list[AuditedBlock], *, known: int, as_json: bool) -> int:
    """Print the verdicts; the exit status."""
    counts = Counter(verdict.result for verdict in verdicts)
    wrong = [verdict for verdict in verdicts if verdict.result == "wrong"]
    if as_json:
        blocks = [
            {
                "key": verdict.chain.keys[-1].hex(),
                "block": len(verdict.chain.keys) - 1,
                "layer": verdict.layer,
            }
            for verdict in wrong
        ]
        print(orjson.dumps({"known": known, "results": counts, "wrong": blocks}).decode())
    else:
        for verdict in wrong:
            place = f"block {len(verdict.chain.keys) - 1} of its prompt, from layer {verdict.layer} on"
            print(f"wrong: {verdict.chain.keys[-1].hex()}, {place}: not the KV of its tokens")
        for verdict in verdicts:
            if verdict.result == "unreadable":
                print(f"unreadable: {verdict.problem}")
        print(
            f"{counts['right']} of {len(verdicts)} blocks are right, {counts['wrong']} wrong, {counts['unreadable']}"
            f" unreadable, {counts['gone']} gone meanwhile; {known} are known by their tokens"
        )
    if wrong:
        return 2
    return 0 if counts["right"] else 1
