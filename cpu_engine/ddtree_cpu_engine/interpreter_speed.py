# SPDX-License-Identifier: Apache-2.0
"""Take repeated look-ups out of Triton's interpreter; results do not change.

The interpreter replaces the builtins of `triton.language` at every kernel launch and
again at every call of a device function, and each time lists all members of the
module to find them. That took 40 % of an engine step.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

_LANGUAGE_MODULES = (tl, tl.core)

_builtin_names: dict[Any, tuple[str, ...]] = {}


def install() -> None:
    """Patch the interpreter of this process; a second call changes nothing."""
    if interpreter._patch_builtin is _patch_builtin:
        return
    for package in (*_LANGUAGE_MODULES, tl.tensor, tl.math):
        _find_builtins(package)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)


def _find_builtins(package: Any) -> tuple[str, ...]:
    """Names of the builtins of `package`, from before the first patch of it."""
    if package not in _builtin_names:
        _builtin_names[package] = tuple(
            name
            for name, member in inspect.getmembers(package)
            if tl.core.is_builtin(member)
        )
    return _builtin_names[package]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _find_builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


class _LaunchScope(interpreter._LangPatchScope):
    """What a kernel launch has patched, its device functions included."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[ModuleType] = set()

    def restore(self) -> None:
        global _launch
        super().restore()
        _launch = None


_launch: _LaunchScope | None = None


def _patch_once(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Patch each language module once a launch, and restore all of them after it.

    Triton patches for each device function again, and leaves patched the modules that
    only device functions see.
    """

    def patch_for_launch(fn: Any) -> Any:
        global _launch
        is_launch = _launch is None
        if _launch is None:
            _launch = _LaunchScope()
        needed = {
            module
            for module in _LANGUAGE_MODULES
            if any(value is module for value in fn.__globals__.values())
        }
        if not needed or not needed <= _launch.modules:
            _launch._changes += patch_lang(fn)._changes
            _launch.modules |= needed
        return _launch if is_launch else interpreter._LangPatchScope()

    return patch_for_launch
