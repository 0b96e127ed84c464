"""What `benchmarks/cpu_engines.py` and `benchmarks/generate.py` make of what their processes measured."""

from __future__ import annotations

import pytest

from benchmarks.cpu_engines import Values, absent, against_best, agreeing, python_of
from benchmarks.generate import compared


def test_a_peer_is_absent_until_all_that_it_needs_is_named() -> None:
    assert absent("exact", {}) == absent("fast", {}) == ""
    assert absent("llama.cpp", {}) == "not there: HALFMOON_LLAMA_CPP not set"
    assert absent("llama.cpp", {"HALFMOON_LLAMA_CPP": "python"}) == ""
    assert absent("vllm", {}) == "not there: HALFMOON_VLLM and HALFMOON_VLLM_MODEL not set"
    assert absent("transformers", {"HALFMOON_TRANSFORMERS": "python", "HALFMOON_VLLM_MODEL": ""}) == (
        "not there: HALFMOON_VLLM_MODEL not set"
    )


@pytest.mark.parametrize(
    ("program", "python"),
    [
        ("/v/bin/vllm", "/v/bin/python"),
        ("/v/bin/python", "/v/bin/python"),
        ("/v/bin/python3.11", "/v/bin/python3.11"),
    ],
)
def test_the_python_of_an_environment_is_named_or_beside_a_program_of_it(program: str, python: str) -> None:
    assert python_of(program) == python


def test_tokens_count_as_the_same_up_to_the_first_that_is_not() -> None:
    ours = [[1, 2, 3], [4, 5, 6]]
    assert agreeing(ours, ours) == (6, 6)
    assert agreeing([[1, 9, 3], [4, 5, 6]], ours) == (4, 6)
    with pytest.raises(ValueError, match="longer"):
        agreeing([[1, 2, 3]], ours)


def test_ours_is_held_against_the_fastest_peer_of_each_figure_round_by_round() -> None:
    values: dict[str, Values] = {
        "exact": {"step_1": [20.0, 40.0, 33.0], "step_8": [10.0, 10.0, 10.0]},
        "vllm": {"step_1": [10.0, 20.0, 30.0], "step_8": [9.0, 8.0, 7.0]},
        "llama.cpp": {"step_1": [11.0, 22.0, 11.0], "step_8": [10.0, 10.0, 10.0]},
    }
    found = against_best(values)
    assert list(found) == ["exact"]
    step_1, step_8 = found["exact"]["step_1"], found["exact"]["step_8"]
    assert (step_1["peer"], step_8["peer"]) == ("llama.cpp", "vllm")
    assert (step_1["ratio"]["p50"], step_1["ratio"]["min"], step_1["ratio"]["max"]) == (1.8182, 1.8182, 3.0)
    assert step_8["ratio"]["p50"] == 1.25


def test_without_a_peer_there_is_no_ratio() -> None:
    assert against_best({"exact": {"step_1": [2.0]}, "fast": {"step_1": [1.0]}}) == {}


def test_two_checkouts_are_compared_round_by_round() -> None:
    here, there = (
        [{"tokens_per_s": 10.0}, {"tokens_per_s": 30.0}],
        [{"tokens_per_s": 5.0}, {"tokens_per_s": 10.0}],
    )
    found = compared(here, there)["tokens_per_s"]
    assert (found["here"]["p50"], found["there"]["p50"], found["here_over_there"]["p50"]) == (20.0, 7.5, 2.5)
    assert compared(here, []) == {"tokens_per_s": {"here": found["here"]}}
