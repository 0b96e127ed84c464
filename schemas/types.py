"""The base of every message, and the field types that carry their own limits.

Integers are nanoseconds, bytes, tokens or blocks, by the name of the field. A field that can be wrong is typed so that
the decoder refuses it; nothing is validated twice.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

#: `$` alone would let one newline through, and a newline inside a subject ends a line of the NATS protocol.
ID_PATTERN = r"^[A-Za-z0-9_-]{1,80}$(?!\n)"
INT_MAX = 2**63 - 1

#: Name of a process, node, request or order: one token of a NATS subject.
Id = Annotated[str, Meta(pattern=ID_PATTERN, description="letters, digits, - and _; at most 80")]
TEXT_MAX = 512
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
#: Whether exact numerics hold on a worker's CPU, by its own test; "": not tried, not reported, or not claimed.
ExactNumerics = Literal["", "held", "not_held"]
Ns = Annotated[int, Meta(ge=0, le=INT_MAX, description="nanoseconds")]
Bytes = Annotated[int, Meta(ge=0, le=INT_MAX, description="bytes")]
Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1, description="tokens")]
Blocks = Annotated[int, Meta(ge=0, le=2**31 - 1, description="blocks")]
Count = Annotated[int, Meta(ge=0, le=INT_MAX)]
Layers = Annotated[int, Meta(ge=0, le=10_000)]
LayersOfRun = Annotated[int, Meta(ge=1, le=10_000)]
KvHeads = Annotated[int, Meta(ge=0, le=100_000, description="KV heads")]
Seq = Annotated[int, Meta(ge=0, le=INT_MAX, description="sequence number in the EVENTS stream")]

KEY_BYTES = 16
#: Most bytes of a message about a request beside its tokens and blocks (sampling, names, headers).
REQUEST_AROUND_BYTES = 64 << 10
#: Of one request.
BLOCKS_MAX, PACKED_TOKENS_MAX = 65_536, 4_194_304
#: Block keys one after another, 16 bytes each (base64 in JSON). See `halfmoon.schemas.keys`.
BlockKeys = Annotated[
    bytes, Meta(max_length=KEY_BYTES * BLOCKS_MAX, description="16-byte block keys, concatenated")
]
#: Token ids one after another, little-endian u32 (base64 in JSON).
PackedTokens = Annotated[
    bytes, Meta(max_length=4 * PACKED_TOKENS_MAX, description="token ids, little-endian u32")
]
#: Rows of a prompt's log probabilities (base64 in JSON). See `halfmoon.schemas.sampling`.
PackedLogprobs = Annotated[
    bytes, Meta(max_length=PACKED_TOKENS_MAX, description="rows of a prompt's log probabilities")
]


def check_whole_keys(block_keys: bytes) -> None:
    """For `__post_init__`: raises ValueError when the length is no multiple of 16, so that the decoder refuses it.

    One such event in the log would otherwise stop every conductor that reads it, each time.
    """
    if len(block_keys) % KEY_BYTES:
        raise ValueError(f"block_keys: {len(block_keys)} bytes is no multiple of {KEY_BYTES}")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type", omit_defaults=True):
    """A frozen value that crosses a process boundary. In JSON its field `type` names the class."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A frozen value inside a message; never sent alone."""


def option(description: str, metavar: str = "", **bounds: Any) -> Meta:
    """The declaration beside the type of a process's option: its help, the word for its value there, and the bounds of
    `Meta`.
    """
    return Meta(description=description, extra={"metavar": metavar} if metavar else None, **bounds)


Encryption = Literal["auto", "always", "never"]
#: Of store agents and of workers.
EncryptionOption = Annotated[
    Encryption,
    option("of blocks and of channels over TCP; auto: between hosts. The secret is proved in any case"),
]
