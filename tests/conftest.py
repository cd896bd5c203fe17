# SPDX-License-Identifier: Apache-2.0
"""Set-up shared by all tests: the CPU environment, markers, times per file."""

import importlib.util
import os
from collections import defaultdict
from pathlib import Path

import pytest

# Installed by `make venv` where there is no GPU. Before torch and vLLM are imported.
if importlib.util.find_spec("ddtree_cpu_engine"):
    from ddtree_cpu_engine import environment

    environment.configure()

import torch
from passed_before import PassedBefore

ROOT = Path(__file__).resolve().parent.parent
REAL_TARGET = ROOT / ".models" / "SmolLM2-135M-Instruct"
REAL_DRAFT = ROOT / "models" / "smollm2-135m-dflash"
TINY_PAIRS = ROOT / "tests" / "assets"

HAS_CUDA = torch.cuda.is_available()
if HAS_CUDA:
    # Looking for a device has touched it, so a core process could not be forked.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

SECONDS_PER_FILE: dict[str, float] = defaultdict(float)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="also run the tests marked `full`"
    )
    parser.addoption(
        "--skip-passed",
        action="store_true",
        help="skip the tests that have passed with exactly these files",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--skip-passed"):
        config.pluginmanager.register(PassedBefore(config))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    wants_full = config.getoption("--full") or "full" in config.getoption("-m")
    skip_full = pytest.mark.skip(reason="a long matrix: run with --full")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("full") and not wants_full:
            item.add_marker(skip_full)
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(skip_gpu)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS_PER_FILE[report.nodeid.split("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("test time per file")
    by_time = sorted(SECONDS_PER_FILE.items(), key=lambda entry: -entry[1])
    for path, seconds in by_time:
        terminalreporter.write_line(f"{seconds:8.1f} s  {path}")
    terminalreporter.write_line(f"{sum(SECONDS_PER_FILE.values()):8.1f} s  in all")


@pytest.fixture(scope="session")
def real_target() -> Path:
    """The converted SmolLM2-135M-Instruct; `make models` puts it there."""
    if not (REAL_TARGET / "config.json").is_file():
        pytest.fail(f"{REAL_TARGET} is missing: run `make models`")
    return REAL_TARGET


@pytest.fixture(scope="session")
def real_draft() -> Path:
    return REAL_DRAFT


@pytest.fixture(scope="session")
def tiny_pairs() -> dict[str, tuple[Path, Path]]:
    """Name -> (target folder, draft folder) of every tiny pair."""
    return {
        folder.name: (folder / "target", folder / "draft")
        for folder in sorted(TINY_PAIRS.iterdir())
        if (folder / "target").is_dir()
    }
