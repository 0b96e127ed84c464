"""One difference from vLLM, with its reason."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """`requests` and `places` are regular expressions of whole names.

    A place is `status`, `- path` of what only vLLM has, `+ path` of what only we have, `= path` of another value,
    `~ path` of the same text in other pieces.
    """

    what: str
    vllm: str
    ours: str
    why: str
    requests: str
    places: str
