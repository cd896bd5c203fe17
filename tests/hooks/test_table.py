# SPDX-License-Identifier: Apache-2.0
"""The hook table says everything there is to know, and all of it exists."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest
import vllm

from vllm_ddtree.hooks import patcher
from vllm_ddtree.hooks.registry import DEPENDS_ON, HOOKS, SEAMS, Hook, Seam

ROOT = Path(__file__).resolve().parents[2]
VLLM = Path(vllm.__file__).parent
MAX_LINES = 600

ENTRIES = [*HOOKS, *SEAMS]
every_hook = pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.id)
every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)


def test_ids_and_targets_are_unique() -> None:
    ids = [entry.id for entry in ENTRIES]
    sites = [site for hook in HOOKS for site in hook.bind_sites]
    assert len(set(ids)) == len(ids)
    assert len(set(sites)) == len(sites)
    assert len(set(DEPENDS_ON)) == len(DEPENDS_ON)
    assert not {hook.target for hook in HOOKS} & set(DEPENDS_ON)


@every_entry
def test_entries_are_complete(entry: Hook | Seam) -> None:
    values = {field.name: getattr(entry, field.name) for field in fields(entry)}
    instead = values.pop("instead", None)
    assert all(values.values()), values
    assert (ROOT / "patches" / entry.patch).is_file()
    assert patcher.exists(entry.body)
    assert instead is None or patcher.exists(instead)


@every_hook
def test_targets_and_bind_sites_are_one_function(hook: Hook) -> None:
    assert hook.stage in ("front_end", "worker")
    assert hook.bind_sites[0] == hook.target
    values = [patcher.resolve(site)[2] for site in hook.bind_sites]
    assert all(value is values[0] for value in values)


@every_hook
def test_no_bind_site_is_missing(hook: Hook) -> None:
    """A function that others import by name is replaced in each of them."""
    module, _, name = hook.target.partition(":")
    importing = re.compile(
        rf"^from {re.escape(module)} import (?:\([^)]*\b|.*\b){name}\b", re.MULTILINE
    )
    found = {
        ".".join(("vllm", *file.relative_to(VLLM).with_suffix("").parts))
        for file in VLLM.rglob("*.py")
        if importing.search(file.read_text())
    }
    # A method belongs to its class, wherever that is imported.
    listed = {site.partition(":")[0] for site in hook.bind_sites[1:]}
    assert found == listed


@pytest.mark.parametrize("name", DEPENDS_ON)
def test_what_is_relied_on_exists(name: str) -> None:
    assert patcher.exists(name)


def test_fingerprints_are_those_of_the_installed_vllm() -> None:
    patcher.check_fingerprints()
    own = patcher.fingerprints()
    known = patcher.known_fingerprints()
    assert known.keys() == own.keys()
    assert all(own[name] in known[name] for name in own)


def test_the_page_shows_the_table_as_it_is() -> None:
    spec = importlib.util.spec_from_file_location(
        "hook_table", ROOT / "tools" / "hook_table.py"
    )
    assert spec and spec.loader
    hook_table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook_table)
    page = hook_table.PAGE.read_text()
    assert hook_table.render(page) == page, "run `python tools/hook_table.py`"


def test_hooks_stay_small() -> None:
    files = (ROOT / "vllm_ddtree" / "hooks").glob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) <= MAX_LINES
