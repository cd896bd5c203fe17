# SPDX-License-Identifier: Apache-2.0
"""The measuring commands are modules of the repository's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
