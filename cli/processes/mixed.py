"""Options of mixed workers: how many tokens one iteration computes, and how long it may take."""

from __future__ import annotations

import argparse

from halfmoon.cli.options import OptionInvalid
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.roles import WorkerRole
from halfmoon.workers.token_budget import largest_budget


def add_token_budget(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--token-budget",
        default="auto",
        metavar="N",
        help="mixed: tokens of prompts and answers in one iteration; auto: by the profile, for the TBT objective",
    )


def add_iteration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--iteration-ms",
        type=int,
        default=1_000,
        help="mixed: what an iteration may take, where --token-budget is auto",
    )


def iteration_ns_of(args: argparse.Namespace, role: WorkerRole) -> int:
    """The most that a mixed worker's iteration may take; 0: whoever names a number of tokens wants that number."""
    if role != "mixed" or args.token_budget != "auto":  # noqa: S105
        return 0
    return int(args.iteration_ms) * 1_000_000


def token_budget_of(
    args: argparse.Namespace, role: WorkerRole, layout: Layout, profile: CostProfile, kv_blocks: int
) -> int:
    """That of a mixed worker; 0 for another. Raises OptionInvalid."""
    if role != "mixed":
        return 0
    asked: str = args.token_budget
    if asked != "auto":
        if not asked.isdecimal() or int(asked) < 1:
            raise OptionInvalid(f"--token-budget {asked}: auto, or a number of at least 1")
        return int(asked)
    return largest_budget(
        layout,
        profile,
        iteration_ns=args.iteration_ms * 1_000_000,
        batch_max=args.batch_max,
        context_tokens=kv_blocks * layout.block_tokens,
        chunk_tokens=args.chunk_tokens,
    )
