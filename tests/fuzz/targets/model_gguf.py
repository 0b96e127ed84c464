"""GGUF files: a tiny whole one, changed in its fields, its tensors or its bytes; then used as a cluster does."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.frame import Play
from tests.fuzz.mutate import VALUES, mutated_bytes
from tests.fuzz.targets._models import playing_models
from tests.workers.made_models import ARRAY, BOOL, FORMS, STRING, Gguf, Tensor, gguf

TEST_INPUTS = 60
INPUTS_MEANT = 120_000
DEADLINE_S = 20.0
_KINDS = {**FORMS, BOOL: "<B"}  # a truth value of any byte
_SIZES = [0, 1, 2, 3, 7, 8, 16, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
_TEXTS = [value for value in VALUES if isinstance(value, str)]


def make(draw: random.Random) -> bytes:
    made = gguf(draw.choice(("llama", "llama", "qwen2")))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        draw.choice((_change_field, _change_field, _change_list, _change_tensor, _change_counts))(draw, made)
    content = made.encoded()
    if draw.random() < 0.4:
        # The header is where the decisions are: contents of tensors are only numbers.
        content = mutated_bytes(draw, content[:1900]) + content[1900:]
    return content


def _change_field(draw: random.Random, made: Gguf) -> None:
    name = draw.choice(list(made.fields))
    match draw.randrange(6):
        case 0:
            del made.fields[name]
        case 1:
            made.extra.append((name, *made.fields[name]))
        case 2:
            made.fields[name] = STRING, draw.choice(_TEXTS)
        case 3:
            made.fields[name] = ARRAY, struct.pack("<IQ", draw.randrange(14), draw.choice(_SIZES))
        case 4:
            made.fields[draw.choice(_TEXTS)] = made.fields.pop(name)
        case _:
            made.fields[name] = _number(draw)


def _number(draw: random.Random) -> tuple[int, bytes]:
    kind = draw.choice(list(_KINDS))
    size = struct.calcsize(_KINDS[kind])
    if kind in (6, 12):
        number = draw.choice((0.0, -1.0, 1e-5, 1e4, 1e308, float("nan"), float("inf")))
        return kind, struct.pack("<d", number) if kind == 12 else struct.pack("<f", min(number, 3e38))
    return kind, struct.pack("<Q", draw.choice(_SIZES))[:size]


def _change_list(draw: random.Random, made: Gguf) -> None:
    lists = [
        name for name, (kind, value) in made.fields.items() if kind == ARRAY and isinstance(value, tuple)
    ]
    if not lists:
        return
    name = draw.choice(lists)
    kind, items = made.fields[name][1]
    changed: list[Any] = list(items)
    place = draw.randrange(len(changed)) if changed else 0
    match draw.randrange(4):
        case 0:
            del changed[place:]
        case 1 if changed:
            changed.append(changed[place])
        case 2 if kind == STRING and changed:
            changed[place] = draw.choice([*_TEXTS, "a b", "ab", " ", "a  b", "ab ab"])
        case _:
            draw.shuffle(changed)
    made.fields[name] = ARRAY, (kind, changed)


def _change_tensor(draw: random.Random, made: Gguf) -> None:
    if not made.tensors:
        return
    place = draw.randrange(len(made.tensors))
    tensor = made.tensors[place]
    match draw.randrange(7):
        case 0:
            del made.tensors[place]
        case 1:
            made.tensors.append(tensor)
        case 2:
            tensor.shape = tuple(draw.choice(_SIZES) for _ in range(draw.randrange(6)))
        case 3:
            tensor.kind = draw.choice((1, 2, 8, 12, 26, 30, 99, 2**32 - 1))
        case 4:
            tensor.offset = draw.choice([*_SIZES, 32, 64, 2**64 - 32])
        case 5:
            tensor.content = draw.randbytes(len(tensor.content))
        case _:
            made.tensors[place] = Tensor("rope_freqs.weight", (2,), content=draw.randbytes(8))


def _change_counts(draw: random.Random, made: Gguf) -> None:
    match draw.randrange(4):
        case 0:
            made.tensor_count = draw.choice(_SIZES)
        case 1:
            made.field_count = draw.choice(_SIZES)
        case 2:
            made.version = draw.choice(_SIZES[:9]) & 0xFFFFFFFF
        case _:
            made.tail = draw.randbytes(draw.choice((1, 100)))


@contextlib.contextmanager
def playing() -> Iterator[Play]:
    with playing_models() as use, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"

        def play(content: bytes) -> str:
            path.write_bytes(content)
            try:
                return use(path)
            finally:
                os.truncate(path, 0)

        yield play
