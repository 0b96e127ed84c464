"""What a grammar allows is drawn, whatever the logits say; its state is a function of the tokens alone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
from typing import Any

import jsonschema
import pytest
import torch
from json_schemas import random_schema
from llguidance import LLParserLimits, LLTokenizer

from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.structures import Structure
from halfmoon.schemas.sampling import SampledToken, Sampling
from halfmoon.workers.frontend.grammars import GrammarReader
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.grammar_masks import GrammarMasks, limits
from halfmoon.workers.model.loading.files import LoadedModel
from halfmoon.workers.model.null_engine import NullEngine
from halfmoon.workers.model.sampling import sample, sample_batch
from halfmoon.workers.model.sampling_params import Sampled, SampleRequest, SamplingParams
from halfmoon.workers.model.text.tokenizer import Tokenizer
from halfmoon.workers.model.text.tokenizer_files import read_tokenizer
from halfmoon.workers.sample_requests import next_token, params_of, request_of

MODEL = "smollm2-135m-instruct"
TOKENS_MAX = 1500


class Drawer:
    """Random logits through the code that an engine samples by."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.load(MODEL)
        self.vocab = self.tokenizer.vocab_size
        self.end = min(self.tokenizer.eos_ids)
        ends = sorted(self.tokenizer.eos_ids)
        self.library_tokenizer = LLTokenizer(self.tokenizer.serialized(), n_vocab=self.vocab, eos_token=ends)
        self.masks = self.fresh()
        self.reader = GrammarReader(self.tokenizer)
        raw = [self.tokenizer.token_bytes(token) for token in range(self.vocab)]
        #: Where an answer should come to an end, these are likelier than others.
        self.closing = torch.tensor(
            [token for token, each in enumerate(raw) if each and not each.strip(b'"}],')]
        )
        #: Of what `request_of` asks an engine.
        self.config = type("Config", (), {"eos_token_ids": tuple(self.tokenizer.eos_ids)})

    def fresh(self) -> GrammarMasks:
        return GrammarMasks(lambda: self.library_tokenizer)

    def grammar(self, kind: Any, asked: Any, **options: Any) -> str:
        return asyncio.run(self.reader.read(Structure(kind=kind, asked=asked, param="it", **options)))

    def draw(self, logits: torch.Tensor, params: SamplingParams, request: SampleRequest) -> Sampled:
        """As an engine does."""
        if not request.grammar:
            return sample(logits, params, request)
        allowed = self.masks.mask(request.grammar, request.name, request.output_ids).allowed
        forbidden = torch.frombuffer(bytearray(allowed), dtype=torch.uint8)[: self.vocab] == 0
        return sample(logits, params, request, forbidden)

    def answers(self, samplings: list[Sampling], seed: int) -> list[list[int]]:
        """In one batch, which shrinks as answers end. Each has its end token, unless it grew too long."""
        noise = torch.Generator().manual_seed(seed)
        outputs: list[list[int]] = [[] for _ in samplings]
        going = list(range(len(samplings)))
        for step in range(TOKENS_MAX):
            if not going:
                break
            logits = torch.randn(len(going), self.vocab, generator=noise)
            logits[:, self.closing] += min(step * 0.3, 40)
            logits[:, self.end] += min(step * 0.3, 60)
            asked = [
                request_of(self, params_of(samplings[i]), samplings[i], [5], outputs[i], name=f"o{i}")
                for i in going
            ]
            for i, drawn in zip(going, sample_batch(logits, asked, self.draw), strict=True):
                outputs[i].append(drawn.token_id)
            going = [i for i in going if outputs[i][-1] != self.end]
        return outputs

    def text(self, output: list[int]) -> str:
        assert output[-1] == self.end, self.tokenizer.decode(output)[-200:]
        return self.tokenizer.decode(output)


@pytest.fixture(scope="module")
def drawer() -> Drawer:
    return Drawer()


def check_schemas(drawer: Drawer, seeds: range) -> None:
    schemas = [random_schema(seed) for seed in seeds]
    samplings = [
        Sampling(grammar=drawer.grammar("json", schema, any_whitespace=False), seed=seed)
        for seed, schema in zip(seeds, schemas, strict=True)
    ]
    for seed, schema, output in zip(seeds, schemas, drawer.answers(samplings, seeds.start), strict=True):
        answer = json.loads(drawer.text(output))
        validator = jsonschema.Draft202012Validator(schema)
        assert validator.is_valid(answer), (seed, schema, answer)


def test_answers_to_random_schemas_are_valid(drawer: Drawer) -> None:
    check_schemas(drawer, range(24))


@pytest.mark.slow
def test_answers_to_a_thousand_random_schemas_are_valid(drawer: Drawer) -> None:
    for first in range(0, 1000, 20):
        check_schemas(drawer, range(first, first + 20))


@pytest.mark.slow
def test_what_the_model_answers_to_random_schemas_is_valid(drawer: Drawer, model_f32: LoadedModel) -> None:
    """Through the engine, sixteen requests at a time, each with a schema of its own; every third is greedy.

    So small a model often repeats itself in a string without end: what did not come to its end says nothing.
    """
    engine = Engine(model_f32, num_blocks=80, block_tokens=128, exact=True, masks=drawer.masks)
    valid = 0
    for first in range(0, 32, 16):
        seeds = range(first, first + 16)
        samplings = [
            Sampling(
                grammar=drawer.grammar("json", random_schema(seed), any_whitespace=False),
                seed=seed,
                temperature=min(seed % 3, 1),
                frequency_penalty=1.0,
            )
            for seed in seeds
        ]
        prompt = drawer.tokenizer.encode_chat([{"role": "user", "content": "Some data as JSON, please."}])
        tables = [engine.allocator.allocate(4) for _ in seeds]
        outputs: list[list[int]] = [[] for _ in seeds]
        for table, sampling, output in zip(tables, samplings, outputs, strict=True):
            logits = engine.prefill_chunk(prompt, 0, table, want_logits=True)
            output.append(next_token(engine, logits, sampling, prompt, []).token_id)
        going = list(range(16))
        while going := [i for i in going if outputs[i][-1] != drawer.end and len(outputs[i]) < 250]:
            logits = engine.decode(
                [outputs[i][-1] for i in going],
                [len(prompt) + len(outputs[i]) - 1 for i in going],
                [tables[i] for i in going],
            )
            asked = [
                request_of(
                    engine, params_of(samplings[i]), samplings[i], prompt, outputs[i], name=f"m{first + i}"
                )
                for i in going
            ]
            for i, drawn in zip(going, engine.sample_rows(logits, asked), strict=True):
                outputs[i].append(drawn.token_id)
        for seed, output in zip(seeds, outputs, strict=True):
            if output[-1] == drawer.end:
                answer = json.loads(drawer.text(output))
                assert jsonschema.Draft202012Validator(random_schema(seed)).is_valid(answer), (seed, answer)
                valid += 1
        for table in tables:
            engine.allocator.free(table)
    assert valid > 12, valid


@pytest.mark.parametrize(
    ("kind", "asked", "pattern"),
    [
        ("choice", ["ja", "nein", 'é🌓 "x\\'], None),
        ("regex", "[a-f]{3}-(x|yy)+z", None),
        ("grammar", 'start: "<" word ("," word)* ">"\nword: /[a-z]{1,4}/', r"<[a-z]{1,4}(,[a-z]{1,4})*>"),
        ("grammar", 'root ::= "a" root | "b"', "a*b"),
    ],
)
def test_other_structures_hold_too(drawer: Drawer, kind: str, asked: Any, pattern: str | None) -> None:
    sampling = Sampling(grammar=drawer.grammar(kind, asked), temperature=1.5)
    texts = {drawer.text(drawer.answers([sampling], seed)[0]) for seed in range(5)}
    if kind == "choice":
        assert texts <= set(asked)
        assert len(texts) > 1
    else:
        assert all(re.fullmatch(pattern or asked, text) for text in texts), texts


def test_the_masks_are_a_function_of_the_tokens(drawer: Drawer) -> None:
    """A matcher that followed all along, one that begins anywhere, and one whose request went back to fewer tokens."""
    grammar = drawer.grammar("json", random_schema(5), any_whitespace=False)
    output = drawer.answers([Sampling(grammar=grammar)], 5)[0]
    assert len(output) > 20
    followed, back = drawer.fresh(), drawer.fresh()
    masks = [followed.mask(grammar, "o1", output[:index]) for index in range(len(output))]
    for index in range(0, len(output), 7):
        assert drawer.fresh().mask(grammar, "o1", output[:index]) == masks[index]
        assert back.mask(grammar, "o1", output[:index]) == masks[index]
        assert back.mask(grammar, "o1", output[: index // 2]) == masks[index // 2]
    other = drawer.answers([Sampling(grammar=grammar)], 6)[0]
    assert other[:6] != output[:6]
    expected = drawer.fresh().mask(grammar, "o1", other[:10])
    assert back.mask(grammar, "o1", other[:10]) == expected


def test_the_grammar_counts_above_bans(drawer: Drawer) -> None:
    """Nothing that they would leave is an answer."""
    grammar = drawer.grammar("choice", ["ab"])
    banned = list(drawer.tokenizer.encode("ab")) + list(drawer.tokenizer.encode("a"))
    for sampling in (
        Sampling(grammar=grammar, min_tokens=50),
        Sampling(grammar=grammar, bad_words=[[token] for token in banned]),
        Sampling(grammar=grammar, allowed_token_ids=[7]),
        Sampling(grammar=grammar, temperature=0.0, logprobs=3),
    ):
        assert drawer.text(drawer.answers([sampling], 1)[0]) == "ab"


def test_log_probabilities_are_those_of_what_the_grammar_allows(drawer: Drawer) -> None:
    sampling = Sampling(grammar=drawer.grammar("choice", ["1"]), logprobs=2)
    request = request_of(drawer, params_of(sampling), sampling, [5], [])
    (drawn,) = sample_batch(torch.zeros(1, drawer.vocab), [request], drawer.draw)
    assert drawn.logprob == 0.0
    assert drawn.top_logprobs[1][1] == float("-inf")


def test_bad_words_are_not_completed_and_others_than_allowed_are_not_drawn(drawer: Drawer) -> None:
    sampling = Sampling(bad_words=[[3], [5, 6]], allowed_token_ids=[3, 5, 6, 9], temperature=0.0)
    logits = torch.zeros(1, drawer.vocab)
    logits[0, [1, 3, 6, 9]] = torch.tensor([9.0, 8.0, 7.0, 6.0])

    def next_after(output: list[int]) -> int:
        request = request_of(drawer, params_of(sampling), sampling, [5], output)
        return sample_batch(logits, [request])[0].token_id

    assert (next_after([]), next_after([9]), next_after([9, 5])) == (6, 6, 9)


def test_a_model_whose_tokenizer_the_library_cannot_read_has_no_structures() -> None:
    """It is said at the edge: no worker would get past such a request."""
    endless = Tokenizer(dataclasses.replace(read_tokenizer(MODEL), eos_ids=frozenset()))
    with pytest.raises(ApiError, match="it: not supported with this model's tokenizer"):
        asyncio.run(GrammarReader(endless).read(Structure(kind="regex", asked="a", param="it")))


#: Each with what stops it: words of the refusal, or the least of the library's counts that it takes more than.
HOSTILE: list[tuple[str, Any, str | dict[str, int]]] = [
    ("regex", "(.*a.*b.*c.*d.*){1,500}", {"step_lexer_fuel": 100}),
    ("regex", "((a|b|c){1,1000}d?){1,1000}x", {"step_lexer_fuel": 100}),
    ("regex", "(a|b)*a(a|b){60}", {"max_lexer_states": 50}),
    ("grammar", 'start: a\na: a a | "x" |', {"step_max_items": 20}),
    ("grammar", 'start: ((("a"{1,1000}){1,1000}){1,1000}){1,1000}', {"max_items_in_row": 3}),
    ("grammar", "start: " + " | ".join(f'"{number}"' for number in range(5000)), "at most"),
    ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
    ("json", {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}, {"max_grammar_size": 20}),
    ("json", {"type": "string", "minLength": 10**9}, {"step_lexer_fuel": 100}),
    ("json", '{"items":' * 3000 + "{}" + "}" * 3000, "depth limit"),
    (
        "json",
        {"anyOf": [{"type": "string", "pattern": f".*{n}.{{{n}}}.*"} for n in range(200)]},
        {"initial_lexer_fuel": 1000},
    ),
    ("json", {"$ref": "#"}, "nothing can satisfy"),
    (
        "json",
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 20}}},
        "nothing can satisfy",
    ),
]
#: What the library counts: lexer states, items of its parser, and steps that it calls fuel.
COUNTS = (
    "initial_lexer_fuel", "max_grammar_size", "max_items_in_row", "max_lexer_states", "step_lexer_fuel",
    "step_max_items",
)  # fmt: skip


def counts() -> dict[str, int]:
    return {name: getattr(limits(), name) for name in COUNTS}


@pytest.mark.parametrize(("kind", "asked", "stop"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_grammar_is_refused_or_takes_little_of_what_is_counted(
    drawer: Drawer, monkeypatch: pytest.MonkeyPatch, kind: str, asked: Any, stop: str | dict[str, int]
) -> None:
    """For those that are drawn by, a tenth of each bound is enough. One of almost nothing shows that it is counted."""

    def stopped(bounds: dict[str, int]) -> ApiError | bool:
        """Refused, or cut at one of eight tokens."""
        few = LLParserLimits(**bounds, verbose_errors=False)
        monkeypatch.setattr("halfmoon.workers.model.grammar_masks.limits", lambda: few)
        reader, masks = GrammarReader(drawer.tokenizer), drawer.fresh()
        monkeypatch.setattr(reader, "_library", lambda: drawer.library_tokenizer)
        monkeypatch.setattr(drawer, "reader", reader)
        try:
            grammar = drawer.grammar(kind, asked)
        except ApiError as error:
            return error
        finally:
            reader.close()
        drawn, output = random.Random(1), list[int]()
        for _ in range(8):
            mask = masks.mask(grammar, "hostile", output)
            if mask.cut:
                return True
            output.append(drawn.choice([token for token in range(drawer.vocab) if mask.allowed[token]]))
        return False

    whole = counts()
    if isinstance(stop, str):
        refused = stopped(whole)
        assert isinstance(refused, ApiError)
        assert (refused.status, refused.param, len(refused.message) < 400) == (400, "it", True)
        assert stop in refused.message
    else:
        assert not stopped({name: count // 10 for name, count in whole.items()})
        assert stopped(whole | stop)


def test_no_bound_is_wider_than_the_librarys_own() -> None:
    library = LLParserLimits()
    assert all(count <= getattr(library, name) for name, count in counts().items())
    assert limits().max_lexer_states < library.max_lexer_states


@pytest.mark.parametrize("null", [False, True])
def test_a_grammar_at_its_bound_cuts_the_text(
    drawer: Drawer, model_f32: LoadedModel, null: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = drawer.grammar("regex", "(a|b)*a(a|b){60}")
    few = LLParserLimits(max_lexer_states=500, verbose_errors=False)
    monkeypatch.setattr("halfmoon.workers.model.grammar_masks.limits", lambda: few)
    engine: Any = (
        NullEngine(model_f32.config, num_blocks=1, block_tokens=128, masks=drawer.fresh())
        if null
        else Engine(model_f32, num_blocks=1, block_tokens=128, exact=True, masks=drawer.fresh())
    )
    sampling = Sampling(grammar=grammar, seed=1, temperature=1.0, logprobs=1)
    noise, output = torch.Generator().manual_seed(1), list[SampledToken]()
    while not output or output[-1].token_id != drawer.end:
        logits: Any = len(output) if null else torch.randn(drawer.vocab, generator=noise)
        if not null:
            logits[drawer.end] = -100.0  # drawn where nothing else is allowed
        output.append(next_token(engine, logits, sampling, [5], [token.token_id for token in output]))
    assert (output[-1].token_id, output[-1].cut) == (drawer.end, True)
    assert not any(token.cut for token in output[:-1])
    assert re.fullmatch("[ab]+", drawer.tokenizer.decode([token.token_id for token in output[:-1]]))
