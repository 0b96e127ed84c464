"""A text's token ids by pieces are those that the tokenizers library gives for the whole text."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from halfmoon.workers.model.text import pieces, pre_tokenizer_probe
from halfmoon.workers.model.text.pieces import TextEncoder, TextNotEncoded
from tests.lengths import examples

#: What the steps before the model tell apart, and what stands beside a place where a text might be cut.
PARTS = [
    "a", "Bc", "def", "STOP", "é", "e\u0301", "ñ", "ǅ", "ʰ", "中", "ひら", "ا", "1", "2024", "٣", "²", "ⅷ",
    " ", " ", "  ", "\n", "\r\n", "\r", "\t", "\x0b", "\x1c", "\x85", "\xa0", "\u2003", "\u2028", "\u3000", "\u180e",
    "\u200b", ".", ",", "!", "?!", "/", "'s", "'", "'LL", "’t", "_", "(", "#", "\u0301", "\u0338", "\x00", "😀", "👩‍👧",
    "<|go|>", "<|go", "|>", "<tool>", "<left>", "$x",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=40).map("".join) | st.text(max_size=30)


def built(
    *steps: pre_tokenizers.PreTokenizer,
    nfc: bool = False,
    ignore_merges: bool = False,
    tokens: tuple[AddedToken, ...] = (),
    dropout: float | None = None,
) -> tokenizers.Tokenizer:
    """A byte-level BPE with some merges, a token before every text and three that were added, and `tokens`."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("Ġdef", "STOP", "Ġ2024", "ĊĊ", "ĠĠ", "Ġ.", "'s", "ĠBc", "æĺ", "Ã©")
    merges = [pair for word in words for pair in [(word[:end], word[end]) for end in range(1, len(word))]]
    # Any two of these are one token where no step parts them: a cut that is wrong shows.
    merges = list(dict.fromkeys([*merges, *itertools.product("aB1.!/'ĠĊčĉ", repeat=2)]))
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys([*names, *map("".join, merges)]))}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges, dropout=dropout)
    )
    if nfc:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    made.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<|go|>", "<|on|>")]
    )
    made.add_tokens(
        [AddedToken("<tool>"), AddedToken("<left>", lstrip=True), AddedToken("  ", normalized=False)]
    )
    made.add_tokens(list(tokens))
    start = made.token_to_id("<|on|>")
    made.post_processor = processors.TemplateProcessing(
        single="<|on|> $A", special_tokens=[("<|on|>", start)]
    )
    return made


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def byte_level(*, use_regex: bool = False, add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


DIGITS = pre_tokenizers.Digits(individual_digits=True)
FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "GPT-2": lambda: built(byte_level(use_regex=True)),
    "SmolLM": lambda: built(DIGITS, byte_level(use_regex=True)),
    "Llama 3": lambda: built(split(pre_tokenizer_probe.LLAMA3), byte_level(), ignore_merges=True),
    "Qwen 2": lambda: built(split(pre_tokenizer_probe.QWEN2), byte_level(), nfc=True),
    "GPT-4o": lambda: built(split(pre_tokenizer_probe.O200K), byte_level()),
    "NeMo": lambda: built(split(pre_tokenizer_probe.TEKKEN), byte_level(), ignore_merges=True),
    "DeepSeek 3": lambda: built(
        split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(pre_tokenizer_probe.DEEPSEEK3), byte_level()
    ),
}
WHOLE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "an expression that nobody knows": lambda: built(split(r"\S+|\s+"), byte_level()),
    "an expression behind the bytes": lambda: built(byte_level(), split(pre_tokenizer_probe.LLAMA3)),
    "no step that cuts": lambda: built(DIGITS, byte_level()),
    "a space before every text": lambda: built(byte_level(use_regex=True, add_prefix_space=True)),
    "spaces as pieces' beginnings": lambda: built(pre_tokenizers.Metaspace()),
    "words drawn anew each time": lambda: built(byte_level(use_regex=True), dropout=0.5),
    "a token with a space within": lambda: built(byte_level(use_regex=True), tokens=(AddedToken("a b"),)),
    "a token that takes the space behind": lambda: built(
        byte_level(use_regex=True), tokens=(AddedToken("<right>", rstrip=True),)
    ),
    "a token that is a word of its own": lambda: built(
        byte_level(use_regex=True), tokens=(AddedToken("ab", single_word=True),)
    ),
}


def changed(change: Callable[[tokenizers.Tokenizer], None]) -> Callable[[], tokenizers.Tokenizer]:
    """GPT-2's steps, changed by `change`."""

    def made() -> tokenizers.Tokenizer:
        one = FAMILIES["GPT-2"]()
        change(one)
        return one

    return made


WHOLE |= {
    "texts cut at a length": changed(lambda one: one.enable_truncation(4)),
    "texts filled up to a length": changed(lambda one: one.enable_padding(length=64)),
    "a mark on pieces within a word": changed(
        lambda one: setattr(one.model, "continuing_subword_prefix", "##")
    ),
    "a mark on a word's last piece": changed(lambda one: setattr(one.model, "end_of_word_suffix", "</w>")),
}


@functools.cache
def both(family: str) -> tuple[tokenizers.Tokenizer, TextEncoder, TextEncoder]:
    """The library's tokenizer, and encoders of it and of the same one that knows no special tokens."""
    blind = FAMILIES[family]()
    blind.encode_special_tokens = True
    return FAMILIES[family](), TextEncoder(FAMILIES[family]()), TextEncoder(blind)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXTS)
@settings(max_examples=examples(4000), deadline=None)
def test_pieces_have_the_ids_of_the_whole_text(family: str, text: str) -> None:
    library, encoder, blind = both(family)
    assert encoder.cuts
    for special in (False, True):
        wanted = library.encode(text, add_special_tokens=special).ids
        # The second time from what the first one learned.
        assert [encoder.encode(text, add_special=special) for _ in range(2)] == [wanted, wanted]
    library.encode_special_tokens = True
    assert blind.encode(text) == library.encode(text, add_special_tokens=False).ids
    library.encode_special_tokens = False


@pytest.mark.parametrize("kind", WHOLE)
def test_a_tokenizer_of_another_kind_gets_its_texts_whole(kind: str) -> None:
    encoder = TextEncoder(WHOLE[kind]())
    assert not encoder.cuts
    if "drawn" not in kind:
        text = "ab a b <right>  c 12"
        assert encoder.encode(text) == WHOLE[kind]().encode(text, add_special_tokens=False).ids


def test_a_vocabulary_without_the_letter_that_is_tried_has_its_texts_whole() -> None:
    """What stands around a text is found around that letter."""
    made = built(byte_level(use_regex=True))
    content = json.loads(made.to_str())
    content["model"]["vocab"]["no letter"] = content["model"]["vocab"].pop("a")
    content["model"]["merges"] = []
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    encoder = TextEncoder(made)
    assert not encoder.cuts
    assert encoder.encode("Bc def", add_special=True) == made.encode("Bc def").ids


def test_whitespace_is_the_same_to_python_and_to_the_library() -> None:
    """Else a text would be cut within what the library holds for one run of whitespace."""
    characters = [chr(i) for i in range(0x20000) if not 0xD800 <= i < 0xE000]
    parts = split(r"\s").pre_tokenize_str("".join("a" + character for character in characters))
    found = {part for part, _ in parts if len(part) == 1} - {"a"}
    assert len(found) > 20
    assert [character for character in found if not character.isspace()] == []


def test_what_is_kept_of_pieces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECES_MAX", 3)
    encoder = TextEncoder(FAMILIES["GPT-2"]())
    library = FAMILIES["GPT-2"]()
    for text in ("a def Bc STOP a 1", "x" * (pieces.PIECE_CHARACTERS_MAX + 1), "a def"):
        assert encoder.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert len(encoder._known) <= 3
        assert max(map(len, encoder._known)) <= pieces.PIECE_CHARACTERS_MAX


def test_a_text_that_the_library_fails_on_is_told_so() -> None:
    encoder = TextEncoder(FAMILIES["GPT-2"]())
    with pytest.raises(TextNotEncoded, match="fails on this text"):
        encoder.encode("a \ud800 def")
    assert encoder.encode("a def") == FAMILIES["GPT-2"]().encode("a def", add_special_tokens=False).ids
