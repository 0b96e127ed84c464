"""The commands: where each one is, and its line of help.

A command's module has `add(parser)`, which adds its options, and `run(args)`, which does it. It is imported only when
it is asked for: all together import torch, NATS, HTTP and plotting, which takes a second.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from types import ModuleType

from halfmoon.schemas.roles import WORKER_ROLES


@dataclass(frozen=True, slots=True)
class Command:
    """One command: `halfmoon NAME`."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("up", "halfmoon.cli.up", "a whole cluster on this machine"),
    Command("generate", "halfmoon.cli.client.generate", "continue a text"),
    Command("chat", "halfmoon.cli.client.chat", "talk to the model"),
    Command("status", "halfmoon.cli.status", "how the cluster is"),
    Command("bench", "halfmoon.cli.bench.command", "a load on a live cluster, and what its clients saw"),
    Command("events", "halfmoon.cli.events", "the event log: save, tail, show"),
    Command("replay", "halfmoon.cli.replay", "step over a saved log; compare, explain"),
    Command(
        "simulate",
        "halfmoon.cli.simulation.simulate",
        "the same conductor over a trace, in a simulated cluster",
    ),
    Command(
        "capacity",
        "halfmoon.cli.simulation.capacity",
        "the highest replay speed that a simulated cluster holds",
    ),
    Command(
        "size", "halfmoon.cli.simulation.size", "the fewest prefill and decode workers that hold a trace"
    ),
    Command("experiments", "halfmoon.cli.simulation.experiments", "reproduce the papers' tables and plots"),
    Command("policy", "halfmoon.cli.operator.policy", "show or change the conductors' policy"),
    Command("profile", "halfmoon.cli.profile", "measure this machine's cost coefficients"),
    Command(
        "secrets", "halfmoon.cli.secrets", "certificates, credentials and keys of a cluster of containers"
    ),
    Command(
        "container", "halfmoon.cli.container", "a role's process in a container, under the first free name"
    ),
    Command(
        "role", "halfmoon.cli.operator.role", "let a prefill worker become a decode worker, or the reverse"
    ),
    Command("pause", "halfmoon.cli.operator.pause", "place nothing, so that weights can be changed"),
    Command("resume", "halfmoon.cli.operator.resume", "place requests again"),
    Command(
        "reset-prefix-cache",
        "halfmoon.cli.operator.reset_prefix_cache",
        "have engines drop their prefix caches",
    ),
    Command("drain", "halfmoon.cli.operator.drain", "let a node's store leave, its blocks kept"),
    Command("audit", "halfmoon.cli.audit.command", "compute cached blocks again, and compare their bits"),
    Command(
        "conductor",
        "halfmoon.cli.processes.conductor",
        "decide where requests run; any number may run at once",
    ),
    Command("store", "halfmoon.cli.processes.store", "a node's store agent: its KV pool and its data plane"),
    *(
        Command(role, "halfmoon.cli.processes.worker", f"one {role} worker, beside a store agent")
        for role in WORKER_ROLES
    ),
    Command(
        "adapt",
        "halfmoon.cli.processes.adapt",
        "an engine of another's as a worker: a vLLM or an SGLang, unmodified",
    ),
    Command("frontend", "halfmoon.cli.processes.frontend", "the client edge: NATS API and HTTP"),
)


def module_of(command: str) -> ModuleType:
    """The command's module, imported."""
    (module,) = (each.module for each in COMMANDS if each.name == command)
    return importlib.import_module(module)


def parser_of(command: str) -> argparse.ArgumentParser:
    """A parser of the command's own options."""
    parser = argparse.ArgumentParser(add_help=False)
    module_of(command).add(parser)
    return parser
