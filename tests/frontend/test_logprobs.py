"""Tokens shown one by one: each alternative has its entry, the drawn token its own, and offsets fit the text."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from frontend_double import Double

from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.sampling import SampledToken
from halfmoon.workers.frontend.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from halfmoon.workers.model.text.detokenizer import IncrementalDetokenizer, TextStart
from halfmoon.workers.model.text.tokenizer import Tokenizer

MOONS = "a🌑🌒 🌓é"


def parts_of_characters(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are no text of their own, all of which were once written as U+FFFD."""
    return [token for token in range(tokenizer.vocab_size) if b"\xf0" in tokenizer.token_bytes(token)][:5]


def sampled(token_id: int, others: list[int]) -> SampledToken:
    """`others` are likelier than the drawn one, which comes last, as with a temperature."""
    top = [(other, -0.5 - place) for place, other in enumerate(others)]
    return SampledToken(token_id=token_id, logprob=-9.25, top_logprobs=top)


def bytes_of(shown: str, tokenizer: Tokenizer) -> bytes:
    if shown in tokenizer.control:
        return b""
    written = shown.removeprefix("bytes:")
    return shown.encode() if written == shown else bytes.fromhex(written.replace("\\x", ""))


def test_every_alternative_is_there_and_the_drawn_tokens_is_its_own(tokenizer: Tokenizer) -> None:
    others = parts_of_characters(tokenizer)
    end = min(tokenizer.eos_ids)
    ids = [*tokenizer.encode(MOONS), end]
    assert sum("\ufffd" in tokenizer.decode([token]) for token in ids) > 4  # or the test shows nothing
    samples = [sampled(token, [each for each in others if each != token]) for token in ids]
    told = completion_logprobs(tokenizer, samples, 5, TextOffsets(IncrementalDetokenizer(tokenizer)))
    for token, logprob, alternatives, sample in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], samples, strict=True
    ):
        assert alternatives[token] == logprob == -9.25
        assert list(alternatives.values()) == [-9.25, *(each for _, each in sample.top_logprobs)]
    assert b"".join(bytes_of(token, tokenizer) for token in told["tokens"]).decode() == MOONS
    assert told["tokens"][-1] == tokenizer.names([end])[0] != ""
    assert told["tokens"][0] == "a"


def test_offsets_are_places_in_the_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode(MOONS), min(tokenizer.eos_ids)]
    offsets = TextOffsets(IncrementalDetokenizer(tokenizer))
    found = [offsets.of_next(token) for token in ids]
    written = b""
    for token, offset in zip(ids, found, strict=True):
        assert offset == len(written.decode(errors="ignore"))
        written += tokenizer.token_bytes(token)
    assert found[-1] == len(MOONS)


def test_a_chats_tokens_join_to_its_text(tokenizer: Tokenizer) -> None:
    end = min(tokenizer.eos_ids)
    samples = [sampled(token, []) for token in [*tokenizer.encode(MOONS), end]]
    content = chat_logprobs(tokenizer, samples, 0, tokenizer)["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == MOONS
    assert content[-1]["token"] == tokenizer.names([end])[0] != ""
    assert "\ufffd" in content[1]["token"]


@pytest.mark.pure
@pytest.mark.realtime
def test_control_tokens_that_are_text_count_as_such(run: Any, tokenizer: Tokenizer) -> None:
    name, token = next(iter(tokenizer.control.items()))

    async def between(double: Double, seq: int, arrived: RequestArrived) -> None:
        await double.place(arrived, f"{seq}-0")
        ids = [*tokenizer.encode("One"), token, *tokenizer.encode(" two")]
        await double.deliver(double.delivery(arrived, f"{seq}-0", 0, ids, "length"))

    async def scenario(cluster: Any) -> None:
        cluster.double.script = between
        for skips, text, offset in ((True, "One two", 3), (False, f"One{name} two", 3 + len(name))):
            fields = {"max_tokens": 50, "logprobs": 1, "skip_special_tokens": skips}
            _, _, whole = await cluster.post("/v1/completions", {"prompt": "x", **fields})
            (choice,) = whole["choices"]
            assert choice["text"] == text
            told = choice["logprobs"]
            assert told["tokens"] == ["One", name, " two"]
            assert told["text_offset"] == [0, 3, offset]
            chat = {"messages": [{"role": "user", "content": "x"}], **fields, "logprobs": True}
            _, _, whole = await cluster.post("/v1/chat/completions", chat)
            content = whole["choices"][0]["logprobs"]["content"]
            assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text
            _, whole = await cluster.ask("generate", {"prompt": "x", **fields})
            assert whole["text"] == text
            echoed = {"prompt": [token, *tokenizer.encode("One")], "echo": True, "skip_special_tokens": skips}
            _, _, whole = await cluster.post("/v1/completions", echoed)
            assert whole["choices"][0]["text"] == ("One" if skips else f"{name}One") + text

    run(scenario)


class TwiceA:
    """A vocabulary in which A stands twice, as SentencePiece's do, and a word begins with a space."""

    text_start = TextStart(dropped=b" ")
    _bytes = (b"A", b"A", b" A", b" moon")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def names(self, ids: list[int]) -> list[str]:
        return [""] * len(ids)


def test_one_text_of_two_tokens_is_two_entries() -> None:
    tokenizer: Any = TwiceA()
    told = completion_logprobs(
        tokenizer,
        [sampled(3, [0, 1, 2]), sampled(1, [0, 1])],
        5,
        TextOffsets(IncrementalDetokenizer(tokenizer)),
    )
    assert told["top_logprobs"] == [
        {" moon": -9.25, "A": -0.5, "token_id:1": -1.5, " A": -2.5},
        {"A": -9.25, "token_id:0": -0.5},
    ]
    assert told["text_offset"] == [0, 4]  # the text has no first space


@pytest.mark.pure
@pytest.mark.realtime
def test_whole_and_streamed_completions_tell_the_same(run: Any, tokenizer: Tokenizer) -> None:
    others = parts_of_characters(tokenizer)

    async def moons(double: Double, seq: int, arrived: RequestArrived) -> None:
        await double.place(arrived, f"{seq}-0")
        ids = [*tokenizer.encode(MOONS), double.eos]
        for index, token in enumerate(ids):
            reason = "stop" if token == double.eos else ""
            delivery = double.delivery(arrived, f"{seq}-0", index, [token], reason)
            delivery.tokens[0] = sampled(token, [each for each in others if each != token])
            await double.deliver(delivery)

    async def scenario(cluster: Any) -> None:
        cluster.double.script = moons
        body = {"prompt": "moons", "max_tokens": 50, "logprobs": 5}
        _, _, whole = await cluster.post("/v1/completions", body)
        (choice,) = whole["choices"]
        assert choice["text"] == MOONS
        assert [len(each) >= 5 for each in choice["logprobs"]["top_logprobs"]] == [True] * len(
            choice["logprobs"]["tokens"]
        )
        events = await cluster.sse("/v1/completions", {**body, "stream": True})
        streamed: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
        for event in events[:-1]:
            for name, each in event["choices"][0]["logprobs"].items():
                streamed[name] += each
        assert streamed == choice["logprobs"]
        _, _, text = await cluster.post(
            "/detokenize", {"tokens": [*tokenizer.encode(MOONS), cluster.double.eos]}
        )
        assert orjson.dumps(text) == orjson.dumps({"prompt": MOONS + choice["logprobs"]["tokens"][-1]})

    run(scenario)
