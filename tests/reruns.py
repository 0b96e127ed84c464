"""Late is not wrong: a test that waited in vain runs once more, alone, at the end of the run.

Only tests that are marked `realtime`, and only where an exception says that time ran out: `Late` (tests/eventually.py),
any other TimeoutError, pytest-timeout's limit. Whatever else fails is red at once. A test that passes alone is counted
as "late" in pytest's closing line, and listed. One that fails again is red. A run with more than LATE_MAX late tests is
red, and none of them is tried again. A fault that makes a test wait in vain does so alone, too.
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

#: More than this many late tests are red: a machine is not that busy by chance.
LATE_MAX = 5
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
        #: A line for each late test that passed alone.
        self.passed_alone: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None and item.get_closest_marker("realtime"):
            # An attribute of the report: it travels from the process that ran the test.
            report.late = ran_out_of_time(call.excinfo.value)  # type: ignore[attr-defined]
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._second_run:
            with open(self._second_run, "a") as file:
                told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
                file.write(json.dumps(told) + "\n")
        elif self._tells and report.failed and getattr(report, "late", False):
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
        if self.passed_alone:
            terminalreporter.section("late, and passed alone", yellow=True)
            for line in self.passed_alone:
                terminalreporter.write_line(line)

    def _try_again(self) -> None:
        if len(self.late) > LATE_MAX:
            for report in [report for reports in self.late.values() for report in reports]:
                self._red(
                    report, f"{len(self.late)} tests were late, of {LATE_MAX} that may be: none ran again"
                )
            return
        for nodeid, first in self.late.items():
            again = self._alone(nodeid)
            failed = [report for report in again if report.failed]
            for report in failed:
                self._red(
                    report, f"late at first, and alone it failed again; at first:\n{first[0].longreprtext}"
                )
            if not failed and any(report.passed and report.when == "call" for report in again):
                seconds = sum(report.duration for report in again)
                self.passed_alone.append(
                    f"{nodeid}\n    at first: {_why(first[0])}\n    alone: passed in {seconds:.1f} s"
                )
            elif not failed:
                self._red(first[0], "late at first, and no second run came to its end")

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
