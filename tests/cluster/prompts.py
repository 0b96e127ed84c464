"""Prompts of given lengths from a text that every checkout has, and what the model must say to them."""

from __future__ import annotations

import functools
from pathlib import Path

from halfmoon.workers.model.text.tokenizer import Tokenizer

MODEL = "smollm2-135m-instruct"
LENGTHS = (10, 17, 40, 100, 200, 256, 257, 400, 600, 1000, 1100, 2000, 4000)


@functools.cache
def text_ids() -> tuple[int, ...]:
    """Token ids of the licence, over and over."""
    words = (Path(__file__).parents[2] / "LICENSE").read_text().split()
    ids = Tokenizer.load(MODEL).encode(" ".join(words))
    return tuple(ids * 3)


def prompt(length: int) -> list[int]:
    """`length` tokens. Two lengths begin at different places of the text, so they share no block."""
    start = length * 13 % 1999
    return list(text_ids()[start : start + length])
