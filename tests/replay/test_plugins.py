"""Policies of other packages: found by their entry points, in the log with their version, refused where absent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from plugin_packages import EXAMPLE, FEWEST_ORDERS, example_package, nothing_installed, package, site_of
from recorded import simulated_log, status_of

from halfmoon.cli.operator.policy import changed
from halfmoon.cli.options import OptionInvalid
from halfmoon.conductor.core.machine import Core
from halfmoon.conductor.core.placement.policies import PolicyMissing, installed
from halfmoon.conductor.plugins import failed, install_plugins, policy_title
from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.events import PolicyChanged, Stamped
from halfmoon.schemas.policy import Policy

Said = pytest.CaptureFixture[str]
HEAD = """
from halfmoon.conductor.core.placement.measures import Candidate, CandidateMeasure
from halfmoon.conductor.core.placement.policies import SHORTEST_STEP, Least, PolicyRules
from halfmoon.conductor.plugins import Plugin

def plugin(name, version, number):
    measure = CandidateMeasure[Candidate]("number", number)
    rules = PolicyRules(prefill=Least((measure,)), decode=SHORTEST_STEP, fetch="local_only")
    return Plugin(name=name, version=version, rules=rules)

"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    with site_of(tmp_path) as place:
        yield place


def brought(site: Path, name: str, source: str) -> None:
    """A package whose one policy has the package's name, installed."""
    package(site, f"halfmoon_{name}", HEAD + source, {name: f"halfmoon_{name}:POLICY"})
    install_plugins()


def recorded(path: Path, policy: Policy) -> dict[str, str]:
    """Saves the log of a simulated cluster under the policy; the prefill workers, by request."""
    arrivals = [
        Arrival(at_ns=n * 150_000_000, prompt_tokens=4096, output_tokens=4, block_keys=b"") for n in range(24)
    ]
    world = simulated_log(path, ClusterShape(prefill=3, decode=1), arrivals, policy)
    return {request_id: outcome.prefill_id for request_id, outcome in world.outcomes.items()}


def test_a_plugin_chooses_replays_and_is_explained(site: Path, tmp_path: Path, capsys: Said) -> None:
    install_plugins()
    assert installed() == ["fewest-orders@1"]
    log = tmp_path / "log.jsonl.zst"
    chosen = recorded(log, Policy(name="fewest-orders@1"))
    assert set(chosen.values()) == {"prefill-0", "prefill-1", "prefill-2"}
    assert chosen != recorded(tmp_path / "other.jsonl.zst", Policy(name="random"))
    assert status_of("replay", log) == 0
    assert "identical" in capsys.readouterr().out
    assert status_of("replay", log, "--explain", list(chosen)[-1]) == 0
    told = capsys.readouterr().out
    assert "policy fewest-orders@1" in told
    assert "orders" in told.partition("policy fewest-orders@1")[2]


def test_a_log_is_refused_by_name_where_its_version_is_absent(
    site: Path, tmp_path: Path, capsys: Said
) -> None:
    install_plugins()
    log = tmp_path / "log.jsonl.zst"
    recorded(log, Policy(name="fewest-orders@1"))
    core = Core()
    core.state.policy = Policy(name="fewest-orders@1")
    snapshot = core.snapshot()
    for there in ("fewest-orders@2", "none"):
        nothing_installed()
        example_package(site, version="2")
        if there == "none":
            (site / f"{FEWEST_ORDERS}-1.0.dist-info" / "entry_points.txt").unlink()
        assert status_of("replay", log) == 1
        missing = f"policy fewest-orders@1 is not installed here (plug-ins that are: {there})"
        assert capsys.readouterr().err == f"halfmoon: {missing}\n"
        for begin in (
            lambda: Core.restore(snapshot),
            lambda: Core().step(Stamped(seq=1, at_ns=1, event=PolicyChanged(policy=core.state.policy))),
        ):
            with pytest.raises(PolicyMissing) as refused:
                begin()
            assert str(refused.value) == missing


def test_a_package_may_bring_several_versions_and_a_name_alone_is_the_last(
    site: Path, tmp_path: Path, capsys: Said
) -> None:
    source = "POLICY = plugin('two', '1', lambda c: c.orders), plugin('two', '2', lambda c: -c.orders)\n"
    brought(site, "two", source)
    assert installed() == ["fewest-orders@1", "two@1", "two@2"]
    names = {name: policy_title(name, installed()) for name in ("two", "two@1", "mooncake", "fewest-orders")}
    assert names == {
        "two": "two@2",
        "two@1": "two@1",
        "mooncake": "mooncake",
        "fewest-orders": "fewest-orders@1",
    }
    log = tmp_path / "log.jsonl.zst"
    assert set(recorded(log, Policy(name="two@1")).values()) == {"prefill-0", "prefill-1", "prefill-2"}
    (tmp_path / "policy.toml").write_text('name = "two"\nadmission = "none"\n')
    assert status_of("replay", log, "--what-if", tmp_path / "policy.toml", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[column]["policy"] for column in ("simulated", "what_if")] == ["two@1", "two@2"]


def test_simulate_and_the_conductor_take_the_name(site: Path, tmp_path: Path, capsys: Said) -> None:
    words = ("simulate", "--requests", "40", "--prefill", "2", "--decode", "2", "--json")
    (tmp_path / "options.toml").write_text('policy = "fewest-orders"\n')
    reports = []
    for way in (("--policy", "fewest-orders"), ("--config", str(tmp_path / "options.toml"))):
        assert status_of(*words, *way) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert [report["policy"] for report in reports] == ["fewest-orders@1"] * 2
    assert reports[0]["digest"] == reports[1]["digest"]
    for command in (*words, "--policy", "best"), ("up", "--policy", "best"):
        assert status_of(*command) != 0
        told = capsys.readouterr().err
        assert told.startswith("halfmoon: --policy best: none of halfmoon, mooncake, ")
        assert told.endswith(", sticky, fewest-orders@1\n")


def policy_ci(site: Path, tmp_path: Path, capsys: Said, name: str) -> tuple[list[int], list[str]]:
    """Exit statuses of the example workflow's replays for a policy of this name, and what they said of losses."""
    log = tmp_path / "recorded.jsonl.zst"
    workflow = yaml.safe_load((EXAMPLE / "policy-ci.yaml").read_text())
    lines = [step["run"].split() for step in workflow["jobs"]["policy"]["steps"] if "run" in step]
    replays = [words[1:] for words in lines if words[0] == "halfmoon"]
    example = (EXAMPLE / "policy.toml").read_text()
    assert '"fewest-orders"' in example
    (tmp_path / "policy.toml").write_text(example.replace("fewest-orders", name))
    statuses = []
    for words in replays:
        files = {each: str(tmp_path / each) for each in (log.name, "policy.toml")}
        statuses.append(status_of(*(files.get(word, word) for word in words)))
    said = capsys.readouterr().err.splitlines()
    return statuses, [line.partition("--no-worse 2: ")[2] for line in said if "--no-worse" in line]


def test_policy_ci_refuses_what_loses_in_time_or_by_refusing(
    site: Path, tmp_path: Path, capsys: Said
) -> None:
    brought(site, "first", "POLICY = plugin('first', '1', lambda c: 0)\n")
    log = tmp_path / "recorded.jsonl.zst"
    recorded(log, Policy(ttft_slo_ns=3_000_000_000, admission="none"))
    assert policy_ci(site, tmp_path, capsys, "fewest-orders") == ([0, 0, 0], [])
    statuses, losses = policy_ci(site, tmp_path, capsys, "first")
    assert statuses == [0, 1, 1]
    assert [loss.partition(":")[0] for loss in losses] == [
        "first token, p90",
        "both objectives held",
        "first token, mean",
        "both objectives held",
    ]
    # Who refuses what takes long has the best times, and is worse.
    (tmp_path / "policy.toml").write_text('admission = "predicted"\nttft_slo_ns = "400ms"\n')
    assert status_of("replay", log, "--what-if", tmp_path / "policy.toml", "--no-worse", "2") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("halfmoon: --no-worse 2: both objectives held: ")
    assert status_of("replay", log, "--what-if", tmp_path / "policy.toml", "--no-worse", "100") == 0
    capsys.readouterr()
    assert status_of("replay", log, "--no-worse", "2") == 1
    assert "--no-worse 2: a share that a policy of --what-if may lose" in capsys.readouterr().err


def test_a_measure_that_fails_is_contained_and_named(
    site: Path, tmp_path: Path, capsys: Said, caplog: pytest.LogCaptureFixture
) -> None:
    brought(
        site, "raises", "POLICY = plugin('raises', '1', lambda c: 1 // len(c.worker_id[8:].strip('0')))\n"
    )
    brought(site, "halves", "POLICY = plugin('halves', '1', lambda c: c.orders / 2)\n")
    log = tmp_path / "recorded.jsonl.zst"
    chosen = recorded(log, Policy(name="raises@1", admission="none"))
    # It raises for prefill-0, which ranks last; of the others the smaller id is taken.
    assert set(chosen.values()) == {"prefill-1"}
    assert status_of("replay", log) == 0
    (problem,) = failed("raises@1")
    assert problem.startswith("policy raises@1, measure 'number': ZeroDivisionError (")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("policy raises@1, measure 'number': ZeroDivisionError integer division")
    capsys.readouterr()
    recorded(log, Policy(admission="none"))
    for name, why in (("raises", "ZeroDivisionError"), ("halves", "float, no int")):
        statuses, losses = policy_ci(site, tmp_path, capsys, name)
        assert statuses == [0, 1, 1]
        assert f"policy {name}@1, measure 'number': {why} (" in losses[-1]


BAD: list[tuple[str, str, str]] = [
    ("broken", "raise RuntimeError('as it is')", "as it is"),
    ("number", "POLICY = 3", "it is int, not Plugin"),
    ("other", "POLICY = plugin('fewest-orders', '2', len)", "it calls itself fewest-orders"),
    ("spaced", "POLICY = plugin('spaced', 'one two', len)", "'spaced@one two' is no name and version"),
    ("rules", "POLICY = Plugin(name='rules', version='1', rules=3)", "its rules are no PolicyRules"),
    (
        "words",
        "POLICY = Plugin(name='words', version='1', rules=PolicyRules("
        "prefill=Least(('orders',)), decode=SHORTEST_STEP, fetch='cheapest'))",
        "its rules choose by something else than measures, turns or draws",
    ),
    (
        "twice",
        "POLICY = plugin('twice', '1', len), plugin('twice', '1', lambda c: 0)",
        "there is another twice@1",
    ),
]


@pytest.mark.parametrize(("name", "source", "problem"), BAD)
def test_a_package_that_is_no_policy_is_passed_over_by_name(
    site: Path, caplog: pytest.LogCaptureFixture, name: str, source: str, problem: str
) -> None:
    brought(site, name, source)
    assert [title for title in installed() if title != "twice@1"] == ["fewest-orders@1"]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == f"policy plug-in {name} (halfmoon_{name}:POLICY): {problem}"


@pytest.mark.parametrize("name", ["best", "fewest-orders", "a@1\n", "@1", "a@", "A@1", "a b@1"])
def test_the_log_takes_a_name_of_the_table_or_one_with_a_version(name: str) -> None:
    message: Any = encode(PolicyChanged(policy=Policy(name=name)))
    with pytest.raises(MessageInvalid):
        decode(message, PolicyChanged)
    plain = PolicyChanged(policy=Policy(name="fewest-orders@1.0+x"))
    assert decode(encode(plain), PolicyChanged) == plain


def test_a_change_names_only_what_the_conductor_has() -> None:
    assert changed(Policy(), ["name=fewest-orders"], ["fewest-orders@1"]).name == "fewest-orders@1"
    with pytest.raises(OptionInvalid, match=r"policy set name=fewest-orders: none of halfmoon, .*, sticky$"):
        changed(Policy(), ["name=fewest-orders"])
