"""Options of the processes, which `halfmoon up` takes as well and hands on."""

from __future__ import annotations

import argparse
import socket
from typing import Annotated, ClassVar, get_args

import msgspec

from halfmoon.cli.declared import options_of
from halfmoon.cli.options import OptionInvalid
from halfmoon.schemas.codec import one_line
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.policy import AdmissionName, MixedChoice, Policy, PolicyName
from halfmoon.schemas.types import option
from halfmoon.workers.options import PoolOptions

#: Longer than a server is away when it is started again: time that passed then does count.
CLOCK_STEP_NS_MAX = 60 * SECOND_NS
#: Longer than a lender is asked for room, and than the KV of the longest prompts takes beside decode steps.
MOVE_ANSWER_NS = 300 * SECOND_NS
#: Of the last prefills, steps and answers: more are steadier, fewer follow a change of the machine's speed sooner.
CORRECTION_WINDOW = 15
#: A place is slow at this percentage of its measured time. On a busy machine a healthy one takes several times it.
SLOW_PLACE_PERCENT = 1_000


class PolicyOptions(PoolOptions, frozen=True, kw_only=True):
    """Options of a conductor that `halfmoon up` takes as well."""

    title: ClassVar[str] = "policy (of a log that is empty; else the log's own is in force)"

    policy: Annotated[
        str, option(f"{', '.join(get_args(PolicyName))}, or the name of one that is installed", "NAME")
    ] = Policy().name
    admission: AdmissionName = Policy().admission
    fetch_replicas: Annotated[int, option("other holders named with a fetch; 0: none")] = 2
    hot_transfers: Annotated[int, option("copy a prefix that so many read at once; 0: never")] = 4
    move_period_s: Annotated[
        float,
        option("how often KV of running requests may move between decode workers that lend; 0: it stays"),
    ] = 1.0
    worker_wait_s: Annotated[
        float,
        option("how long a new request waits for a worker where a pool has none; 0: it is refused at once"),
    ] = 30.0
    mixed_choice: Annotated[
        MixedChoice,
        option(
            "where there are mixed workers and others: by what is predicted, mixed while they take it, or "
            "never"
        ),
    ] = Policy().mixed_choice
    ttft_slo_ms: int = Policy().ttft_slo_ns // 1_000_000
    tbt_slo_ms: int = Policy().tbt_slo_ns // 1_000_000


class ConductorOptions(PolicyOptions, frozen=True, kw_only=True):
    """All options of a conductor."""

    id: str = msgspec.field(default_factory=lambda: f"conductor-{socket.gethostname()}")


def policy_of(args: argparse.Namespace) -> Policy:
    """Raises OptionInvalid."""
    options = options_of(PolicyOptions, args)
    return Policy(
        name=installed_policy("--policy", options.policy),
        admission=options.admission,
        ttft_slo_ns=options.ttft_slo_ms * 1_000_000,
        tbt_slo_ns=options.tbt_slo_ms * 1_000_000,
        mixed_choice=options.mixed_choice,
        fetch_replicas=options.fetch_replicas,
        hot_transfers=options.hot_transfers,
        move_period_ns=int(options.move_period_s * SECOND_NS),
        move_answer_ns=MOVE_ANSWER_NS,
        clock_step_ns_max=CLOCK_STEP_NS_MAX,
        arrival_wait_ns_max=int(options.worker_wait_s * SECOND_NS),
        pools_bound=True,
        idle_served=True,
        sources_named=True,
        slow_place_percent=SLOW_PLACE_PERCENT,
        elastic=options.elastic,
        correction_window=CORRECTION_WINDOW,
        prefill_group=options.prefill_group,
    ).present()


def installed_policy(flag: str, name: str) -> str:
    """The log's name for the policy `name`, of the table or installed. Raises OptionInvalid, naming the flag."""
    # A command whose options are right needs no core.
    from halfmoon.conductor.core.placement.policies import installed
    from halfmoon.conductor.plugins import install_plugins, policy_title

    install_plugins()
    try:
        return policy_title(name, installed())
    except ValueError as problem:
        raise OptionInvalid(f"{flag} {one_line(name)}: {problem}") from None
