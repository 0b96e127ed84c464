"""A model's generation_config.json: what it says counts where a request is silent, as in vLLM."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from frontend_double import MODEL, Double, whole_answer

from halfmoon.cli.declared import add_options
from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.frontend.options import FrontendOptions
from halfmoon.workers.model.loading.errors import ModelBroken, ModelError, ModelNotFound
from halfmoon.workers.model.loading.generation import sampling_defaults
from tests.workers.made_models import directory

FILE = "generation_config.json"
SAID = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
SILENT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/v1/messages": CHAT,
}


def drawn_by(sampling: Sampling) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in SILENT}


@pytest.mark.pure
@pytest.mark.realtime
@pytest.mark.parametrize("defaults", [{}, SAID, {"temperature": 0.0, "top_k": 5}])
def test_the_models_defaults_count_where_a_request_is_silent(run: Any, defaults: dict[str, float]) -> None:
    given: list[Sampling] = []

    async def script(double: Double, seq: int, arrived: Any) -> None:
        given.append((await double.place(arrived, f"{seq}-0")).sampling)
        await whole_answer(double, seq, arrived)

    async def scenario(cluster: Any) -> None:
        cluster.double.script = script
        for path, body in ASKED.items():
            for said in ({}, {"temperature": 0.5}, {"top_k": -1, "top_p": 1.0}):
                status, _, answer = await cluster.post(path, {"model": MODEL, **body, **said})
                assert status == 200, answer
                asked = {name: max(value, 0) for name, value in said.items()}
                assert drawn_by(given[-1]) == {**SILENT, **defaults, **asked}, (path, said)
                if path == "/v1/responses":
                    assert answer["temperature"] == given[-1].temperature
        _, _, content = await cluster.http_get("/server_info")
        assert json.loads(content)["sampling_defaults"] == defaults

    run(scenario, sampling_defaults=defaults)


@pytest.mark.pure
@pytest.mark.realtime
def test_several_choices_need_a_temperature_from_request_or_model(run: Any) -> None:
    async def scenario(cluster: Any) -> None:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 1, "n": 2}
        status, _, answer = await cluster.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "n")
        assert (await cluster.post("/v1/completions", {**body, "temperature": 1}))[0] == 200

    run(scenario, sampling_defaults={"temperature": 0.0})


def test_the_option_says_where_they_come_from(tmp_path: Path) -> None:
    made = directory()
    made.files[FILE] |= {**SAID, "do_sample": True, "max_new_tokens": 5, "num_beams": 4}
    model = str(made.write(tmp_path / "made"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE).write_text(json.dumps({"top_k": -1, "temperature": None, "top_p": 1}))
    assert sampling_defaults(model, "auto") == SAID
    assert sampling_defaults(model, "vllm") == {}
    assert sampling_defaults(model, str(tmp_path / "other")) == {"top_k": 0, "top_p": 1}
    assert sampling_defaults("smollm2-135m-instruct", "auto") == {}
    with pytest.raises(ModelNotFound, match="no folder 'none'"):
        sampling_defaults(model, "none")
    with pytest.raises(ModelNotFound, match=FILE):
        sampling_defaults(model, str(tmp_path))
    (tmp_path / "made" / FILE).unlink()
    assert sampling_defaults(model, "auto") == {}
    parser = argparse.ArgumentParser()
    add_options(parser, FrontendOptions)
    assert parser.parse_args([]).generation_config == "auto"
    assert parser.parse_args(["--generation-config", "vllm"]).generation_config == "vllm"


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "0.6"), ("temperature", float("nan")), ("temperature", 2.5), ("top_p", 0),
     ("top_p", 1.5), ("top_k", 2.5), ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0), ("top_p", True)],
)  # fmt: skip
def test_a_default_that_no_request_could_have_is_refused_by_its_name(
    name: str, value: object, tmp_path: Path
) -> None:
    made = directory()
    made.files[FILE][name] = value
    with pytest.raises(ModelBroken, match=rf"generation_config\.json: {name} is .*; it must be ") as caught:
        sampling_defaults(str(made.write(tmp_path)), "auto")
    assert isinstance(caught.value, ModelError)
