# SPDX-License-Identifier: Apache-2.0
"""`patches/` carries method ddtree into vLLM: applied, imported and run here."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from engines import EngineConfig, ddtree, dflash, generate, token_ids
from own_process import generate_in_own_process
from prompts import random_prompts
from vllm import SamplingParams

from vllm_ddtree.hooks.registry import HOOKS, SEAMS

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "tests" / "assets" / "tiny-qwen3"
TARGET, DRAFT = PAIR / "target", PAIR / "draft"
RUNNER = "vllm/v1/worker/gpu/model_runner.py"
MAX_RUNNER_LINES = 30
NUM_GENERAL = 5
"""Patches without which vLLM has what the package needs, but not the method."""
MAX_STEP_INCREASE = 0.1
# Needs the GPU build of vLLM.
CUDA_ONLY = "vllm.v1.attention.backends.tree_attn.cuda"


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


patched_vllm = load_tool("patched_vllm")
make_patches = load_tool("make_patches")
SERIES: list[Path] = patched_vllm.series()


def number_of(patch: str) -> int:
    return int(patch[:4])


@dataclass
class Patched:
    """A copy of vLLM with the first patches of the series."""

    folder: Path
    num_patches: int

    @property
    def last_patch(self) -> Path:
        return SERIES[self.num_patches - 1]

    def environment(self, use_plugin: bool = False) -> dict[str, str]:
        return patched_vllm.environment(self.folder, use_plugin)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> list[Patched]:
    """The installed vLLM, patched one patch at a time, one copy for each."""
    folder = tmp_path_factory.mktemp("stock")
    patched_vllm.copy_vllm(folder)
    copies = []
    for number, patch in enumerate(SERIES, 1):
        # Links: `git apply` replaces a file and never writes into it.
        last, folder = folder, tmp_path_factory.mktemp("patched") / "copy"
        shutil.copytree(last, folder, copy_function=os.link)
        patched_vllm.apply(folder, patch)
        copies.append(Patched(folder, number))
    return copies


@pytest.fixture(scope="module")
def patched(copies: list[Patched]) -> Patched:
    return copies[-1]


@pytest.fixture(scope="module")
def reports(copies: list[Patched]) -> list[dict[str, Any]]:
    """What is seen after every patch."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(probe, copies))


def probe(copy: Patched) -> dict[str, Any]:
    modules = set(patched_vllm.changed_modules(copy.last_patch)) - {CUDA_ONLY}
    result = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "probe.py"), *sorted(modules)],
        env={**os.environ, **copy.environment()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_every_patch_leaves_vllm_importable(
    copies: list[Patched], reports: list[dict[str, Any]]
) -> None:
    assert [number_of(path.name) for path in SERIES] == list(range(1, len(SERIES) + 1))
    for copy, report in zip(copies, reports, strict=True):
        assert report["vllm"] == str(copy.folder / "vllm" / "__init__.py")


def test_every_patch_retires_the_hooks_that_name_it(
    reports: list[dict[str, Any]],
) -> None:
    for number, report in enumerate(reports, 1):
        needed = {hook.id for hook in HOOKS if number_of(hook.patch) > number}
        native = {seam.id for seam in SEAMS if number_of(seam.patch) <= number}
        assert set(report["installed"]) == needed, SERIES[number - 1].name
        assert set(report["native_seams"]) == native, SERIES[number - 1].name


def test_the_method_belongs_to_the_package_until_vllm_has_it(
    reports: list[dict[str, Any]],
) -> None:
    method_patch = max(number_of(seam.patch) for seam in SEAMS)
    for number, report in enumerate(reports, 1):
        speculator = report["registered"]
        if number < method_patch:
            assert speculator == "vllm_ddtree.hooks.speculator.PluginSpeculator"
        else:
            assert speculator.startswith("vllm.v1.worker.gpu.spec_decode.ddtree.")


def test_the_series_is_what_the_package_gives() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_patches.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, (
        f"{result.stdout}{result.stderr}run `python tools/make_patches.py`"
    )


def test_git_am_takes_the_series_with_subjects_and_sign_off(tmp_path: Path) -> None:
    make_patches.start_repository(tmp_path, SERIES)
    log = make_patches.run(tmp_path, "git", "log", "--format=%s%n%b%x00", "base..HEAD")
    messages = [message.strip() for message in log.split("\0") if message.strip()]
    assert len(messages) == len(SERIES)
    for message in messages:
        assert re.match(r"\[(Spec Decode|CPU|Attention)\] [A-Z]", message)
        assert message.endswith("\nSigned-off-by: OWNER NAME <owner@example.com>")
        assert "\nTested: " in message


def test_the_runner_grows_by_few_lines() -> None:
    added = 0
    for patch in SERIES:
        for part in patch.read_text().split("diff --git ")[1:]:
            if part.startswith(f"a/{RUNNER} "):
                added += len(re.findall(r"^\+(?!\+\+ )", part, re.MULTILINE))
    assert 0 < added <= MAX_RUNNER_LINES


def run_pytest(patched: Patched, *arguments: str, cwd: Path = ROOT) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=cwd,
        env={**os.environ, **patched.environment()},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


def test_the_tests_of_the_series(patched: Patched) -> None:
    general = [
        path
        for patch in SERIES[:NUM_GENERAL]
        for path in re.findall(r"^\+\+\+ b/(tests/\S+)$", patch.read_text(), re.M)
    ]
    ddtree_tests = "tests/v1/spec_decode/ddtree"
    samples = [f"{ddtree_tests}/test_{name}.py" for name in ("tree", "path_tokens")]
    run_pytest(patched, *general, *samples, cwd=patched.folder)


PROMPTS = random_prompts(TARGET, 5, seed=11)
LENGTH: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 7, **LENGTH}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, **LENGTH},
    SEEDED,
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, **SEEDED},
    {"bad_words": ["ba be", "bi"], "top_k": 20, **SEEDED},
    {"frequency_penalty": 0.6, "top_p": 0.9, **SEEDED},
]
CONFIGS = {
    "no speculation": EngineConfig(TARGET),
    "dflash": dflash(TARGET, DRAFT, 15),
    "ddtree": ddtree(TARGET, DRAFT, 15),
}


def tokens_here(config: EngineConfig, sampling: list[dict[str, Any]]) -> Any:
    params = [SamplingParams(**arguments) for arguments in sampling]
    return token_ids(generate(config, PROMPTS, params))


def check_same_tokens(patched: Patched, name: str, use_plugin: bool = False) -> None:
    config = CONFIGS[name]
    tokens = generate_in_own_process(
        config, PROMPTS, SAMPLING, patched.environment(use_plugin)
    )
    assert tokens == tokens_here(config, SAMPLING)
    if name != "dflash":
        # DFlash's own rejection sampler draws other noise.
        assert tokens == tokens_here(CONFIGS["no speculation"], SAMPLING)


@pytest.mark.parametrize("name", CONFIGS)
def test_patched_vllm_gives_the_tokens_of_the_installed_one(
    patched: Patched, name: str
) -> None:
    """Without the plugin: method ddtree is vLLM's own there."""
    check_same_tokens(patched, name)


@pytest.mark.full
def test_the_plugin_runs_on_the_general_patches(copies: list[Patched]) -> None:
    """There it installs no hook and uses what the patches bring."""
    check_same_tokens(copies[NUM_GENERAL - 1], "ddtree", use_plugin=True)


@pytest.mark.full
@pytest.mark.parametrize("number", range(1, len(SERIES) + 1))
def test_stock_methods_after_every_patch(copies: list[Patched], number: int) -> None:
    for name in ("no speculation", "dflash"):
        check_same_tokens(copies[number - 1], name)


def step_seconds(config: EngineConfig, env: dict[str, str]) -> float:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "step_time.py")],
        input=json.dumps(config.llm_arguments(), default=str),
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return float(result.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("name", ["no speculation", "dflash"])
def test_stock_steps_take_no_longer(patched: Patched, name: str) -> None:
    """The least of three runs each, in turn."""
    environments = [{}, patched.environment()]
    runs = [
        [step_seconds(CONFIGS[name], env) for env in environments] for _ in range(3)
    ]
    installed, copy = (min(times) for times in zip(*runs, strict=True))
    print(f"{name}: {installed * 1e3:.1f} ms installed, {copy * 1e3:.1f} ms patched")
    assert copy <= installed * (1 + MAX_STEP_INCREASE)


# Engine tests of the package, to run on the patched copy without the plugin.
SAMPLE = [
    ["tests/e2e/test_ddtree.py", "-k", "no_speculation and tiny-qwen3-7"],
    ["tests/e2e/test_sampling.py", "-k", "one_batch"],
]
FULL = [
    ["tests/e2e/test_ddtree.py", "-k", "no_speculation or grows or counters"],
    ["tests/e2e/test_sampling.py"],
    ["tests/e2e/test_dflash.py", "-k", "tiny"],
]


@pytest.mark.parametrize("selection", SAMPLE, ids=lambda args: Path(args[0]).stem)
def test_engine_tests_on_patched_vllm(patched: Patched, selection: list[str]) -> None:
    run_pytest(patched, *selection)


@pytest.mark.full
@pytest.mark.parametrize("selection", FULL, ids=lambda args: Path(args[0]).stem)
def test_more_engine_tests_on_patched_vllm(
    patched: Patched, selection: list[str]
) -> None:
    run_pytest(patched, *selection)


@pytest.mark.full
def test_all_tests_of_the_series(patched: Patched) -> None:
    run_pytest(patched, "tests/v1", cwd=patched.folder)
