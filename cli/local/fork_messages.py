"""Messages between `halfmoon up` and a process that is forked for it, as JSON on a socket of packets."""

from __future__ import annotations

from typing import Literal

import msgspec

#: There is a process to fork from for either.
ForkedKind = Literal["worker", "other"]
#: Of a `ForkRequest`, and of a `ForkAnswer`.
REQUEST_BYTES_MAX = 1 << 17
ANSWER_BYTES_MAX = 4096


class CommonModel(msgspec.Struct, frozen=True):
    """The model that all workers of a cluster have in common, and the forms of its weights that they compute with
    (`query_first`: a decode worker whose KV lies elsewhere).
    """

    model: str
    layout_file: str
    query_first: tuple[bool, ...]


class ForkRequest(msgspec.Struct, frozen=True):
    """A process that is wanted: a command of `halfmoon`, what its environment has beside that of `halfmoon up`, and for
    a worker the model.
    """

    command: list[str]
    environment: dict[str, str]
    model: CommonModel | None = None


class ForkAnswer(msgspec.Struct, frozen=True):
    """The new process's id, or the error with which the machine refused one."""

    pid: int = 0
    error: str = ""
