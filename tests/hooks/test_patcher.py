# SPDX-License-Identifier: Apache-2.0
"""Hooks are installed together, once, over vLLM's own functions only."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_ddtree import VLLM_VERSION
from vllm_ddtree.hooks import patcher
from vllm_ddtree.hooks.patcher import HookError
from vllm_ddtree.hooks.registry import HOOKS

STAGES = ("front_end", "worker")
every_stage = pytest.mark.parametrize("stage", STAGES)


def hooks_of(stage: str) -> list[Any]:
    return [hook for hook in HOOKS if hook.stage == stage]


def functions() -> dict[str, Any]:
    return {
        site: patcher.resolve(site)[2] for hook in HOOKS for site in hook.bind_sites
    }


@pytest.fixture(autouse=True)
def own_functions() -> Iterator[dict[str, Any]]:
    """vLLM's functions; an engine of this process may need the hooks afterwards."""
    before = functions()
    for stage in STAGES:
        patcher.uninstall(stage)
    yield functions()
    for site, value in before.items():
        holder, attribute, _ = patcher.resolve(site)
        setattr(holder, attribute, value)


@every_stage
def test_install_replaces_at_every_bind_site(stage: str) -> None:
    own = functions()
    assert patcher.install(stage) == [hook.id for hook in hooks_of(stage)]
    now = functions()
    for hook in hooks_of(stage):
        replacements = {id(now[site]) for site in hook.bind_sites}
        assert len(replacements) == 1
        assert now[hook.target] is not own[hook.target]
    others = {site for hook in HOOKS if hook.stage != stage for site in hook.bind_sites}
    assert all(now[site] is own[site] for site in others)


@every_stage
def test_installing_again_does_nothing(stage: str) -> None:
    patcher.install(stage)
    once = functions()
    assert patcher.install(stage) == []
    assert all(value is once[site] for site, value in functions().items())


@every_stage
def test_uninstall_restores(stage: str, own_functions: dict[str, Any]) -> None:
    patcher.install(stage)
    patcher.uninstall(stage)
    assert all(value is own_functions[site] for site, value in functions().items())


def a_foreign_replacement(*args: Any, **kwargs: Any) -> None:
    pass


SITES = [(hook, site) for hook in HOOKS for site in hook.bind_sites]


@pytest.mark.parametrize("after", [False, True], ids=["before us", "after us"])
@pytest.mark.parametrize("hook, site", SITES, ids=[site for _, site in SITES])
def test_a_foreign_patch_is_left_alone_and_nothing_else_is_installed(
    hook: Any, site: str, after: bool
) -> None:
    if after:
        patcher.install(hook.stage)
    holder, attribute, _ = patcher.resolve(site)
    setattr(holder, attribute, a_foreign_replacement)
    before = functions()
    with pytest.raises(HookError) as caught:
        patcher.install(hook.stage)
    assert str(caught.value) == (
        f"hook '{hook.id}': another package has replaced one of "
        f"{', '.join(hook.bind_sites)}. Remove that package or its patch."
    )
    assert all(value is before[site] for site, value in functions().items())


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.id)
def test_a_missing_target_is_named(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, attribute, _ = patcher.resolve(hook.target)
    monkeypatch.delattr(holder, attribute)
    with pytest.raises(HookError, match=f"hook '{hook.id}': .*{attribute}"):
        patcher.install(hook.stage)


def test_a_function_with_other_code_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = patcher.fingerprints()
    changed = HOOKS[0].target
    values[changed] = "0" * 64
    (tmp_path / f"{VLLM_VERSION}.json").write_text(json.dumps(values))
    monkeypatch.setattr(patcher, "FINGERPRINTS", tmp_path)
    with pytest.raises(HookError) as caught:
        patcher.check_fingerprints()
    assert str(caught.value) == (
        f"method 'ddtree' was written against vLLM {VLLM_VERSION}, but these functions "
        f"of the installed vLLM differ from it: {changed}. Install an unmodified "
        f"vllm=={VLLM_VERSION}."
    )


def test_fingerprints_ignore_comments_and_docstrings_only(tmp_path: Path) -> None:
    variants = {
        "own": 'def f(x):\n    """Doc."""\n    return x + 1  # why\n',
        "same": "def f(x):\n    return (x + 1)\n",
        "other": "def f(x):\n    return x + 2\n",
    }
    prints = {}
    for name, text in variants.items():
        (tmp_path / f"fingerprint_{name}.py").write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            prints[name] = patcher.fingerprint(f"fingerprint_{name}:f")
    assert prints["own"] == prints["same"] != prints["other"]
