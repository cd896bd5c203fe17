#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build a copy of the installed vLLM with `patches/` applied, and run pytest on it.

    python tools/patched_vllm.py DIR                     # copy, apply one by one
    python tools/patched_vllm.py DIR -- tests/e2e -k greedy
    python tools/patched_vllm.py DIR --upto 5 --plugin -- tests/e2e/test_ddtree.py

Without `--plugin` the package's own entry point is switched off: `{"method":
"ddtree"}` is then vLLM's.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "patches"
PLUGIN = "ddtree"
OTHER_PLUGINS = "ddtree_cpu_kernels"
"""Entry point of `cpu_engine`, which lets vLLM run without a GPU."""


def series() -> list[Path]:
    return sorted(PATCHES.glob("[0-9]*.patch"))


def copy_vllm(folder: Path) -> None:
    """The installed package; what is no source is linked."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("patched_vllm: vLLM is not installed here")
    installed = Path(spec.origin).parent
    shutil.copytree(installed, folder / "vllm", copy_function=_copy_or_link)


def _copy_or_link(source: str, target: str) -> None:
    if source.endswith(".py"):
        shutil.copy2(source, target)
        return
    try:
        os.link(source, target)
    except OSError:
        os.symlink(source, target)


def apply(folder: Path, patch: Path) -> None:
    """Apply one patch as `git apply` does: every context line must match.

    Raises:
        RuntimeError: it does not apply.

    """
    result = subprocess.run(
        ["git", "apply", "--whitespace=error-all", str(patch)],
        cwd=folder,
        # Without it git looks for the files in the repository around the folder.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(f"{patch.name} does not apply:\n{result.stderr}")


def changed_modules(patch: Path) -> list[str]:
    """Modules of vLLM that a patch adds or changes."""
    paths = re.findall(r"^\+\+\+ b/(vllm/\S+)\.py$", patch.read_text(), re.MULTILINE)
    return [path.removesuffix("/__init__").replace("/", ".") for path in paths]


def environment(folder: Path, use_plugin: bool = False) -> dict[str, str]:
    """Variables with which Python takes the copy."""
    plugins = f"{PLUGIN},{OTHER_PLUGINS}" if use_plugin else OTHER_PLUGINS
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "VLLM_PLUGINS": plugins}


def main() -> int:
    arguments = sys.argv[1:]
    pytest_arguments = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, pytest_arguments = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="of the copy; kept if it exists")
    parser.add_argument("--upto", type=int, default=None, help="number of patches")
    parser.add_argument("--plugin", action="store_true", help="load our plugin")
    args = parser.parse_args(arguments)
    folder = args.folder.resolve()
    if not folder.exists():
        folder.mkdir(parents=True)
        copy_vllm(folder)
        for patch in series()[: args.upto]:
            apply(folder, patch)
            print(f"patched_vllm: {patch.name} applies", flush=True)
    if not pytest_arguments:
        return 0
    return subprocess.run(
        [sys.executable, "-m", "pytest", *pytest_arguments],
        env={**os.environ, **environment(folder, args.plugin)},
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
