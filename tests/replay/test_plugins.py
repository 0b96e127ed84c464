"""Policies of other packages: found by their entry points, in the log with their version, refused where absent."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from recorded import HEADER, saved, status_of

from halfmoon.cli.options import OptionInvalid
from halfmoon.cli.policy import changed, check_plugin
from halfmoon.conductor.core.placement import policies
from halfmoon.conductor.core.placement.policies import PluginMissing, check_installed, installed
from halfmoon.conductor.plugins import GROUP, install_plugins
from halfmoon.conductor.replay.logfile import Line, lines_of_step
from halfmoon.conductor.simulation.profiles import load_profile
from halfmoon.conductor.simulation.trace import Arrival
from halfmoon.conductor.simulation.world import ClusterShape, World
from halfmoon.schemas.policy import Policy

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "policy"
Said = pytest.CaptureFixture[str]


def package(place: Path, name: str, source: str, points: dict[str, str]) -> None:
    """As an installer leaves it."""
    (place / f"{name}.py").write_text(source)
    described = place / f"{name}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "\n".join(f"{point} = {value}" for point, value in points.items())
    (described / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with the example in it; nothing is installed in the core."""
    monkeypatch.setattr(policies, "_PLUGINS", {})
    place = tmp_path / "site"
    place.mkdir()
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    (module,) = EXAMPLE.glob("*.py")
    package(place, module.stem, module.read_text(), project["entry-points"][GROUP])
    monkeypatch.syspath_prepend(str(place))
    return place


def recorded(path: Path, policy: Policy) -> dict[str, str]:
    """Saves the log of a simulated cluster under the policy; the prefill workers, by request."""
    arrivals = [
        Arrival(at_ns=n * 150_000_000, prompt_tokens=4096, output_tokens=4, block_keys=b"") for n in range(24)
    ]
    world = World(ClusterShape(prefill=3, decode=1), policy, load_profile("a800"))
    lines: list[Line] = []
    world.after_step = lambda stamped, decisions: lines.extend(lines_of_step(stamped, decisions))
    world.run(arrivals, sample_ns=10**9)
    saved(path, lines, HEADER)
    return {request_id: outcome.prefill_id for request_id, outcome in world.outcomes.items()}


def test_a_plugin_chooses_its_version_is_in_the_log_and_without_it_the_log_is_refused(
    site: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugins()
    assert installed() == ["fewest-orders@1"]
    log = tmp_path / "log.jsonl.zst"
    chosen = recorded(log, Policy(plugin="fewest-orders@1"))
    assert set(chosen.values()) == {"prefill-0", "prefill-1", "prefill-2"}
    assert chosen != recorded(tmp_path / "other.jsonl.zst", Policy(name="random"))
    assert status_of("replay", log) == 0
    assert "identical" in capsys.readouterr().out
    assert status_of("replay", log, "--explain", list(chosen)[-1]) == 0
    told = capsys.readouterr().out
    assert "policy fewest-orders@1" in told
    assert "orders" in told.partition("policy fewest-orders@1")[2]
    # Another version decides otherwise, perhaps: it does not stand in for the one of the log.
    module = site / "halfmoon_fewest_orders.py"
    changes = (('version="1"', 'version="2"'), ("", ""))
    for (old, new), there in zip(changes, ("fewest-orders@2", "none"), strict=True):
        monkeypatch.setattr(policies, "_PLUGINS", {})
        monkeypatch.delitem(sys.modules, "halfmoon_fewest_orders", raising=False)
        if old:
            # Of another length: Python takes what it compiled in the same second for the file's own.
            module.write_text(module.read_text().replace(old, new) + "# Changed.\n")
        else:
            (site / "halfmoon_fewest_orders-1.0.dist-info" / "entry_points.txt").unlink()
        assert status_of("replay", log) == 1
        told = capsys.readouterr().err
        assert told == (
            f"halfmoon: policy plugin fewest-orders@1: it is not installed here (installed: {there})\n"
        )


def test_what_if_under_a_plugin_fails_a_pull_request_that_loses_too_much(
    site: Path, tmp_path: Path, capsys: Said
) -> None:
    first = """
from halfmoon.conductor.core.placement.measures import Candidate, CandidateMeasure
from halfmoon.conductor.core.placement.policies import SHORTEST_STEP, Least, Plugin, PolicyRules
ONE = CandidateMeasure[Candidate]("number", lambda candidate: 0)
POLICY = Plugin(name="always-first", version="1", rules=PolicyRules(
    prefill=Least((ONE,)), decode=SHORTEST_STEP, fetch="local_only"))
"""
    package(site, "halfmoon_first", first, {"always-first": "halfmoon_first:POLICY"})
    log = tmp_path / "recorded.jsonl.zst"
    recorded(log, Policy(ttft_slo_ns=1_500_000_000, admission="none"))
    workflow = yaml.safe_load((EXAMPLE / "policy-ci.yaml").read_text())
    lines = [step["run"].split() for step in workflow["jobs"]["policy"]["steps"] if "run" in step]
    replays = [words[1:] for words in lines if words[0] == "halfmoon"]
    assert [words[0] for words in replays] == ["replay", "replay"]
    for plugin, status in (("fewest-orders@1", 0), ("always-first@1", 1)):
        (tmp_path / "policy.toml").write_text(
            (EXAMPLE / "policy.toml").read_text().replace("fewest-orders@1", plugin)
        )
        for words in replays:
            here = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
            assert status_of(*here) == (status if "--what-if" in here else 0), plugin
        told = capsys.readouterr()
        assert plugin in told.out
        assert ("--no-worse 2: " in told.err) == bool(status)
    assert status_of("replay", log, "--no-worse", "2") == 1
    assert "halfmoon: --no-worse: it judges a policy, and --what-if names none" in capsys.readouterr().err
    (tmp_path / "policy.toml").write_text('plugin = "nobodys@3"')
    assert status_of("replay", log, "--what-if", tmp_path / "policy.toml") == 1
    assert (
        "policy plugin nobodys@3: it is not installed here (installed: always-first@1"
        in capsys.readouterr().err
    )


def test_a_package_that_is_no_policy_is_passed_over_by_name(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    points = {
        "broken": "halfmoon_broken:POLICY",
        "other-name": "halfmoon_fewest_orders:POLICY",
        "no": "os:path",
    }
    package(site, "halfmoon_broken", "raise RuntimeError('as it is')", points)
    install_plugins()
    assert installed() == ["fewest-orders@1"]
    told = sorted(record.getMessage() for record in caplog.records)
    assert told == [
        "policy plug-in broken (halfmoon_broken:POLICY): as it is",
        "policy plug-in no (os:path): it is module, not Plugin",
        "policy plug-in other-name (halfmoon_fewest_orders:POLICY): it calls itself fewest-orders",
    ]


def test_a_plugin_that_the_conductor_lacks_is_not_put_in_force(site: Path) -> None:
    wanted = changed(Policy(), ["plugin=fewest-orders@1"])
    with pytest.raises(
        OptionInvalid, match=r"plugin=fewest-orders@1: the conductor has no such one \(it has: none\)"
    ):
        check_plugin(wanted, [])
    check_plugin(wanted, ["fewest-orders@1"])
    check_plugin(Policy(), [])
    with pytest.raises(PluginMissing, match="policy plugin fewest-orders@1"):
        check_installed(wanted)
    with pytest.raises(OptionInvalid, match="policy set plugin=no-version"):
        changed(Policy(), ["plugin=no-version"])
