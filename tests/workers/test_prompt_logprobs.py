"""How likely a prompt's own tokens are: the same bits however the prompt is computed, and without any cached block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import decode_script
import msgspec
import pytest
import torch
from prefill_script import LAYOUT, TOKENS, Script, prompt, reply

from halfmoon.schemas.sampling import (
    PromptLogprob,
    SampledToken,
    Sampling,
    pack_logprobs,
    scored_tokens_max,
    unpack_logprobs,
)
from halfmoon.workers.machines import Deliver, TokensTaken
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.null_engine import NullEngine
from halfmoon.workers.model.prompt_rows import PromptRows, PromptScores, ScoredToken
from halfmoon.workers.prefill.events import PushOpened, SlotsReserved
from halfmoon.workers.sample_requests import LOGPROB_MIN, next_token, scores_of

BLOCK, TOP = 32, 3
PROMPT = [(i * i * 31 + 17 * i) % 40000 + 20 for i in range(BLOCK * 2 + 7)]
TABLE = [2, 0, 1]


def engine_of(model: LoadedModel, *, exact: bool) -> Engine:
    few = replace(model, config=replace(model.config, layers=2))
    return Engine(few, num_blocks=4, block_tokens=BLOCK, exact=exact)


def scored(engine: Engine, token_ids: Sequence[int]) -> list[ScoredToken]:
    """By `prefill_chunk`, a block at a time."""
    scores = PromptScores(token_ids, TOP)
    for start in range(0, len(token_ids), BLOCK):
        engine.prefill_chunk(token_ids[start : start + BLOCK], start, TABLE, scores=scores)
    return scores.rows


def test_a_row_among_others_has_the_bits_of_the_row_that_a_token_is_drawn_from(
    model_f32: LoadedModel,
) -> None:
    engine = engine_of(model_f32, exact=True)
    assert len(scored(engine, PROMPT)) == len(PROMPT) - 1
    for count in (1, 7, 16, 17, 31, 32):
        token_ids = PROMPT[: BLOCK + count]
        scores = PromptScores([*token_ids, 28], TOP)  # a token behind the last row, too
        engine.prefill_chunk(token_ids[:BLOCK], 0, TABLE, scores=scores)
        logits = engine.prefill_chunk(token_ids[BLOCK:], BLOCK, TABLE, want_logits=True, scores=scores)
        assert logits is not None
        logprobs = torch.log_softmax(logits, dim=-1)
        row = scores.rows[-1]
        assert (len(scores.rows), row.logprob) == (BLOCK + count, float(logprobs[28]))
        assert row.rank == int((logprobs >= logprobs[28]).sum())
        values, ids = logprobs.topk(TOP)
        assert row.top_logprobs == tuple(zip(ids.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("exact", [True, False])
def test_a_mixed_iteration_scores_as_the_prompt_alone(model_f32: LoadedModel, exact: bool) -> None:
    engine = engine_of(model_f32, exact=exact)
    alone = scored(engine, PROMPT)
    scores = PromptScores(PROMPT, TOP)
    step = BLOCK if exact else len(PROMPT)
    for _ in range(2):  # who gave its room up is computed again from the beginning
        chunks = [
            PromptRows(PROMPT[start : start + step], start, TABLE, scores=scores)
            for start in range(0, len(PROMPT), step)
        ]
        engine.mixed(chunks, [9], [0], [[3]])
        if exact:
            assert scores.rows == alone
        else:
            assert [row.rank for row in scores.rows] == pytest.approx([row.rank for row in alone], rel=0.01)
            assert [row.logprob for row in scores.rows] == pytest.approx(
                [row.logprob for row in alone], abs=1e-3
            )


def test_the_null_engine_scores_what_it_would_say(model_f32: LoadedModel) -> None:
    engine = NullEngine(model_f32.config, num_blocks=4, block_tokens=BLOCK)
    token_ids = [5, 66, 5]  # after position 0 it says 66
    scores = scores_of(token_ids, 2)
    row = engine.prefill_chunk(token_ids, 0, [0], want_logits=True, scores=scores)
    assert scores is not None
    vocab, never = model_f32.config.vocab, float("-inf")
    assert scores.rows == [
        ScoredToken(1, 0.0, ((66, 0.0), (67, never))),
        ScoredToken(vocab, never, ((67, 0.0), (68, never))),
    ]
    engine.mixed([PromptRows(token_ids, 0, [0], True, scores)], [], [], [])
    assert len(scores.rows) == 2
    sampling = Sampling(temperature=0.0, prompt_logprobs=2)
    first = next_token(engine, row, sampling, token_ids, [], scores)
    assert list(unpack_logprobs(first.prompt_logprobs, 2)) == [
        PromptLogprob(1, 0.0, ((66, 0.0), (67, LOGPROB_MIN))),
        PromptLogprob(vocab, LOGPROB_MIN, ((67, 0.0), (68, LOGPROB_MIN))),
    ]
    assert next_token(engine, row, sampling, token_ids, []) == SampledToken(token_id=first.token_id)
    assert scores_of(token_ids, -1) is None


def test_rows_are_packed_without_loss_and_the_longest_prompt_fits_in_a_message() -> None:
    rows = [(place + 1, -0.1 * place, ((7, -0.25), (2**32 - 1, -3.5))) for place in range(50)]
    packed = pack_logprobs(rows, 2)
    again = list(unpack_logprobs(packed, 2))
    assert pack_logprobs(again, 2) == packed
    assert again[1].logprob == torch.tensor(-0.1).item()
    for payload, top in ((1 << 20, 0), (1 << 20, 1), (1 << 20, 20), (8 << 20, 5)):
        most = scored_tokens_max(payload, top)
        size = len(packed) // 50 // 3 * (1 + top) * (most - 1)
        assert payload - (193 << 10) < -(-size // 3) * 4 <= payload - (192 << 10), (payload, top, most)
    assert scored_tokens_max(0, 0) == 1


def test_a_prompt_whose_own_log_probabilities_are_wanted_is_computed_whole() -> None:
    script = Script()
    script.receive()
    script(TokensTaken, reply=reply(sampling=Sampling(prompt_logprobs=1)))
    # Another try at the order left them: they are not written again, and not read.
    script(SlotsReserved, slots=[4, 5, 6], present=[0, 1])
    script(PushOpened)
    (computed,) = [action for action in script.past if isinstance(action, type(prompt()))]
    assert computed == prompt(present=[0, 1], prompt_logprobs=1)
    assert computed.chunks[0] == range(LAYOUT.block_tokens)
    assert computed.chunks[-1].stop == len(TOKENS)


def test_an_answer_of_one_token_has_them_and_has_ended() -> None:
    """All that an echo without an answer needs."""
    packed = pack_logprobs([(4, -9.5, ((5, -1.0),))] * (len(PROMPT) - 1), 1)
    script = decode_script.Script()
    script.give(decode_script.order(max_tokens=1))
    script.hear(decode_script.opened("1-1", 10, 11), decode_script.ready("1-1", 0, 0, 2))
    given = decode_script.result("1-1")
    first = msgspec.structs.replace(given.first, prompt_logprobs=packed)
    told, *_ = script.hear(msgspec.structs.replace(given, first=first))
    assert isinstance(told, Deliver)
    (delivery,) = told.message.deliveries
    assert [token.prompt_logprobs for token in delivery.tokens] == [packed]
    assert delivery.finish_reason == "length"
