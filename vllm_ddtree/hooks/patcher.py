# SPDX-License-Identifier: Apache-2.0
"""Installs the hooks of `registry`: all of a stage or none, once."""

import ast
import hashlib
import importlib
import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_ddtree import VLLM_VERSION
from vllm_ddtree.hooks.registry import DEPENDS_ON, HOOKS, NATIVE_METHOD, Hook

OWNER_ATTRIBUTE = "__ddtree_hook__"
FINGERPRINTS = Path(__file__).parent / "fingerprints"


class HookError(RuntimeError):
    """A hook could not be installed; vLLM was left as it was."""


def resolve(name: str) -> tuple[Any, str, Any]:
    """``module:attr[.attr]`` to (holder, attribute, raw value).

    Raises:
        ImportError, AttributeError: it does not exist.

    """
    module_name, _, path = name.partition(":")
    holder: Any = importlib.import_module(module_name)
    *parents, attribute = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    return holder, attribute, inspect.getattr_static(holder, attribute)


def exists(name: str) -> bool:
    try:
        resolve(name)
    except (ImportError, AttributeError):
        return False
    return True


def fingerprint(name: str) -> str:
    """sha256 of a function's code, without comments and docstring."""
    _, _, value = resolve(name)
    # Unwrap our own replacement, properties and static or class methods.
    value = getattr(value, OWNER_ATTRIBUTE, value)
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(function).encode()).hexdigest()


def fingerprints() -> dict[str, str]:
    """Fingerprints of every function the package replaces or builds on."""
    names = [hook.target for hook in HOOKS] + list(DEPENDS_ON)
    return {name: fingerprint(name) for name in names}


def known_fingerprints() -> dict[str, set[str]]:
    """Of every function: vLLM's own, and what the patches make of it."""
    known: dict[str, set[str]] = {}
    for file in sorted(FINGERPRINTS.glob(f"{VLLM_VERSION}*.json")):
        for name, value in json.loads(file.read_text()).items():
            known.setdefault(name, set()).add(value)
    return known


def check_fingerprints() -> None:
    """Compare the running vLLM with the one this package was written against.

    Raises:
        HookError: functions differ; the message names them.

    """
    changed = []
    for name, known in known_fingerprints().items():
        try:
            same = fingerprint(name) in known
        except (ImportError, AttributeError, OSError, TypeError):
            same = False
        if not same:
            changed.append(name)
    if changed:
        raise HookError(
            f"method 'ddtree' was written against vLLM {VLLM_VERSION}, but these "
            f"functions of the installed vLLM differ from it: {', '.join(changed)}. "
            f"Install an unmodified vllm=={VLLM_VERSION}."
        )


def install(stage: str) -> list[str]:
    """Install every hook of `stage` that the running vLLM needs.

    Returns the ids installed now; a second call installs nothing.

    Raises:
        HookError: a target is missing or another package has replaced it.

    """
    if exists(NATIVE_METHOD):
        return []
    pending = [(hook, _prepare(hook)) for hook in HOOKS if hook.stage == stage]
    for hook, _ in pending:
        if hook.instead and exists(hook.native):
            _load(hook.instead)()
    installed = []
    for hook, replacement in pending:
        if replacement is None:
            continue
        for site in hook.bind_sites:
            holder, attribute, _ = resolve(site)
            setattr(holder, attribute, replacement)
        installed.append(hook.id)
    return installed


def uninstall(stage: str) -> None:
    """Put vLLM's own functions back."""
    for hook in HOOKS:
        if hook.stage != stage:
            continue
        for site in hook.bind_sites:
            holder, attribute, value = resolve(site)
            original = getattr(value, OWNER_ATTRIBUTE, None)
            if original is not None:
                setattr(holder, attribute, original)


def _is_own_function(value: Any, name: str) -> bool:
    """Whether the value is a function written in the module that `name` begins with."""
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    module = importlib.import_module(name.partition(":")[0])
    return code is not None and code.co_filename == module.__file__


def _load(name: str) -> Callable[..., Any]:
    holder, attribute, _ = resolve(name)
    return getattr(holder, attribute)


def _prepare(hook: Hook) -> Any:
    """The replacement, or None where none is needed. Changes nothing."""
    if exists(hook.native):
        return None
    try:
        originals = [resolve(site)[2] for site in hook.bind_sites]
    except (ImportError, AttributeError) as error:
        raise HookError(f"hook '{hook.id}': {error}") from error
    owned = [hasattr(original, OWNER_ATTRIBUTE) for original in originals]
    if all(owned):
        return None
    is_foreign = not _is_own_function(originals[0], hook.target)
    if is_foreign or any(original is not originals[0] for original in originals):
        raise HookError(
            f"hook '{hook.id}': another package has replaced one of "
            f"{', '.join(hook.bind_sites)}. Remove that package or its patch."
        )
    replacement = _load(hook.body)(originals[0])
    setattr(replacement, OWNER_ATTRIBUTE, originals[0])
    return replacement
