"""Tokens in, text out: whatever happens to deliveries on their way, the client reads one and the same text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from frontend_double import ANSWER
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.schemas.api.requests import AnswerForm, ApiRequest, AskedPrompt
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.keys import pack_tokens
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.schemas.tokens import Delivery, TakeRequest
from halfmoon.workers.frontend.open_request import OpenRequest, Piece, Progress, RequestOrigin, order_rank
from halfmoon.workers.frontend.prompts import TokenizedPrompt
from halfmoon.workers.model.text.tokenizer import Tokenizer
from tests.lengths import examples
from tests.workers.made_models import speaking


class Collected:
    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def on_piece(self, request: OpenRequest, piece: Piece) -> None:
        self.pieces.append(piece)

    def on_error(self, request: OpenRequest, error: Exception) -> None:
        raise AssertionError(error)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def opened(
    tokenizer: Tokenizer,
    *,
    prompt: Sequence[int] = (0,),
    stops: tuple[str, ...] = (),
    include_stop: bool = False,
    skip_special_tokens: bool = True,
    **sampling: Any,
) -> tuple[OpenRequest, Collected]:
    listener = Collected()
    ask = ApiRequest(
        chat=False,
        prompt=AskedPrompt(text="x"),
        model="",
        max_tokens=999,
        sampling=Sampling(**sampling),
        stops=stops,
        answer=AnswerForm(stream=True, include_stop=include_stop, skip_special_tokens=skip_special_tokens),
        ttft_slo_ns=0,
        tbt_slo_ns=0,
        tenant="",
        cache_salt="",
        priority=0,
        request_id="",
    )
    arrived = RequestArrived(request_id="r", frontend_id="f", prompt_tokens=1, max_tokens=999, block_keys=b"")
    request = OpenRequest(
        ask,
        arrived,
        TokenizedPrompt(pack_tokens(prompt), len(prompt), b"", b"", 999),
        tokenizer,
        listener,  # type: ignore[arg-type]
        RequestOrigin(1),
    )
    take(request, "7-0")
    return request, listener


def take(request: OpenRequest, order_id: str, role: Any = "decode") -> Any:
    return request.take(TakeRequest(request_id="r", order_id=order_id, worker_id=f"w-{order_id}", role=role))


def deliver(
    request: OpenRequest, first: int, ids: list[int], reason: Any = "", order_id: str = "7-0"
) -> Progress:
    tokens = [SampledToken(token_id=token) for token in ids]
    delivery = Delivery(request_id="r", order_id=order_id, index=first, tokens=tokens, finish_reason=reason)
    return request.accept(delivery, 5)


def cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Deliveries that cover `length` tokens in order, some of them repeated or overlapping."""
    pieces, at = [], 0
    while at < length:
        first = max(0, at - draw(st.integers(0, 3)))
        end = min(length, at + draw(st.integers(1, 6)))
        pieces.append((first, end))
        at = end
    return pieces


@settings(max_examples=examples(150), deadline=None)
@given(drawn=st.data(), text=st.text(max_size=40), stop=st.text(min_size=1, max_size=3) | st.none())
def test_the_text_does_not_depend_on_how_deliveries_are_cut(
    tokenizer: Tokenizer, drawn: st.DataObject, text: str, stop: str | None
) -> None:
    ids = [*tokenizer.encode(text), min(tokenizer.eos_ids)]
    request, listener = opened(tokenizer, stops=(stop,) if stop else ())
    for first, end in drawn.draw(st.composite(lambda draw: cuts(draw, len(ids)))()):
        deliver(request, first, ids[first:end], "stop" if end == len(ids) else "")
    plain = tokenizer.decode(ids[:-1])
    assert listener.text == request.text == (plain.partition(stop)[0] if stop else plain)
    assert [piece.finish_reason for piece in listener.pieces if piece.finish_reason] == ["stop"]
    assert listener.pieces[-1].finish_reason == "stop"


def test_an_answer_begins_with_the_space_that_its_first_token_has(tmp_path: Path) -> None:
    text = Tokenizer.load(str(speaking("llama2", "").write(tmp_path)))
    prompt, whole = (
        text.encode(words, add_special=True) for words in ("The capital is", "The capital is Paris")
    )
    for begin, expected in ((prompt, " Paris"), (prompt[:1], "Paris")):
        request, listener = opened(text, prompt=begin)
        deliver(request, 0, whole[len(prompt) :], "length")
        assert listener.text == request.text == expected


def test_control_tokens_are_text_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    """But for the one that ends the answer, as with vLLM; that one too with `include_stop_str_in_output`."""
    end = min(tokenizer.eos_ids)
    name = next(name for name, token in tokenizer.control.items() if token == end)
    ids = [*tokenizer.encode("One"), end, *tokenizer.encode(" two"), end]
    for skips, includes, text in (
        (True, False, "One two"),
        (False, False, f"One{name} two"),
        (False, True, f"One{name} two{name}"),
    ):
        request, listener = opened(tokenizer, skip_special_tokens=skips, include_stop=includes)
        deliver(request, 0, ids, "stop")
        assert listener.text == text
    request, listener = opened(tokenizer, skip_special_tokens=False, stops=(name[:4],))
    deliver(request, 0, ids, "stop")
    assert listener.text == "One"  # a stop string may be in its name


def test_the_end_of_a_text_that_its_grammar_cut_is_no_text(tokenizer: Tokenizer) -> None:
    request, listener = opened(tokenizer, skip_special_tokens=False)
    ids = tokenizer.encode("One")
    cut = SampledToken(token_id=min(tokenizer.eos_ids), cut=True)
    tokens = [*(SampledToken(token_id=token) for token in ids), cut]
    delivery = Delivery(request_id="r", order_id="7-0", index=0, tokens=tokens, finish_reason="length")
    assert request.accept(delivery, 5) is Progress.FINISHED
    assert (listener.text, listener.pieces[-1].finish_reason) == ("One", "length")


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_token_of_the_request_is_no_text_unless_that_is_asked_for(
    tokenizer: Tokenizer, included: bool
) -> None:
    *ids, stop = tokenizer.encode("One two")
    request, listener = opened(tokenizer, include_stop=included, stop_token_ids=[stop])
    deliver(request, 0, [*ids, stop], "stop")
    assert listener.text == ("One two" if included else tokenizer.decode(ids))
    assert request.stop_reason == stop


def test_characters_of_several_tokens_are_never_split(tokenizer: Tokenizer) -> None:
    request, listener = opened(tokenizer)
    ids = tokenizer.encode(ANSWER)
    for index, token in enumerate(ids):
        deliver(request, index, [token], "length" if index == len(ids) - 1 else "")
    assert listener.text == ANSWER
    assert not any("\ufffd" in piece.text for piece in listener.pieces)
    assert any(not piece.text for piece in listener.pieces)  # held back: or the test shows nothing


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_and_is_shown_when_asked_for(
    tokenizer: Tokenizer, included: bool
) -> None:
    request, listener = opened(tokenizer, stops=("nothing like it", "oons: 🌓"), include_stop=included)
    progress = []
    for index, token in enumerate(tokenizer.encode(ANSWER)):
        progress.append(deliver(request, index, [token]))
        if progress[-1] is not Progress.MORE:
            break
    assert progress[-1] is Progress.STOPPED
    assert listener.text == ("Half moons: 🌓" if included else "Half m")
    assert listener.pieces[-1].finish_reason == "stop"
    assert len(request.output_ids) == len(progress)  # up to the token that completed it
    assert deliver(request, len(progress), [5]) is Progress.NOTHING


def test_what_looks_like_a_stop_string_at_the_end_is_shown(tokenizer: Tokenizer) -> None:
    request, listener = opened(tokenizer, stops=("rest.!",))
    ids = tokenizer.encode(ANSWER)
    assert deliver(request, 0, ids, "length") is Progress.FINISHED
    assert listener.text == ANSWER
    assert listener.pieces[-1].finish_reason == "length"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    request, listener = opened(tokenizer, stops=("a",), min_tokens=4)
    ids = tokenizer.encode("a b a b a b a b")
    for index, token in enumerate(ids):
        if deliver(request, index, [token]) is not Progress.MORE:
            break
    assert len(request.output_ids) > 4
    assert listener.text.count("a") >= 2


def test_an_order_that_is_newer_takes_over_and_the_older_is_ignored(tokenizer: Tokenizer) -> None:
    request, listener = opened(tokenizer)
    ids = tokenizer.encode(ANSWER)
    deliver(request, 0, ids[:5])
    reply = take(request, "30-1")
    assert reply.output_ids == b"".join(token.to_bytes(4, "little") for token in ids[:5])
    assert deliver(request, 5, ids[5:9]) is Progress.NOTHING
    assert take(request, "7-0").gone
    assert take(request, "9-9").gone
    assert deliver(request, 0, ids[:7], order_id="30-1") is Progress.MORE  # what is there stays
    assert deliver(request, 7, ids[7:], "length", order_id="30-1") is Progress.FINISHED
    assert listener.text == ANSWER
    assert take(request, "31-0").gone


def test_a_gap_changes_nothing(tokenizer: Tokenizer) -> None:
    request, listener = opened(tokenizer)
    ids = tokenizer.encode(ANSWER)
    assert deliver(request, 2, ids[2:4]) is Progress.GAP
    assert listener.pieces == []
    assert request.seen_tokens == 4
    assert deliver(request, 0, ids[:3]) is Progress.MORE
    assert request.output_ids == ids[:3]


def test_an_aborted_order_is_for_the_conductors(tokenizer: Tokenizer) -> None:
    request, _ = opened(tokenizer)
    assert deliver(request, 0, [], "abort") is Progress.NOTHING
    assert deliver(request, 0, [65], "stop") is Progress.FINISHED


@pytest.mark.parametrize(
    ("older", "newer"),
    [("9-0", "10-0"), ("9-1", "9-2"), ("9-9", "9-10"), ("x", "1-0"), ("", "0-0"), ("a-b", "0-1")],
)
def test_orders_are_compared_as_numbers(older: str, newer: str) -> None:
    assert order_rank(older) < order_rank(newer)
