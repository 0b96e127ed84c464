"""Late is not wrong: a test that waited in vain while the machine stood still runs once more, alone, at the end.

Only tests that are marked `realtime`, only where an exception says that time ran out (`Late` of tests/eventually.py,
any other TimeoutError, pytest-timeout's limit), and only where tests/stalls.py has seen a stall in that test: then the
failure says nothing. Whatever else fails is red at once, a late test without a stall too. A test that passes alone is
counted as "late" in pytest's closing line; one that fails again is red. Each second run stands in the closing report.
A run with more than LATE_MAX late tests is red, and none of them is tried again. A fault that makes a test wait in vain
does so alone, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.stalls import METER, Stall

#: More than this many late tests are red: a machine is not that busy by chance.
LATE_MAX = 3
#: Set for a second run: the file that takes its reports, one as JSON in a line.
REPORTS = "HALFMOON_TEST_REPORTS"
#: Seconds; beside the limit of each test, for an interpreter that hangs at its end.
SECOND_RUN_S = 900.0


def ran_out_of_time(error: BaseException) -> bool:
    """Of a group of exceptions: each one."""
    if isinstance(error, BaseExceptionGroup):
        return all(ran_out_of_time(one) for one in error.exceptions)
    if isinstance(error, pytest.fail.Exception):
        return str(error).startswith("Timeout (>")  # pytest-timeout's
    return isinstance(error, TimeoutError | subprocess.TimeoutExpired)


class Reruns:
    """A plugin. `late` is filled where reports come together: in the process that tells of the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tells = not hasattr(config, "workerinput")
        self._second_run = os.environ.pop(REPORTS, "")  # no business of runs inside this one
        self.late: dict[str, list[pytest.TestReport]] = {}
        #: Some lines for each second run.
        self.second_runs: list[str] = []
        #: Seconds of the largest gap in a test, and that test.
        self.largest_stall = (0.0, "")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        METER.begin()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            report.gap_s = METER.so_far().gap_s  # type: ignore[attr-defined]
        if report.failed and call.excinfo is not None and item.get_closest_marker("realtime"):
            self._tell_lateness(report, METER.so_far(), call.excinfo.value)
        return report

    def _tell_lateness(self, report: pytest.TestReport, stall: Stall, error: BaseException) -> None:
        """By attributes of the report, which travel from the process that ran the test."""
        if not ran_out_of_time(error):
            return
        # A fixture that several tests share raises one error for all of them, and the stall was in the first.
        stall = vars(error).setdefault("stall", stall)
        report.late = bool(stall)  # type: ignore[attr-defined]
        report.stall = str(stall)  # type: ignore[attr-defined]
        if not stall:
            report.sections.append(("Late, and nothing stood still", str(stall)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._second_run:
            with open(self._second_run, "a") as file:
                told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
                file.write(json.dumps(told) + "\n")
        elif self._tells:
            self.largest_stall = max(self.largest_stall, (getattr(report, "gap_s", 0.0), report.nodeid))
            if report.failed and getattr(report, "late", False):
                report.outcome = "late"  # type: ignore[assignment]
                self.late.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, Any] | None:
        if str(report.outcome) == "late":
            return "late", "L", ("LATE", {"yellow": True})
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        done = yield
        if self._tells and not self._second_run:
            self._try_again()
        return done

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.second_runs:
            terminalreporter.section("second runs", yellow=True)
            for line in self.second_runs:
                terminalreporter.write_line(line)
        gap_s, nodeid = self.largest_stall
        if nodeid:
            terminalreporter.write_line(f"largest stall: {gap_s:.2f} s in {nodeid}")

    def _try_again(self) -> None:
        if len(self.late) > LATE_MAX:
            for report in [report for reports in self.late.values() for report in reports]:
                self._red(
                    report,
                    f"{len(self.late)} tests were late, of {LATE_MAX} that may be: none ran again; {report.stall}",
                )
            return
        for nodeid, first in self.late.items():
            again = self._alone(nodeid)
            failed = [report for report in again if report.failed]
            for report in failed:
                self._red(
                    report, f"late at first, and alone it failed again; at first:\n{first[0].longreprtext}"
                )
            if failed:
                alone = f"failed, {_why(failed[0])}"
            elif any(report.passed and report.when == "call" for report in again):
                alone = f"passed in {sum(report.duration for report in again):.1f} s"
            else:
                alone = "did not come to its end"
                self._red(first[0], "late at first, and no second run came to its end")
            stalls = "; ".join(dict.fromkeys(report.stall for report in first))
            self.second_runs.append(f"{nodeid}\n    at first: {_why(first[0])}; {stalls}\n    alone: {alone}")

    def _red(self, report: pytest.TestReport, why: str) -> None:
        report.late = False  # type: ignore[attr-defined]
        report.outcome = "failed"
        report.sections.append(("Second run", why))
        self._config.hook.pytest_runtest_logreport(report=report)

    def _alone(self, nodeid: str) -> list[pytest.TestReport]:
        """Its reports; none where the process did not come to the test's end."""
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory) / "reports"
            command = [sys.executable, "-m", "pytest", *self._plugins(), "-q", "-m", "", nodeid]
            try:
                subprocess.run(
                    command,
                    cwd=self._config.rootpath,
                    env={**os.environ, REPORTS: str(place)},
                    stdout=subprocess.DEVNULL,
                    timeout=SECOND_RUN_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return []
            lines = place.read_text().splitlines() if place.exists() else []
        return [
            self._config.hook.pytest_report_from_serializable(config=self._config, data=json.loads(line))
            for line in lines
        ]

    def _plugins(self) -> list[str]:
        """As the first run was started with, but for that which shares tests among processes."""
        named = [name for name in self._config.option.plugins if name != "xdist"]
        return [word for name in [*named, "no:cacheprovider"] for word in ("-p", name)]


def _why(report: pytest.TestReport) -> str:
    """The exception and its words, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longreprtext).strip().partition("\n")[0]


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("reruns"):
        config.pluginmanager.register(Reruns(config), "reruns")
