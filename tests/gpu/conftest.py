# SPDX-License-Identifier: Apache-2.0
"""GPU tests share modules of this folder, and the measuring commands' of the root."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
