# SPDX-License-Identifier: Apache-2.0
"""Skip tests that have passed with exactly these files, as build systems do.

`make test` asks for it, so that a repeated run does only what a change or a failure
calls for. A clean clone has no record and runs everything; `make test FRESH=1` too.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_CACHE_KEY = "ddtree/passed"


def fingerprint() -> str:
    """Of every file of the repository, tracked or new, and of the interpreter."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    digest = hashlib.sha256(sys.version.encode())
    for name in sorted(filter(None, listed.split(b"\0"))):
        path = ROOT / name.decode()
        if path.is_file():
            digest.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class PassedBefore:
    """A pytest plugin: deselects what has passed, and records what passes."""

    def __init__(self, config: pytest.Config) -> None:
        assert config.cache is not None
        self.cache = config.cache
        self.fingerprint = fingerprint()
        record = self.cache.get(_CACHE_KEY, {})
        same = record.get("fingerprint") == self.fingerprint
        self.passed: set[str] = set(record["tests"]) if same else set()
        self.num_skipped = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        skipped = [item for item in items if item.nodeid in self.passed]
        self.num_skipped = len(skipped)
        config.hook.pytest_deselected(items=skipped)
        items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        elif report.failed:
            self.passed.discard(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # A file that changed during the run belongs to neither state.
        if fingerprint() == self.fingerprint:
            record = {"fingerprint": self.fingerprint, "tests": sorted(self.passed)}
            self.cache.set(_CACHE_KEY, record)
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.num_skipped:
            terminalreporter.write_line(
                f"{self.num_skipped} tests have passed with exactly these files and "
                "were not run again (make test FRESH=1 runs them)."
            )
