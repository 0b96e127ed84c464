"""`halfmoon replay`: the core over a recorded log; its decisions against the recorded ones, their grounds, pictures."""

from __future__ import annotations

import argparse
import gzip
import sys
import tomllib
from pathlib import Path
from typing import get_args

import msgspec

from halfmoon.cli.operator.policy import changed
from halfmoon.cli.options import OptionInvalid, add_config, read_option_file
from halfmoon.conductor.core.placement.policies import installed
from halfmoon.conductor.core.step_output import explain_all
from halfmoon.conductor.plugins import failed, install_plugins
from halfmoon.conductor.replay import state_text, whatif
from halfmoon.conductor.replay.explain import explained, role_changed
from halfmoon.conductor.replay.histories import request_histories
from halfmoon.conductor.replay.logfile import LogFile
from halfmoon.conductor.replay.page import page
from halfmoon.conductor.replay.perfetto import trace
from halfmoon.conductor.replay.text import message
from halfmoon.conductor.replay.timeline import timeline
from halfmoon.conductor.replay.verify import Divergence, Replay, Verification, verify
from halfmoon.conductor.replay.whatif import Figure
from halfmoon.schemas.policy import Policy


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="as `halfmoon events save` wrote it")
    parser.add_argument("--until", type=int, metavar="SEQ", help="stop after this event")
    parser.add_argument(
        "--state", action="store_true", help="the conductor's whole state, at the end or at --until"
    )
    parser.add_argument(
        "--explain",
        default="",
        metavar="REQUEST",
        help="each candidate, and what then happened; of a worker: why it changed its role (`roles`: of all)",
    )
    parser.add_argument(
        "--html", default="", metavar="OUT", help="one page that shows the run, and why, request by request"
    )
    parser.add_argument(
        "--perfetto", default="", metavar="OUT", help="a trace for ui.perfetto.dev (.json, .json.gz)"
    )
    parser.add_argument(
        "--what-if", default="", metavar="POLICY", help="simulate the arrivals under a policy (.toml)"
    )
    parser.add_argument(
        "--no-worse",
        type=float,
        metavar="PERCENT",
        help="with --what-if: exit status 1 where the policy loses more than so much to the recorded one",
    )
    parser.add_argument(
        "--no-worse-at",
        choices=get_args(Figure),
        default="p90",
        help="of the times to and between tokens, the figure that --no-worse compares",
    )
    parser.add_argument("--json", action="store_true")
    add_config(parser)


async def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 when a decision differs, or a policy is worse than `--no-worse` allows."""
    install_plugins()
    log = LogFile(Path(args.file))
    if args.until is not None and args.until < log.header.first_seq:
        raise OptionInvalid(f"--until {args.until}: the log begins at {log.header.first_seq}")
    if args.no_worse is not None and not (args.what_if and args.no_worse >= 0):
        raise OptionInvalid(
            f"--no-worse {args.no_worse:g}: a share that a policy of --what-if may lose, 0 or more"
        )
    wanted = [name for name in ("state", "explain", "what_if") if getattr(args, name)]
    if len(wanted) > 1 or (wanted and (args.html or args.perfetto)):
        raise OptionInvalid("--state, --explain, --what-if, and --html with --perfetto: one at a time")
    if args.state:
        return _state(args, log)
    if args.explain:
        return _explain(args, log)
    if args.what_if:
        return _what_if(args, log)
    if args.html or args.perfetto:
        return _draw(args, log)
    verdict = verify(log, until=args.until)
    print(msgspec.json.encode(verdict).decode() if args.json else describe(verdict))
    return 0 if verdict.identical else 1


def _state(args: argparse.Namespace, log: LogFile) -> int:
    replay = Replay(log, until=args.until)
    for _ in replay:
        pass
    core = replay.core
    print(msgspec.json.encode(state_text.plain(core)).decode() if args.json else state_text.described(core))
    return _warned(replay)


def _explain(args: argparse.Namespace, log: LogFile) -> int:
    replay = Replay(log, until=args.until, explain_requests=lambda name: name == args.explain)
    histories = request_histories(replay)
    history = histories.of.get(args.explain)
    changes = [why for why in histories.roles if args.explain in ("roles", why.worker_id)]
    if history is None and changes:
        text = "\n\n".join(role_changed(why) for why in changes)
        print(msgspec.json.encode(changes).decode() if args.json else text)
        return _warned(replay)
    if history is None:
        raise OptionInvalid(f"--explain {args.explain}: no such request in {args.file}")
    print(msgspec.json.encode(history).decode() if args.json else explained(history))
    return _warned(replay)


def _warned(replay: Replay) -> int:
    """Exit status; 1, with a word, when the decisions that all of this rests on are not those that were
    recorded.
    """
    parted = replay.compared.divergence
    if parted is None:
        return 0
    where = f"from event {parted.seq} on the recorded decisions are others"
    print(
        f"halfmoon: {where}: what is shown after it did not happen so (see halfmoon replay)", file=sys.stderr
    )
    return 1


def _what_if(args: argparse.Namespace, log: LogFile) -> int:
    replay = Replay(log, until=args.until)
    run = whatif.recorded(replay)
    found = whatif.compare(run, _policy(args.what_if, run.policy))
    if args.json:
        print(msgspec.json.encode(found.plain()).decode())
    else:
        print(whatif.described(found, Path(args.what_if).stem))
    return max(_warned(replay), _judged(args, found))


def _judged(args: argparse.Namespace, found: whatif.Comparison) -> int:
    """Exit status; 1, with a word each, when the policy loses more than `--no-worse` allows, or failed at something."""
    if args.no_worse is None:
        return 0
    losses = [*whatif.losses(found, args.no_worse, args.no_worse_at), *failed(found.what_if.setting.policy)]
    for loss in losses:
        print(f"halfmoon: --no-worse {args.no_worse:g}: {loss}", file=sys.stderr)
    return 1 if losses else 0


def _policy(file: str, policy: Policy) -> Policy:
    """`policy` with the keys that the file has, as `halfmoon policy set` takes them."""
    try:
        values = tomllib.loads(read_option_file("--what-if", file))
        return changed(policy, [f"{key}={value}" for key, value in values.items()], installed())
    except (ValueError, RecursionError, OptionInvalid) as problem:
        text = str(problem).removeprefix("policy set ").removeprefix(f"--what-if {file}: ")
        raise OptionInvalid(f"--what-if {file}: {text}") from None


def _draw(args: argparse.Namespace, log: LogFile) -> int:
    replay = Replay(log, until=args.until, explain_requests=explain_all)
    run = timeline(replay)
    written = []
    if args.html:
        title = f"halfmoon: {log.header.cluster or log.path.name}"
        written.append((args.html, page(run, title=title).encode()))
    if args.perfetto:
        content = trace(run)
        compressed = args.perfetto.endswith(".gz")
        written.append((args.perfetto, gzip.compress(content, 6, mtime=0) if compressed else content))
    for name, content in written:
        Path(name).write_bytes(content)
    sizes = {name: len(content) for name, content in written}
    if args.json:
        print(
            msgspec.json.encode(
                {"requests": len(run.histories), "events": run.events, "written": sizes}
            ).decode()
        )
    else:
        print(
            "\n".join(
                f"{name}: {len(run.histories):,} requests, {size:,} bytes" for name, size in sizes.items()
            )
        )
    return _warned(replay)


def describe(verdict: Verification) -> str:
    """For people."""
    counts = f"{verdict.events:,} events, {verdict.decisions:,} decisions"
    if verdict.first_divergence is not None:
        told = f"{counts}, then they part\n" + _divergence(verdict.first_divergence)
        if verdict.log_code != verdict.replay_code:
            told += f"\nthe log was begun by halfmoon {verdict.log_code or '(unknown)'}, this is {verdict.replay_code}"
        return told
    notes = ""
    if verdict.unpublished:
        notes += f"; {verdict.unpublished:,} more were not published yet"
    if verdict.expired:
        notes += f"; {verdict.expired:,} had expired"
    if verdict.passed_over:
        notes += f"; {verdict.passed_over:,} events before the log begins were passed over"
    if verdict.states:
        notes += f"; {verdict.states} state digests found again"
    said = "identical" if verdict.identical else "identical, but states differ"
    lines = [f"{counts}, {said}{notes} ({verdict.events_per_s:,} events/s)"]
    lines += [
        f"  after event {said.at_seq} {said.conductor_id} had the state {said.digest}, replay has another"
        for said in verdict.states_differ
    ]
    return "\n".join(lines)


def _divergence(found: Divergence) -> str:
    lines = [f"first divergence: decision {found.position} on event {found.seq}"]
    if found.event is not None:
        lines.append(f"  event     {message(found.event)}")
    lines.append(f"  recorded  {message(found.recorded) if found.recorded else 'none'}")
    lines.append(f"  computed  {message(found.computed) if found.computed else 'none'}")
    return "\n".join(lines)
