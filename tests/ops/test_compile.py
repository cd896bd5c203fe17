# SPDX-License-Identifier: Apache-2.0
"""What the interpreter runs must also compile for a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.parametrize("capability", [90])
def test_every_kernel_compiles_without_large_spills(capability):
    command = [sys.executable, str(SCRIPT), "--capability", str(capability)]
    command += ["--budgets", "63"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = re.findall(r"^_\w+_kernel", done.stdout, flags=re.MULTILINE)
    assert len(set(kernels)) == 20, done.stdout
    spills = re.findall(r"(\d+) bytes spill stores", done.stdout)
    assert max(map(int, spills)) <= 32, done.stdout
