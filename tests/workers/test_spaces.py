"""Tokenizers that write a space as "▁" (Llama 2, Mistral, Gemma, T5): no space is lost or added at a seam."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.frontend.openai.logprobs import TextOffsets, completion_logprobs
from halfmoon.workers.model.loading.errors import ModelUnsupported
from halfmoon.workers.model.text.chat_template import plain_messages
from halfmoon.workers.model.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.lengths import examples
from tests.workers.made_models import STYLES, speaking

TEMPLATE = "<s>{% for m in messages %}[INST] {{ m.content }} [/INST]{% if loop.index0 % 2 %}</s>{% endif %}{% endfor %}"
PROMPT = "The capital of France is"
styles = pytest.mark.parametrize("style", STYLES)


@functools.cache
def tokenizer(style: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(str(speaking(style, TEMPLATE).write(Path(folder))))


@functools.cache
def library(style: str) -> tokenizers.Tokenizer:
    """As transformers reads the same file."""
    return tokenizers.Tokenizer.from_str(tokenizer(style).serialized())


def tokens(style: str) -> st.SearchStrategy[list[int]]:
    """Any, and more often those of "▁", of control, and the bytes of characters."""
    names = library(style).get_vocab()
    marks = [names[name] for name in ("▁", "▁▁▁", "<go>", "<s>", "</s>") if name in names]
    one = st.integers(0, max(names.values())).map(lambda i: [i]) | st.sampled_from(marks).map(lambda i: [i])
    if "<0x00>" in names:
        spelled = st.sampled_from("é猫🌙 \n").map(lambda c: [names[f"<0x{byte:02X}>"] for byte in c.encode()])
        one |= spelled
    return st.lists(one, max_size=12).map(lambda parts: [i for part in parts for i in part])


@styles
def test_a_word_behind_the_prompt_keeps_its_space(style: str) -> None:
    text = tokenizer(style)
    prompt, whole = (text.encode(words, add_special=True) for words in (PROMPT, PROMPT + " Paris."))
    assert whole[: len(prompt)] == prompt
    detokenizer = IncrementalDetokenizer(text, reversed(prompt))
    answer = "".join(detokenizer.push([i]) for i in whole[len(prompt) :]) + detokenizer.flush()
    assert answer == " Paris."
    assert text.decode(whole) == PROMPT + " Paris."


@styles
def test_a_word_that_begins_the_text_is_decoded_as_the_library_decodes_it(style: str) -> None:
    text = tokenizer(style)
    begin = text.encode("", add_special=True)
    word = text.encode("a", add_special=True)
    assert begin == word[:1] == [1]
    detokenizer = IncrementalDetokenizer(text, begin)
    assert detokenizer.push(word[1:]) == library(style).decode(word, skip_special_tokens=True) == "a"


@styles
@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_streamed_text_is_the_decoded_whole_and_the_librarys(style: str, draw: st.DataObject) -> None:
    text = tokenizer(style)
    ids = draw.draw(tokens(style))
    cut = draw.draw(st.integers(0, len(ids)))
    whole = text.decode(ids)
    theirs = library(style).decode(ids, skip_special_tokens=True)
    # Of bytes that are no UTF-8 the library makes a U+FFFD each, and of the good ones beside them, too.
    if "\ufffd" not in theirs:
        assert whole == theirs
    detokenizer = IncrementalDetokenizer(text)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == whole
    before = text.decode(ids[:cut])
    behind = IncrementalDetokenizer(text, reversed(ids[:cut]))
    after = "".join(behind.push([i]) for i in ids[cut:]) + behind.flush()
    if "\ufffd" not in before + after:
        assert before + after == whole


@styles
@given(
    st.lists(st.sampled_from(["cat", " ", "  the", "[INST]", "\n", "moon", "<go>", "é", "猫"]), max_size=8)
)
@settings(max_examples=examples(100), deadline=None)
def test_a_chat_is_its_rendered_template(style: str, words: list[str]) -> None:
    messages = [{"role": "user", "content": "".join(words)}, {"role": "assistant", "content": "cat"}]
    messages.append({"role": "user", "content": "  moon"})
    rendered = tokenizer(style)._render(plain_messages(messages), True)
    expected = library(style).encode(rendered, add_special_tokens=False).ids
    assert tokenizer(style).encode_chat(messages) == expected


@styles
def test_a_control_token_in_a_message_changes_no_piece_but_its_own(style: str) -> None:
    messages = [{"role": "user", "content": "the </s> cat"}]
    ids = tokenizer(style).encode_chat(messages)
    # It is a control token too: anybody can write what no token has.
    unknown = tokenizer(style).control["<unk>"]
    assert [i for i in ids if i in tokenizer(style).control_ids - {unknown}] == [1]
    head = library(style).encode("<s>[INST] the", add_special_tokens=False).ids
    assert ids[: len(head)] == head
    if style != "unigram":  # which has no token for "<" and "/"
        assert tokenizer(style).decode(ids) == "[INST] the </s> cat [/INST]"


@styles
def test_log_probabilities_name_tokens_as_the_text_has_them(style: str) -> None:
    text = tokenizer(style)
    prompt, whole = (text.encode(words) for words in (PROMPT, PROMPT + " the cat"))
    sampled = [SampledToken(token_id=i, logprob=-1.0, top_logprobs=[(i, -1.0)]) for i in whole[len(prompt) :]]
    entries = completion_logprobs(text, sampled, 1, TextOffsets(IncrementalDetokenizer(text, prompt)))
    assert "".join(entries["tokens"]) == " the cat"
    assert entries["text_offset"] == [0, *itertools.accumulate(map(len, entries["tokens"][:-1]))]
    assert [list(top) for top in entries["top_logprobs"]] == [[token] for token in entries["tokens"]]


CUT = {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, CUT]},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
)  # fmt: skip
def test_a_decoder_that_would_be_read_wrongly_is_refused(decoder: dict[str, object], tmp_path: Path) -> None:
    made = speaking("first", TEMPLATE)
    made.files["tokenizer.json"]["decoder"] = decoder
    with pytest.raises(
        ModelUnsupported, match=r"tokenizer\.json: decoder is .*supported: ByteLevel, Metaspace"
    ):
        Tokenizer.load(str(made.write(tmp_path)))


def test_without_a_decoder_words_have_blanks_between_them(tmp_path: Path) -> None:
    made = speaking("first", TEMPLATE)
    made.files["tokenizer.json"]["decoder"] = None
    text = Tokenizer.load(str(made.write(tmp_path)))
    ids = text.encode("the cat")
    assert text.decode(ids) == tokenizers.Tokenizer.from_str(json.dumps(made.files["tokenizer.json"])).decode(
        ids
    )
