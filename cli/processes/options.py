"""Options of the processes, which `halfmoon up` takes as well and hands on."""

from __future__ import annotations

import argparse
from typing import get_args

from halfmoon.cli.metrics import add_metrics
from halfmoon.cli.options import add_bus, add_config, add_secret
from halfmoon.cli.output import add_logging
from halfmoon.cli.tracing import add_tracing
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import AdmissionName, MixedChoice, Policy, PolicyName

#: Longer than a server is away when it is started again: time that passed then does count.
CLOCK_STEP_NS_MAX = 60 * SECOND_NS
#: Longer than a lender is asked for room, and than the KV of the longest prompts takes beside decode steps.
MOVE_ANSWER_NS = 300 * SECOND_NS
#: Of the last prefills, steps and answers: more are steadier, fewer follow a change of the machine's speed sooner.
CORRECTION_WINDOW = 15
#: Of what attention elsewhere was measured to take. On a busy machine it is several times that.
SLOW_PLACE_PERCENT = 1_000


def add_process(parser: argparse.ArgumentParser) -> None:
    """Options of every process."""
    add_bus(parser)
    add_secret(parser)
    add_config(parser)
    add_metrics(parser)
    add_tracing(parser)
    add_logging(parser)
    parser.add_argument(
        "--drain-s", type=float, default=20.0, help="how long to finish what runs, when stopped"
    )
    parser.add_argument(
        "--health-file", metavar="FILE", default="", help="touched every second while all is well"
    )


def add_log_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-dir", metavar="DIR", default="", help="where nats-server keeps the log, if on this machine"
    )


def add_policy(parser: argparse.ArgumentParser) -> None:
    defaults = Policy()
    group = parser.add_argument_group("policy (of a log that is empty; else the log's own is in force)")
    group.add_argument("--policy", choices=get_args(PolicyName), default=defaults.name)
    group.add_argument("--admission", choices=get_args(AdmissionName), default=defaults.admission)
    group.add_argument(
        "--fetch-replicas", type=int, default=2, help="other holders named with a fetch; 0: none"
    )
    group.add_argument(
        "--hot-transfers", type=int, default=4, help="copy a prefix that so many read at once; 0: never"
    )
    group.add_argument(
        "--move-period-s",
        type=float,
        default=1.0,
        help="how often KV of running requests may move between decode workers that lend; 0: it stays",
    )
    group.add_argument(
        "--worker-wait-s",
        type=float,
        default=30.0,
        help="how long a new request waits for a worker where a pool has none; 0: it is refused at once",
    )
    group.add_argument(
        "--mixed-choice",
        choices=get_args(MixedChoice),
        default=defaults.mixed_choice,
        help="where there are mixed workers and others: by what is predicted, mixed while they take it, or never",
    )
    group.add_argument("--ttft-slo-ms", type=int, default=defaults.ttft_slo_ns // 1_000_000)
    group.add_argument("--tbt-slo-ms", type=int, default=defaults.tbt_slo_ns // 1_000_000)


def policy_of(args: argparse.Namespace) -> Policy:
    return Policy(
        name=args.policy,
        admission=args.admission,
        ttft_slo_ns=args.ttft_slo_ms * 1_000_000,
        tbt_slo_ns=args.tbt_slo_ms * 1_000_000,
        mixed_choice=args.mixed_choice,
        fetch_replicas=args.fetch_replicas,
        hot_transfers=args.hot_transfers,
        move_period_ns=int(args.move_period_s * SECOND_NS),
        move_answer_ns=MOVE_ANSWER_NS,
        clock_step_ns_max=CLOCK_STEP_NS_MAX,
        arrival_wait_ns_max=int(args.worker_wait_s * SECOND_NS),
        pools_bound=True,
        idle_served=True,
        sources_named=True,
        slow_place_percent=SLOW_PLACE_PERCENT,
        elastic=args.elastic,
        correction_window=CORRECTION_WINDOW,
        prefill_group=args.prefill_group,
    )


def add_frontend(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("frontend")
    group.add_argument("--http-host", default="127.0.0.1")
    group.add_argument("--http-port", type=int, default=8000, help="0: any free one")
    group.add_argument(
        "--api-keys-file",
        default="",
        metavar="FILE",
        help="keys of HTTP clients, one a line: KEY, TENANT KEY, or * KEY for all tenants",
    )
    group.add_argument(
        "--http-allowed-hosts",
        default="",
        metavar="NAMES",
        help="names that clients may ask for, by commas; *: any (where it listens on loopback: loopback's)",
    )
    group.add_argument(
        "--allowed-origins",
        default="",
        metavar="ORIGINS",
        help="pages that may ask from a browser (CORS), by commas: https://chat.example; *: any; default: none",
    )
    group.add_argument("--ssl-certfile", default="", metavar="FILE", help="serve HTTPS with this certificate")
    group.add_argument(
        "--ssl-keyfile", default="", metavar="FILE", help="its key, where it is a file of its own"
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="the model's name in the API; repeatable: the first is in answers, all are understood",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        help="prompt and answer together, at most; 0: the model's context",
    )
    group.add_argument(
        "--generation-config",
        default="auto",
        metavar="SOURCE",
        help="temperature, top_p, top_k, min_p and repetition_penalty of requests that do not say: auto (the model's "
        "generation_config.json), vllm (none), or a folder with such a file",
    )
    _add_frontend_bounds(group)


def _add_frontend_bounds(group: argparse._ArgumentGroup) -> None:
    """How much clients may take of it, in number and in time."""
    group.add_argument("--http-connections-max", type=int, default=8192)
    group.add_argument(
        "--http-connections-per-address-max", type=int, default=4096, help="a proxy is one address"
    )
    group.add_argument(
        "--http-head-s", type=float, default=10.0, help="how long a request's head may take to come"
    )
    group.add_argument("--http-body-s", type=float, default=30.0, help="and its body after that")
    group.add_argument("--open-requests-max", type=int, default=4096)
    group.add_argument(
        "--silence-s",
        type=float,
        default=120.0,
        help="a request that gets no token for so long fails; twice its TTFT objective, before its first one",
    )
    group.add_argument(
        "--sse-comment-s",
        type=float,
        default=15.0,
        help="a stream that has nothing to say for so long sends a comment, so that no proxy ends it; 0: never",
    )
    group.add_argument(
        "--log-free-mib-min", type=int, default=64, help="less disk free for the log: no new requests"
    )
    group.add_argument(
        "--client-inboxes",
        metavar="PREFIXES",
        default="_INBOX.",
        help="how reply subjects of NATS clients begin, separated by commas; requests with others are dropped",
    )
