"""Options of `halfmoon simulate` for `--system lamina` (model, devices of both pools, groups) and `infinite-llm`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from benchmarks.papers.devices import (
    DEVICES,
    MODELS,
    Deployment,
    Device,
    degrees_of_parallelism,
)
from benchmarks.papers.infinite_llm import Lending
from halfmoon.cli.options import OptionInvalid
from halfmoon.conductor.simulation.trace import Arrival

_POOL = re.compile(r"(?:([1-9]\d{0,3})x)?([a-z0-9]+)")


def add_devices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("lamina", "decode alone, on devices with a price, by roofline")
    group.add_argument("--model", choices=MODELS, default="llama3-70b")
    group.add_argument(
        "--devices",
        metavar="AxNAME+BxNAME",
        default="2xh100+4xh20",
        help=f"weights on A devices, KVCache on B; without +, one pool holds both; without numbers, the paper's rule "
        f"chooses them; NAME: {', '.join(DEVICES)}",
    )
    group.add_argument(
        "--groups", type=int, default=2, help="batches in turn, over one replica of the weights less"
    )
    group.add_argument(
        "--group-batch", type=int, default=32, help="sequences of a group, for the paper's rule"
    )


def add_lending(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("infinite-llm", "decode alone, on --decode instances that lend")
    group.add_argument(
        "--lending",
        choices=("placed", "moved", "both", "none"),
        default="both",
        help="who borrows: new requests, or running ones",
    )
    group.add_argument(
        "--move-tokens", type=int, default=16, help="of a running request, moved in one step at most"
    )
    group.add_argument(
        "--clients", type=int, default=0, help="of an instance, who wait for answers (0: the trace's times)"
    )


def lending_of(args: argparse.Namespace) -> Lending:
    """As the options say. Raises OptionInvalid."""
    if not 1 <= args.move_tokens <= 160:
        raise OptionInvalid(f"--move-tokens {args.move_tokens}: 1 to 160")
    if not 0 <= args.clients <= 1_000_000:
        raise OptionInvalid(f"--clients {args.clients}: 0 to 1000000")
    return Lending(
        placed=args.lending in ("placed", "both"),
        move_tokens=args.move_tokens if args.lending in ("moved", "both") else 0,
        clients=args.clients,
    )


def deployment_of(args: argparse.Namespace, arrivals: Sequence[Arrival]) -> Deployment:
    """As the options say; the rule is told the mean context of `arrivals`. Raises OptionInvalid."""
    for option in ("groups", "group_batch"):
        if not 1 <= getattr(args, option) <= 4_096:
            raise OptionInvalid(f"--{option.replace('_', '-')} {getattr(args, option)}: 1 to 4096")
    pools = [_POOL.fullmatch(part) for part in args.devices.split("+")]
    found = [(pool[1], DEVICES.get(pool[2])) for pool in pools if pool]
    named = [device for _, device in found if device is not None]
    if len(named) != len(pools) or len(pools) > 2:
        raise OptionInvalid(f"--devices {args.devices}: like 2xh100+4xh20 or 4xh100, of {', '.join(DEVICES)}")
    counts = [int(count) for count, _ in found if count]
    model, weights, attention = MODELS[args.model], named[0], named[-1]
    if len(pools) == 1 and counts:
        if args.groups > 1:
            raise OptionInvalid(
                f"--groups {args.groups}: devices that hold weights and KVCache run one group"
            )
        return _deployment(args, weights, counts[0], attention, 0)
    if len(pools) == 2 and len(counts) == 2:
        return _deployment(args, weights, counts[0], attention, counts[1])
    if len(pools) == 1 or counts:
        raise OptionInvalid(f"--devices {args.devices}: both numbers, or neither of two pools")
    contexts = sum(one.prompt_tokens + one.output_tokens // 2 for one in arrivals)
    return degrees_of_parallelism(
        model,
        weights,
        attention,
        batch=args.group_batch,
        context_tokens=contexts // len(arrivals),
        groups=args.groups,
    )


def _deployment(
    args: argparse.Namespace, weights: Device, weight_devices: int, attention: Device, attention_devices: int
) -> Deployment:
    return Deployment(
        model=MODELS[args.model],
        model_device=weights,
        model_devices=weight_devices,
        attention_device=attention,
        attention_devices=attention_devices,
        groups=args.groups,
    )
