"""`halfmoon replay`: the core over a recorded log; what it decides against what was decided."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from halfmoon.cli.options import add_config
from halfmoon.conductor.replay.logfile import LogFile
from halfmoon.conductor.replay.verify import Divergence, Verdict, verify
from halfmoon.conductor.replay.wording import message

Subparsers = Any


def add(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser("replay", help="step over a saved log, and compare")
    parser.add_argument("file", metavar="FILE", help="as `halfmoon events save` wrote it")
    parser.add_argument("--json", action="store_true")
    add_config(parser)
    return parser


async def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 when a decision differs."""
    log = LogFile(Path(args.file))
    verdict = verify(log)
    print(msgspec.json.encode(verdict).decode() if args.json else describe(verdict))
    return 0 if verdict.identical else 1


def describe(verdict: Verdict) -> str:
    """For people."""
    counts = f"{verdict.events:,} events, {verdict.decisions:,} decisions"
    if verdict.first_divergence is not None:
        return f"{counts}, then they part\n" + _divergence(verdict.first_divergence)
    late = f"; {verdict.unpublished:,} more were not published yet" if verdict.unpublished else ""
    return f"{counts}, identical{late} ({verdict.events_per_s:,} events/s)"


def _divergence(found: Divergence) -> str:
    lines = [f"first divergence: decision {found.position} on event {found.seq}"]
    if found.event is not None:
        lines.append(f"  event     {message(found.event)}")
    lines.append(f"  recorded  {message(found.recorded) if found.recorded else 'none'}")
    lines.append(f"  computed  {message(found.computed) if found.computed else 'none'}")
    return "\n".join(lines)
