#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write what follows from the hook table: docs/hooks.md's tables, fingerprints.

python tools/hook_table.py                  # tables of docs/hooks.md
python tools/hook_table.py --fingerprints   # of the running vLLM
python tools/hook_table.py --fingerprints patches   # with PYTHONPATH at a copy
    # that tools/patched_vllm.py made: only what the patches change
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "hooks.md"
HOOKS_FOLDER = ROOT / "vllm_ddtree" / "hooks"

sys.path.insert(0, str(ROOT))

from vllm_ddtree import VLLM_VERSION  # noqa: E402
from vllm_ddtree.hooks import patcher, registry  # noqa: E402


def code(text: str) -> str:
    return f"`{text}`"


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def hook_table() -> str:
    return rows(
        ["id", "replaces", "also bound at", "by", "when", "why", "retired by"],
        (
            [
                hook.id,
                code(hook.target),
                "<br>".join(map(code, hook.bind_sites[1:])) or "-",
                code(hook.body.removeprefix("vllm_ddtree.hooks.")),
                hook.stage.replace("_", " "),
                hook.why,
                f"{code(hook.native)} of patch {hook.patch[:4]}",
            ]
            for hook in registry.HOOKS
        ),
    )


def seam_table() -> str:
    return rows(
        ["id", "uses", "by", "why", "retired by"],
        (
            [
                seam.id,
                seam.where,
                code(seam.body.removeprefix("vllm_ddtree.")),
                seam.why,
                f"{code(seam.native)} of patch {seam.patch[:4]}",
            ]
            for seam in registry.SEAMS
        ),
    )


def size_table() -> str:
    sizes = {
        file.name: len(file.read_text().splitlines())
        for file in sorted(HOOKS_FOLDER.glob("*.py"))
    }
    lines = [[code(name), str(size)] for name, size in sizes.items()]
    return rows(["file", "lines"], [*lines, ["all", str(sum(sizes.values()))]])


def depends_table() -> str:
    return "\n".join(f"- {code(name)}" for name in registry.DEPENDS_ON)


TABLES = {
    "hooks": hook_table,
    "seams": seam_table,
    "size": size_table,
    "depends": depends_table,
}


def render(page: str) -> str:
    """The page with every table between its markers made anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- {name}: begin -->\n).*?(\n<!-- {name}: end -->)"
        text = table()
        page, count = re.subn(
            pattern, lambda m, text=text: m[1] + text + m[2], page, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"hook_table: {PAGE.name} has no single table {name!r}")
    return page


def write_fingerprints(variant: str) -> None:
    values = patcher.fingerprints()
    name = VLLM_VERSION
    if variant:
        name += f"-{variant}"
        stock = json.loads((patcher.FINGERPRINTS / f"{VLLM_VERSION}.json").read_text())
        values = {key: value for key, value in values.items() if stock[key] != value}
    file = patcher.FINGERPRINTS / f"{name}.json"
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--fingerprints", nargs="?", const="", metavar="VARIANT")
    args = parser.parse_args()
    if args.fingerprints is not None:
        write_fingerprints(args.fingerprints)
    else:
        PAGE.write_text(render(PAGE.read_text()))


if __name__ == "__main__":
    main()
