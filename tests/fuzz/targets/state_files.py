"""Small files that processes and commands read: the run file of `halfmoon up`, keys of processes and of clients,
settings, policies, layouts, topologies, traces, profiles, and what workers remember of their hardware. Each is read, or
refused by the error that its reader promises, in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import json
import os
import random
import secrets
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import nkeys
import zstandard
from msgspec.structs import asdict

from halfmoon.bus.credentials import CredentialsBroken, public_key
from halfmoon.cli import run_file
from halfmoon.cli.commands import COMMANDS
from halfmoon.cli.model import layout_of
from halfmoon.cli.options import OptionInvalid, parse, secret
from halfmoon.cli.replay import _policy
from halfmoon.conductor.simulation.profiles import PROFILES, ProfileInvalid, load_profile
from halfmoon.conductor.simulation.trace import TraceInvalid, read_trace
from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.policy import Policy
from halfmoon.store.transports.topology import TopologyInvalid, read_topology
from halfmoon.workers import kept_profile
from halfmoon.workers.frontend.tenants import read_keys
from halfmoon.workers.model import self_test
from tests.fuzz.frame import Found, Play
from tests.fuzz.mutate import VALUES, json_bytes, mutated_bytes, mutated_json

TEST_INPUTS = 500
INPUTS_MEANT = 800_000
DEADLINE_S = 10.0
URL = "nats://127.0.0.1:4222"
_LAYOUT = {"model": "m", "model_fingerprint": "f", "layers": 2, "kv_heads": 1, "head_dim": 8, "block_tokens": 16,
           "dtype": "float32"}  # fmt: skip
_MEASURED = {"profile": asdict(CostProfile(prefill_base_ns=5)), "spread_permille": 1_100, "measurements": 1,
             "agreed": True}  # fmt: skip
_ADDRESSES = [
    URL,
    "nats://127.0.0.1:99999",
    "localhost:x",
    "nats://[::1",
    "tls://a:1,b:2",
    "",
    "//",
    "http://\x00:4",
]
_KEYS = [
    "k" * 16,
    "acme " + "k" * 20,
    "* " + "k" * 16,
    "# nothing",
    "é" * 16,
    "a b c",
    "x" * 15,
    "acme k #" + "k" * 16,
]


class Kind(NamedTuple):
    """A kind of file: one that is good, or nearly; who reads it; what that may raise."""

    good: Callable[[random.Random], bytes]
    read: Callable[[Path], object]
    refusals: tuple[type[Exception], ...] = ()


def _json(value: Callable[[random.Random], Any]) -> Callable[[random.Random], bytes]:
    def made(draw: random.Random) -> bytes:
        sample = value(draw)
        return json_bytes(draw, mutated_json(draw, sample) if draw.random() < 0.7 else sample)

    return made


def _run_file(draw: random.Random) -> dict[str, Any]:
    pid = draw.choice((1, 1, 1, 0, -1, 2**22 + 5, 2**31, 2**63, 10**30))
    return {"nats": draw.choice(_ADDRESSES), "http": draw.choice(_ADDRESSES), "pid": pid, "credentials": "c"}


def _find_cluster(path: Path) -> object:
    """As every command without an option does, and `halfmoon up`."""
    folder = path.parent / "state" / "halfmoon"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / run_file.NAME).write_bytes(path.read_bytes())
    return run_file.read(folder), run_file.at(folder.parent, URL)


def _nkey(draw: random.Random) -> bytes:
    seed = nkeys.encode_seed(draw.randbytes(32), nkeys.PREFIX_BYTE_USER)
    return bytes(seed) + draw.choice((b"", b"\n"))


def _lines(draw: random.Random) -> bytes:
    return "\n".join(draw.choices(_KEYS, k=draw.randint(0, 4))).encode()


def _toml_value(draw: random.Random, deeper: int = 2) -> str:
    match draw.randrange(8):
        case 0 | 1:
            return draw.choice(("0", "1", "-1", "8000", str(2**31), str(2**63), "9" * 5000))
        case 2:
            return draw.choice(
                ("true", "false", "nan", "inf", "1e400", "0x1f", "1979-05-27T07:32:00Z", "07:32:00")
            )
        case 3 if deeper:
            return f"[{', '.join(_toml_value(draw, deeper - 1) for _ in range(draw.randint(0, 3)))}]"
        case 4 if deeper:
            return f"{{ a = {_toml_value(draw, deeper - 1)} }}"
        case _:
            texts = [each for each in VALUES if isinstance(each, str)]
            return json.dumps(draw.choice([*texts, "info", "2", "0-1", "30s", URL]))


def _toml(
    names: Callable[[], list[str]], tables: Callable[[], list[str]]
) -> Callable[[random.Random], bytes]:
    """Settings of these names, at the top and in tables."""

    def made(draw: random.Random) -> bytes:
        lines = []
        for _ in range(draw.choice((1, 1, 2, 4))):
            name = draw.choice(names()) if draw.random() < 0.9 else json.dumps(draw.choice(("", "é", "x.y")))
            lines.append(f"{name} = {_toml_value(draw)}")
            if tables() and draw.random() < 0.5:
                lines.append(f"[{draw.choice(tables())}]")
        if not draw.randrange(40):
            lines.append("deep = " + draw.choice(("[", "{a=")) * draw.choice((50, 5000)))
        return "\n".join(lines).encode(errors="replace")

    return made


@cache
def _options() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parsers of all commands."""
    parser = argparse.ArgumentParser(prog="halfmoon")
    parsers = parser.add_subparsers(dest="command", required=True)
    commands = {each.name: parsers.add_parser(each.name) for each in COMMANDS}
    for each in COMMANDS:
        importlib.import_module(each.module).add(commands[each.name])
    return parser, commands


def _option_names() -> list[str]:
    return sorted({action.dest for parser in _options()[1].values() for action in parser._actions})


def _settings(path: Path) -> object:
    parser, commands = _options()
    return parse(parser, commands, ["up", "--config", str(path)], lambda name: None)


_TRACE_LINES: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 5.5, "input_length": 3, "output_length": 1, "session_id": "a", "priority": 1},
]


def _trace(draw: random.Random) -> bytes:
    lines = [
        json_bytes(draw, mutated_json(draw, line) if draw.random() < 0.4 else line) for line in _TRACE_LINES
    ]
    return b"\n".join(lines * draw.randint(1, 2))


def _read_trace(path: Path) -> object:
    raw = path.read_bytes()
    for name, content in (("t.jsonl.gz", gzip.compress(raw, 1)), ("t.jsonl.zst", zstandard.compress(raw, 1))):
        # A byte of what is packed is wrong where the file's first one is odd.
        packed = bytearray(content)
        packed[len(packed) // 2] ^= raw[:1] > b"z"
        path.with_name(name).write_bytes(packed)
        with contextlib.suppress(TraceInvalid):
            read_trace(path.with_name(name))
    return read_trace(path)


def _arguments(path: Path, **options: Any) -> argparse.Namespace:
    return argparse.Namespace(secret_file=str(path), layout_file=str(path), cluster="c", **options)


KINDS: list[Kind] = [
    Kind(_json(_run_file), _find_cluster),
    Kind(_nkey, public_key, (CredentialsBroken,)),
    Kind(_lines, lambda path: read_keys(str(path)), (ValueError,)),
    Kind(lambda draw: draw.randbytes(20).hex().encode(), lambda path: secret(_arguments(path)), (OptionInvalid,)),
    Kind(_toml(_option_names, lambda: [each.name for each in COMMANDS]), _settings, (OptionInvalid,)),
    Kind(
        _toml(lambda: list(Policy.__struct_fields__), list),
        lambda path: _policy(str(path), Policy()),
        (OptionInvalid,),
    ),
    Kind(_json(lambda draw: _LAYOUT), lambda path: layout_of(_arguments(path)), (OptionInvalid,)),
    Kind(
        _toml(lambda: ["memory_node", "numa_node", '"0-1"', '"²-1"', "nics.eth0.numa_node"],
              lambda: ["nics.eth0", "distances", "nics"]),
        lambda path: read_topology(str(path)),
        (TopologyInvalid,),
    ),
    Kind(_trace, _read_trace, (TraceInvalid,)),
    Kind(
        _json(lambda draw: msgspec.to_builtins(draw.choice(list(PROFILES.values())))),
        lambda path: load_profile(str(path)),
        (ProfileInvalid,),
    ),
    Kind(_json(lambda draw: _MEASURED), kept_profile._read),
    Kind(_json(lambda draw: {"product_rows": [2, 16], "differing": ["batch"]}), self_test._read),
]  # fmt: skip


def make(draw: random.Random) -> bytes:
    """A byte for the kind, and the file."""
    number = draw.randrange(len(KINDS))
    content = KINDS[number].good(draw)
    if draw.random() < 0.3:
        content = mutated_bytes(draw, content)
    return bytes([number]) + content


def play(folder: Path, content: bytes) -> str:
    kind = KINDS[content[0] % len(KINDS)] if content else KINDS[0]
    path = folder / "named.json"
    path.write_bytes(content[1:])
    path.chmod(0o600)
    try:
        found = kind.read(path)
    except kind.refusals as problem:
        told = str(problem)
        if not told or "\n" in told or len(told) > 2000:
            raise Found(f"not one line: {told[:3000]!r}") from None
        if str(folder) not in told:
            raise Found(f"no file is named: {told}") from None
        return type(problem).__name__
    except SystemExit:
        return "not such options"
    return "nothing" if found is None else "read"


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    with (
        tempfile.TemporaryDirectory(prefix=secrets.token_hex(4)) as directory,
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(contextlib.redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        yield lambda content: play(Path(directory), content)
