# SPDX-License-Identifier: Apache-2.0
"""The commands of the README: one clear sentence where something is missing."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / script), *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--draft", "the draft folder {} has no config.json."),
        ("--model", "the model folder {} has no config.json. Run `make models` first."),
    ],
)
def test_demo_names_a_missing_folder(
    tmp_path: Path, option: str, message: str, real_target: Path
) -> None:
    missing = tmp_path / "missing"
    result = run("examples/demo.py", option, str(missing))
    assert result.returncode == 2
    assert result.stderr == f"demo: {message.format(missing)}\n"


def test_demo_says_why_vllm_does_not_start(real_target: Path) -> None:
    result = run("examples/demo.py", "--method", "ddtree", "--budget", "0")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("demo: vLLM could not start: ")


def test_demo_ends_with_a_line_for_machines(real_target: Path) -> None:
    result = run("examples/demo.py", "--max-tokens", "24")
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    found = re.fullmatch(
        r"demo: method=ddtree tokens=24 acceptance_length=(\d+\.\d\d)", last
    )
    assert found, last
    assert float(found[1]) > 1.5


def test_fetch_target_names_an_unwritable_folder(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    result = run("tools/fetch_target.py", str(in_the_way / "model"))
    assert result.returncode == 2
    assert result.stderr == (
        f"fetch_target: cannot write to the model folder {in_the_way / 'model'}: "
        "Not a directory.\n"
    )


def test_fetched_target_speaks_english_and_python(real_target: Path) -> None:
    """Tokenizer round trips, the chat format, and perplexities."""
    load_tool("fetch_target").check(real_target)
    before = (real_target / "model.safetensors").stat().st_mtime_ns
    assert run("tools/fetch_target.py", str(real_target)).returncode == 0
    assert (real_target / "model.safetensors").stat().st_mtime_ns == before
