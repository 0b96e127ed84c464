"""`halfmoon experiments`: the papers' tables and plots again, from a checkout (`benchmarks/papers/command.py`)."""

from __future__ import annotations

import argparse

from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.simulation.checkout import papers


def add(parser: argparse.ArgumentParser) -> None:
    if (command := papers("command")) is not None:
        command.add(parser)
    else:
        # `run` refuses, and names the place of the experiments.
        parser.add_argument("names", nargs="*", metavar="NAME")


async def run(args: argparse.Namespace) -> int:
    if (command := papers("command")) is None:
        raise OptionInvalid("experiments: they are in a checkout of the repository, under benchmarks/papers")
    status: int = await command.run(args)
    return status
