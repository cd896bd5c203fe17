# SPDX-License-Identifier: Apache-2.0
"""The commands of a GPU session are commands that exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks import attention, engine, ops
from vllm_ddtree import tune

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "session.sh"
PARSERS = {
    "benchmarks.attention": attention.parse_args,
    "benchmarks.engine": engine.parse_args,
    "benchmarks.ops": ops.parse_args,
    "vllm_ddtree.tune": tune.parse_args,
}


def stages() -> dict[str, list[str]]:
    listing = subprocess.run(
        [SCRIPT, "--list"], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for line in listing.splitlines():
        name, command = re.fullmatch(r"(\S+) +about +\d+ min  (.*)", line).groups()
        found[name] = shlex.split(command)
    return found


@pytest.mark.parametrize(("name", "command"), stages().items(), ids=stages())
def test_stage(name: str, command: list[str]) -> None:
    module = command[command.index("-m") + 1]
    arguments = command[command.index("-m") + 2 :]
    if module == "pytest":
        paths = [word for word in command if word.startswith("tests/")]
        assert paths and all(list(SCRIPT.parents[1].glob(path)) for path in paths)
        return
    args = PARSERS[module](arguments)
    # Stages that write the same file would overwrite each other.
    if module in ("benchmarks.engine", "benchmarks.attention"):
        assert args.name == name


def test_session_says_how_it_is_used() -> None:
    result = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert result.returncode == 2
    assert "session.sh OUT" in result.stderr
