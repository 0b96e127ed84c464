"""The log of a stopped cluster: its nats-server is started once more, on the directory that it kept its
streams in.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from halfmoon.bus.config import BusConfig
from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.schemas import subjects


class NoLog(ValueError):
    """There is no log in the directory, or it is in use."""


@contextlib.contextmanager
def served(directory: Path) -> Iterator[BusConfig]:
    """How to reach a nats-server on the streams in `directory`, which ends with the context, and takes nobody else.

    `directory` is a cluster's state directory, the `nats` in it, or the `store_dir` of a nats-server. Raises NoLog and
    BusUnreachable.
    """
    store = _store_directory(directory)
    lock = store.parents[1] / "lock"
    with contextlib.ExitStack() as stack:
        if lock.exists():
            file = stack.enter_context(lock.open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise NoLog(f"{directory}: its cluster runs; reach it with --nats") from None
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halfmoon-")))
        (scratch / "jetstream").symlink_to(store)
        token = secrets.token_hex(32)
        server = EmbeddedServer.start(scratch, extra_config=f'authorization {{ token: "{token}" }}')
        stack.callback(server.stop)
        yield BusConfig(url=server.url, token=token)


def _store_directory(directory: Path) -> Path:
    """The `store_dir` whose `jetstream/<account>/streams` holds the event log."""
    for base in (directory, directory / "jetstream", directory / "nats" / "jetstream", directory.parent):
        if any(base.glob(f"jetstream/*/streams/{subjects.EVENTS_STREAM}")):
            return base.resolve()
    raise NoLog(f"{directory}: there is no event log in it")
