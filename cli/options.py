"""Options that several commands share, and where their values come from.

A value comes from the flag, else from the environment (`HALFMOON_` and the flag's name, `--kv-blocks` is
`HALFMOON_KV_BLOCKS`), else from the TOML file named by `--config` (a key at its top, or in a table named after the
command), else it is the default.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.schemas.numbers import SECOND_NS

if TYPE_CHECKING:
    from halfmoon.bus.config import BusConfig
    from halfmoon.bus.streams import StreamLimits
    from halfmoon.cli.run_file import RunFile

PREFIX = "HALFMOON_"
DEFAULT_NATS = "nats://127.0.0.1:4222"
DEFAULT_CLUSTER = "local"
#: For a cluster that is just starting.
STREAMS_WAIT_S = 2.0


#: Files of settings and secrets are small; nothing larger is read into memory.
OPTION_FILE_BYTES_MAX = 4 << 20


class OptionInvalid(Exception):
    """A value that does not fit; the text names where it came from and the option."""


def check_option_file(option: str, file: str) -> Path:
    """A regular file of at most `OPTION_FILE_BYTES_MAX`: reading it ends. Raises OptionInvalid."""
    path = Path(file)
    try:
        status = path.stat()
    except (OSError, ValueError) as problem:
        raise OptionInvalid(f"{option} {file[:200]!r}: {getattr(problem, 'strerror', problem)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise OptionInvalid(f"{option} {file}: no regular file")
    if status.st_size > OPTION_FILE_BYTES_MAX:
        raise OptionInvalid(f"{option} {file}: {status.st_size} bytes; at most {OPTION_FILE_BYTES_MAX}")
    return path


def read_option_file(option: str, file: str) -> str:
    """The text of a small file that an option names. Raises OptionInvalid."""
    path = check_option_file(option, file)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as problem:
        raise OptionInvalid(f"{option} {file}: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise OptionInvalid(f"{option} {file}: no UTF-8 at byte {problem.start}") from None


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", default="", help="TOML file with values for these options"
    )


def add_bus(
    parser: argparse.ArgumentParser, *, default: str = f"that of `halfmoon up`, else {DEFAULT_NATS}"
) -> None:
    """How to reach NATS; `default` in words."""
    parser.add_argument("--cluster", default=DEFAULT_CLUSTER, help="name of the cluster on this machine")
    group = parser.add_argument_group("NATS")
    group.add_argument(
        "--nats",
        metavar="URL",
        default="",
        help=f"server, or several separated by commas (default: {default})",
    )
    group.add_argument("--nats-user", default="")
    group.add_argument("--nats-password", default="")
    group.add_argument("--nats-token", default="")
    group.add_argument("--nats-nkey-file", metavar="FILE", default="", help="seed of an nkey")
    group.add_argument("--nats-credentials", metavar="FILE", default="", help="a .creds file")
    group.add_argument("--nats-ca", metavar="FILE", default="", help="TLS: certificates to trust")
    group.add_argument("--nats-cert", metavar="FILE", default="", help="TLS: our certificate")
    group.add_argument("--nats-key", metavar="FILE", default="", help="TLS: its key")
    group.add_argument(
        "--nats-replicas",
        type=int,
        default=1,
        help="copies of each stream (3 on a cluster of 3; 0: wait until another process has made the streams)",
    )
    group.add_argument("--log-mib-max", type=int, default=8192, help="size of the log, where it is made")
    group.add_argument("--log-hours-max", type=int, default=168, help="age of the log, where it is made")


def bus_config(args: argparse.Namespace, *, name: str = "operator") -> BusConfig:
    """How to reach NATS as the process `name`: as the options of `add_bus` say; else as `halfmoon up` let it be known.

    Raises OptionInvalid.
    """
    from halfmoon.bus.config import BusConfig

    url, key = args.nats, args.nats_nkey_file
    stated = key or args.nats_user or args.nats_token or args.nats_credentials or args.nats_cert
    running = None if url and stated else _running(args)
    if running is None and not url and args.cluster != DEFAULT_CLUSTER:
        raise OptionInvalid(
            f"--cluster {args.cluster}: none of this name runs on this machine (--nats says where another's server is)"
        )
    if running is not None:
        url = url or running.nats
        if running.credentials and not stated:
            file = Path(running.credentials) / f"{name}.nk"
            if not file.exists():
                raise OptionInvalid(f"--nats-nkey-file: {url} has no credentials for {name}")
            key = str(file)
    if key:
        _check_nkey(key)
    for option in ("nats_credentials", "nats_ca", "nats_cert", "nats_key"):
        if named := getattr(args, option):
            check_option_file(f"--{option.replace('_', '-')}", named)
    return BusConfig(
        url=url or DEFAULT_NATS,
        user=args.nats_user,
        password=args.nats_password,
        token=args.nats_token,
        nkey_seed_file=key,
        credentials_file=args.nats_credentials,
        tls_ca_file=args.nats_ca,
        tls_cert_file=args.nats_cert,
        tls_key_file=args.nats_key,
    )


def _running(args: argparse.Namespace) -> RunFile | None:
    """The cluster of this user on this machine that is meant. Raises OptionInvalid."""
    from halfmoon.cli import run_file

    try:
        directory = state_directory(args.cluster)
    except RuntimeError:  # a user without a home directory
        return None
    if not args.nats:
        found = run_file.read(directory)
        if found is None and run_file.is_held(directory):
            raise OptionInvalid(
                f"--cluster {args.cluster}: it is still starting; `halfmoon up` says when it is ready"
            )
        return found
    try:
        return run_file.at(directory.parent, args.nats)
    except ValueError as problem:
        raise OptionInvalid(f"--nats {args.nats}: {problem}") from None


def existing_streams() -> StreamLimits:
    """For a command that makes no streams: it looks at those of a cluster, which are there or about to be."""
    from halfmoon.bus.streams import StreamLimits

    return StreamLimits(replicas=0, wait_s=STREAMS_WAIT_S)


def _check_nkey(file: str) -> None:
    """Raises OptionInvalid. Else nats-py would end in an exception of another library's."""
    import nkeys

    seed = read_option_file("--nats-nkey-file", file).strip()
    try:
        nkeys.from_seed(bytearray(seed.encode())).wipe()
    except (nkeys.NkeysError, ValueError) as problem:
        raise OptionInvalid(f"--nats-nkey-file {file}: no seed of an nkey: {problem}") from None


def stream_limits(args: argparse.Namespace) -> StreamLimits:
    """Bounds of the streams that this process makes. Raises OptionInvalid."""
    from halfmoon.bus.streams import StreamLimits

    for option, least in (("nats_replicas", 0), ("log_mib_max", 1), ("log_hours_max", 1)):
        if getattr(args, option) < least:
            raise OptionInvalid(f"--{option.replace('_', '-')}: at least {least}")
    return StreamLimits(
        replicas=args.nats_replicas,
        log_bytes_max=args.log_mib_max << 20,
        log_age_ns_max=args.log_hours_max * 3600 * SECOND_NS,
    )


def secret(args: argparse.Namespace) -> str:
    """The cluster's secret. Raises OptionInvalid when the file is missing or too short."""
    if not args.secret_file:
        return f"insecure-{args.cluster}"
    text = read_option_file("--secret-file", args.secret_file).strip()
    if len(text) < 16:
        raise OptionInvalid(f"--secret-file {args.secret_file}: at least 16 characters")
    return text


def state_directory(cluster: str) -> Path:
    """Where a cluster on this machine keeps its log, its processes' output and its addresses."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "halfmoon" / cluster


def parse(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
    argv: Sequence[str],
    add_options: Callable[[str], None],
) -> Any:
    """The arguments, with environment and TOML file applied as defaults. Raises OptionInvalid.

    `add_options` fills the parser of the command that it names. Only the asked-for command's is filled, but a TOML file
    may speak to all: then each is.
    """
    command = next((word for word in argv if word in commands), None)
    if command is not None:
        sub = commands[command]
        file = _named_file(argv)
        for name in commands if file else (command,):
            add_options(name)
        if file:
            _apply(sub, _from_toml(file, command, commands), file)
        environment = {
            key[len(PREFIX) :].lower(): value
            for key, value in os.environ.items()
            if key.startswith(PREFIX) and value
        }
        known = {action.dest for action in sub._actions}
        _apply(sub, {key: value for key, value in environment.items() if key in known}, "environment")
        if argv[0] == command:
            # Intermixed: options may stand before, between and behind arguments without a name. And an error shows this
            # command's usage.
            args = sub.parse_intermixed_args(list(argv[1:]))
            args.command = command
            return args
    return parser.parse_args(argv)


def _named_file(argv: Sequence[str]) -> str:
    for index, word in enumerate(argv):
        if word.startswith("--config="):
            return word.split("=", 1)[1]
        if word == "--config" and index + 1 < len(argv):
            return argv[index + 1]
    return os.environ.get(f"{PREFIX}CONFIG", "")


def _from_toml(file: str, command: str, commands: Mapping[str, argparse.ArgumentParser]) -> dict[str, Any]:
    """The file's values for `command`. A key at its top may be for another command, but must be some command's."""
    import tomllib

    try:
        content = tomllib.loads(read_option_file("--config", file))
    except RecursionError:
        raise OptionInvalid(f"--config {file}: nested too deep") from None
    except ValueError as problem:  # of TOML, or a number of thousands of digits
        raise OptionInvalid(f"--config {file}: {_short(problem)}") from None
    known = {name: {action.dest for action in parser._actions} for name, parser in commands.items()}
    top: dict[str, Any] = {}
    table: dict[str, Any] = {}
    for key, value in content.items():
        dest = key.replace("-", "_")
        if isinstance(value, dict) and key in commands:
            for inner, inner_value in value.items():
                if inner.replace("-", "_") not in known[key]:
                    raise OptionInvalid(f"--config {file}: [{key}] {_short(inner)}: there is no such option")
                if key == command:
                    table[inner.replace("-", "_")] = inner_value
        elif isinstance(value, dict) or not any(dest in options for options in known.values()):
            what = "command" if isinstance(value, dict) else "option"
            raise OptionInvalid(f"--config {file}: {_short(key)}: there is no such {what}")
        elif dest in known[command]:
            top[dest] = value
    return top | table


def _short(text: Exception | str) -> str:
    """Text of a file, or of a problem with it, which may be of any length."""
    # A command whose options are right needs none of it, and starts sooner.
    from halfmoon.schemas.codec import one_line

    return one_line(text)


def _apply(parser: argparse.ArgumentParser, values: Mapping[str, Any], source: str) -> None:
    actions = {action.dest: action for action in parser._actions}
    for dest, value in values.items():
        action = actions[dest]
        flag = action.option_strings[-1] if action.option_strings else dest
        try:
            if isinstance(action, argparse._StoreTrueAction):
                converted: Any = (
                    value if isinstance(value, bool) else str(value).lower() in ("1", "true", "yes", "on")
                )
            elif callable(action.type):
                converted = action.type(str(value))
            else:
                converted = value if isinstance(value, list) else str(value)
                if isinstance(action, argparse._AppendAction) and isinstance(converted, str):
                    converted = [each.strip() for each in converted.split(",") if each.strip()]
        except (TypeError, ValueError) as problem:
            raise OptionInvalid(f"{source}: {flag}: {_short(problem)}") from None
        if action.choices is not None and converted not in action.choices:
            raise OptionInvalid(
                f"{source}: {flag}: {_short(repr(converted))} is none of {', '.join(map(str, action.choices))}"
            )
        action.required = False
        parser.set_defaults(**{dest: converted})
