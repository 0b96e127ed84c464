"""nats-py as a short command imports it: without the search for its own version among all packages.

It sends the server that version, and nobody asks for it there; the search takes ten times as long as to connect.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _not_found(name: str) -> Iterator[None]:
    """Within, `import name` fails, unless it was imported before."""
    absent = sys.modules.setdefault(name, None) is None  # type: ignore[arg-type]
    try:
        yield
    finally:
        if absent:
            del sys.modules[name]


with _not_found("importlib.metadata"):
    import nats
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error as NatsError
    from nats.errors import MaxPayloadError, NoRespondersError

__all__ = ["Client", "MaxPayloadError", "Msg", "NatsError", "NoRespondersError", "nats"]
