"""What `results/` holds says on what it was measured; README and docs say which of it is older than the code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import figures, measured

ROOT = measured.ROOT
NAMES = list(figures.names())


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_result_names_its_day_commit_machine_load_and_modules(name: str) -> None:
    record = figures.record_of(name)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", record["date"])
    assert re.fullmatch(r"[0-9a-f]{7,40}", record["commit"]), "measured on code that is in no commit"
    if not name.startswith("experiments/"):  # what is simulated is the same on any machine
        assert record["cpu"]
        assert record["cores"] > 0
        assert len(record["load_average"]) == 3
    assert record["modules"]
    assert all(re.fullmatch(r"[0-9a-f]{12}", digest) for digest in record["modules"].values())


def test_the_commits_are_in_the_history() -> None:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history is not here")
    commits = {name: figures.record_of(name)["commit"] for name in NAMES}
    lost = {
        name: commit
        for name, commit in commits.items()
        if git("merge-base", "--is-ancestor", commit, "HEAD").returncode
    }
    assert not lost


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("chaos")])
def test_a_kept_run_of_chaos_found_nothing_wrong(name: str) -> None:
    result = figures.read(name)
    assert not result.get("wrong")
    assert not result.get("failures")


def test_pages_say_which_results_are_older() -> None:
    """`make docs` mends it. Which results are older, and since what, stands in results/README.md."""
    for page, text in figures.written().items():
        assert page.read_text() == text, f"{page.relative_to(ROOT)}: make docs"


def test_every_cited_result_is_there() -> None:
    for page in figures.PAGES:
        for cited in re.findall(r"(?<!=)results/[a-zA-Z0-9_/-]+\.(?:json|md|png)", page.read_text()):
            assert (ROOT / cited).exists(), f"{page.name}: {cited}"


def test_comments_docstrings_and_empty_lines_are_no_code() -> None:
    bare = 'def f(a):\n    return \'# a\' + """b\nc"""\n'
    told = (
        '"""Tells."""\n\ndef f(a):  # of a\n    """More."""\n    # why\n\n    return \'# a\' + """b\nc"""\n'
    )
    assert measured.code_of(told) == measured.code_of(bare)
    assert measured.code_of(bare.replace("# a", "# b")) != measured.code_of(bare)


def test_a_changed_module_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    monkeypatch.setattr(measured, "digest_of", measured.digest_of.__wrapped__)
    for name, code in (("a/one.py", "A = 1\n"), ("a/below/two.py", "B = 1\n"), ("c/three.py", "C = 1\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    kept = measured.digests([*measured.below(["a"]), "c"])
    assert list(kept) == ["a", "a/below", "c"]
    assert measured.changed(kept) == []
    (tmp_path / "a/one.py").write_text("#: Why.\nA = 1\n")
    assert measured.changed(kept) == []
    (tmp_path / "a/below/two.py").write_text("B = 2\n")
    (tmp_path / "c/three.py").unlink()
    (tmp_path / "c").rmdir()
    assert measured.changed(kept) == ["a/below", "c"]


def test_older_stands_behind_the_citation_and_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "so much (`results/ssd.json`, 2 cores), into `results/ssd.json`"
    monkeypatch.setattr(figures, "older", lambda name: ("store/tiers",))
    marked = figures.CITED.sub(figures._marked, text)
    assert marked == "so much (`results/ssd.json`, older, 2 cores), into `results/ssd.json`"
    assert figures.CITED.sub(figures._marked, marked) == marked
    monkeypatch.setattr(figures, "older", lambda name: ())
    assert figures.CITED.sub(figures._marked, marked) == text
