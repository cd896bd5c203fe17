#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write `patches/`: the series that carries method ddtree into vLLM itself.

The first patches are edits of vLLM's own files and are their own source. The others
add the files of `vllm_ddtree`, moved to their place in vLLM by renaming modules, and
what lies in `patches/upstream`. Run it after a change of the package; `--check` says
whether that is needed.

    python tools/make_patches.py             # write patches/
    python tools/make_patches.py --check     # compare instead of writing
    python tools/make_patches.py --work DIR  # keep the repository, one commit a patch
    python tools/make_patches.py --from DIR  # the edits are DIR's first commits
"""

import argparse
import filecmp
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "patches"
UPSTREAM = PATCHES / "upstream"
NUM_EDITS = 5
"""Patches that are their own source."""

OWNER = ("OWNER NAME", "owner@example.com")
METHOD = "vllm.v1.worker.gpu.spec_decode.ddtree"
# Module or package of the plugin -> its place in vLLM; the longest prefix counts.
MOVES = {
    "vllm_ddtree.attention": "vllm.v1.attention.backends.tree_attn",
    "vllm_ddtree.config": "vllm.v1.spec_decode.ddtree.config",
    "vllm_ddtree.request_limits": "vllm.v1.spec_decode.ddtree.request_limits",
    "vllm_ddtree.support": "vllm.v1.spec_decode.ddtree.support",
    "vllm_ddtree.hooks.sampler": f"{METHOD}.node_logits",
    "vllm_ddtree": METHOD,
}
# What a vLLM with the first patches has no use for.
_REPLACED = ("bad_words", "penalties", "thinking_budget")
LEFT_OUT = {
    "__init__.py",
    "path_processors.py",
    # Tools of the package.
    "budget.py",
    "measure.py",
    "tune.py",
    *(f"ops/{name}.py" for name in _REPLACED),
    *(f"ops/reference/{name}.py" for name in _REPLACED),
}
TESTS_LEFT_OUT = {
    *(f"test_{name}.py" for name in _REPLACED),
    # What they test lies in this repository.
    "compile_kernels.py",
    "conftest.py",
    "enumerable.py",
    "fast_interpreter.py",
    "test_compile.py",
}
# Words that differ in vLLM: file, pattern, replacement. Each must occur.
WORDS = (
    ("attention/cpu.py", r'"CUSTOM"', '"TREE_ATTN"'),
    ("attention/cuda.py", r'"CUSTOM"', '"TREE_ATTN"'),
    ("support.py", r'"CUSTOM"', '"TREE_ATTN"'),
    ("metrics.py", r"# vLLM prints loggers below its own name only\.\n", ""),
    ("metrics.py", r'init_logger\("vllm\.ddtree"\)', "init_logger(__name__)"),
    (
        "metrics.py",
        r'read the numbers with\s+``collective_rpc\("ddtree_metrics"\)``',
        "read\n    them from the speculator with ``collective_rpc``",
    ),
    (
        "tests/test_graph.py",
        r"@pytest\.mark\.gpu",
        '@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")',
    ),
)
# Lines of vLLM that the generated patches change: patch, file, line, new text.
LINES = (
    (
        7,
        "vllm/v1/attention/backends/registry.py",
        '    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"\n',
        "{}    TREE_ATTN = (\n"
        '        "vllm.v1.attention.backends.tree_attn.TreeAttentionBackend"\n    )\n',
    ),
    (
        7,
        "vllm/platforms/cpu.py",
        "        AttentionBackendEnum.CUSTOM,\n",
        "{}        AttentionBackendEnum.TREE_ATTN,\n",
    ),
    (
        8,
        "vllm/v1/spec_decode/registry.py",
        "_METHODS: dict[str, SpeculativeMethodEntry] = {}\n",
        "_METHODS: dict[str, SpeculativeMethodEntry] = {{\n"
        '    "ddtree": SpeculativeMethodEntry(\n'
        '        "ddtree",\n'
        '        config="vllm.v1.spec_decode.ddtree.create_config",\n'
        f'        speculator="{METHOD}.speculator.DDTreeSpeculator",\n'
        "    ),\n"
        "}}\n",
    ),
)


@dataclass(frozen=True)
class NewFile:
    path: str
    text: str
    patch: int


def patch_of(name: str) -> int:
    """The generated patch that a file of the package belongs to."""
    if name.startswith("ops/") or name == "tree.py":
        return 6
    if name.startswith("attention/"):
        return 7
    return 8


def move(module: str) -> str:
    for old in sorted(MOVES, key=len, reverse=True):
        if module == old or module.startswith(old + "."):
            return MOVES[old] + module[len(old) :]
    raise ValueError(module)


def rewrite(name: str, text: str) -> str:
    """A file of the package as it reads inside vLLM."""
    for file, pattern, replacement in WORDS:
        if file == name:
            text, count = re.subn(pattern, replacement, text)
            if count == 0:
                raise SystemExit(f"make_patches: {name} has no {pattern!r} any more")
    text = re.sub(r"\bvllm_ddtree(\.\w+)*", lambda match: move(match[0]), text)
    spdx, _, rest = text.partition("\n")
    return (
        f"{spdx}\n# SPDX-FileCopyrightText: Copyright contributors to the vLLM "
        f"project\n{rest}"
    )


def package_files() -> Iterator[NewFile]:
    package = ROOT / "vllm_ddtree"
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).as_posix()
        if name in LEFT_OUT or name.startswith("hooks/"):
            continue
        module = "vllm_ddtree." + name.removesuffix(".py").replace("/", ".")
        path = move(module.removesuffix(".__init__")).replace(".", "/")
        path += "/__init__.py" if name.endswith("__init__.py") else ".py"
        yield NewFile(path, rewrite(name, file.read_text()), patch_of(name))


def with_dependencies(files: list[NewFile]) -> list[NewFile]:
    """Move what an earlier patch imports into that patch."""
    by_module = {
        file.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file
        for file in files
    }
    patches = {file.path: file.patch for file in files}
    changed = True
    while changed:
        changed = False
        for file in files:
            for module in re.findall(r"^from (vllm[\w.]+) import", file.text, re.M):
                needed = by_module.get(module)
                if needed is None and f"{module}.".startswith(f"{METHOD}."):
                    raise SystemExit(f"make_patches: {file.path} needs {module}")
                if needed and patches[needed.path] > patches[file.path]:
                    patches[needed.path] = patches[file.path]
                    changed = True
    return [NewFile(file.path, file.text, patches[file.path]) for file in files]


def test_files() -> Iterator[NewFile]:
    sources = [*(ROOT / "tests/ops").glob("*.py"), ROOT / "tests/unit/test_tree.py"]
    helpers = {file.stem for file in sources}
    for file in sorted(sources):
        if file.name in TESTS_LEFT_OUT:
            continue
        text = rewrite(f"tests/{file.name}", file.read_text())
        for helper in helpers:
            pattern = re.compile(rf"^from {helper} import", re.MULTILINE)
            text = pattern.sub(f"from .{helper} import", text)
        yield NewFile(f"tests/v1/spec_decode/ddtree/{file.name}", text, 9)


def upstream_files() -> Iterator[NewFile]:
    for file in sorted(UPSTREAM.rglob("*")):
        path = file.relative_to(UPSTREAM).as_posix()
        if file.is_file() and not path.startswith("messages/"):
            number = 9
            if path.startswith("vllm/"):
                number = 6 if path.startswith("vllm/v1/worker/") else 8
            yield NewFile(path, file.read_text(), number)


def run(cwd: Path, *command: str) -> str:
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(cwd.parent)}
    for role in ("AUTHOR", "COMMITTER"):
        env[f"GIT_{role}_NAME"], env[f"GIT_{role}_EMAIL"] = OWNER
        env[f"GIT_{role}_DATE"] = "2026-01-01T00:00:00Z"
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout


def edits() -> list[Path]:
    return sorted(PATCHES.glob("000[0-9]-*.patch"))[:NUM_EDITS]


def touched_files(patches: Iterable[Path]) -> set[str]:
    """Files of vLLM that the series changes."""
    texts = "".join(patch.read_text() for patch in patches)
    changed = set(re.findall(r"^--- a/(\S+)$", texts, re.M))
    return changed | {path for _, path, *_ in LINES}


def start_repository(work: Path, patches: list[Path]) -> None:
    """A repository with vLLM's files of the series, and the edits as commits."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("make_patches: vLLM is not installed here")
    installed = Path(spec.origin).parents[1]
    run(work, "git", "init", "-q", "-b", "main", ".")
    for path in touched_files(patches):
        if (installed / path).is_file():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed / path, work / path)
    run(work, "git", "add", "-A")
    run(work, "git", "commit", "-q", "-m", "vLLM's own files")
    run(work, "git", "tag", "base")
    for patch in patches:
        run(work, "git", "am", "-q", "--keep-non-patch", str(patch))


def add_generated(work: Path) -> None:
    files = with_dependencies(list(package_files()))
    files += [*test_files(), *upstream_files()]
    for number in range(NUM_EDITS + 1, max(file.patch for file in files) + 1):
        new = [file for file in files if file.patch == number]
        for file in new:
            (work / file.path).parent.mkdir(parents=True, exist_ok=True)
            (work / file.path).write_text(file.text)
        for _, path, line, text in (entry for entry in LINES if entry[0] == number):
            old = (work / path).read_text()
            if old.count(line) != 1:
                raise SystemExit(f"make_patches: {path} has no single line {line!r}")
            (work / path).write_text(old.replace(line, text.format(line)))
        format_as_vllm(work, [file.path for file in new if file.path.endswith(".py")])
        run(work, "git", "add", "-A")
        message = UPSTREAM / "messages" / f"{number:04d}.txt"
        run(work, "git", "commit", "-q", "-s", "-F", str(message))


def format_as_vllm(work: Path, paths: list[str]) -> None:
    ruff = [sys.executable, "-m", "ruff"]
    isort = ["--isolated", "--select", "I", "--fix", "-q"]
    first_party = 'lint.isort.known-first-party=["vllm", "tests"]'
    run(work, *ruff, "check", *isort, "--config", first_party, *paths)
    run(work, *ruff, "format", "--isolated", "-q", *paths)


def write_series(work: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    options = ["-U1", "--zero-commit", "--no-signature", "--full-index", "--no-stat"]
    run(work, "git", "format-patch", "-q", *options, "-N", "-o", str(out), "base..HEAD")


def differences(left: Path, right: Path) -> list[str]:
    names = {file.name for folder in (left, right) for file in folder.glob("0*.patch")}
    _, different, missing = filecmp.cmpfiles(left, right, names, shallow=False)
    return sorted(different + missing)


def make(work: Path, out: Path, source: Path | None) -> None:
    patches = edits()
    if source is not None:
        given = out / "given"
        write_series(source, given)
        patches = sorted(given.glob("*.patch"))[:NUM_EDITS]
    start_repository(work, patches)
    add_generated(work)
    write_series(work, out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--work", type=Path, help="new folder for the repository")
    parser.add_argument("--from", dest="source", type=Path, help="take edits from here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch) / "vllm"
        work.mkdir(parents=True)
        out = Path(scratch) / "patches"
        make(work.resolve(), out, args.source and args.source.resolve())
        different = differences(out, PATCHES)
        if args.check:
            if different:
                print("make_patches: out of date:", *different, sep="\n  ")
            return bool(different)
        for name in different:
            (PATCHES / name).unlink(missing_ok=True)
            if (out / name).exists():
                shutil.copy(out / name, PATCHES / name)
        print(f"make_patches: {len(different)} of patches/ changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
