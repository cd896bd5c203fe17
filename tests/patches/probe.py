# SPDX-License-Identifier: Apache-2.0
"""Run with a patched vLLM: import what was changed, and install the hooks.

Prints one line of JSON: where vLLM lies, and what the package installed or used.
"""

import importlib
import json
import sys


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    import vllm
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401

    from vllm_ddtree.hooks import patcher
    from vllm_ddtree.hooks.registry import SEAMS

    report = {
        "vllm": vllm.__file__,
        "installed": [*patcher.install("front_end"), *patcher.install("worker")],
        "registered": None,
        "native_seams": [seam.id for seam in SEAMS if patcher.exists(seam.native)],
    }
    if patcher.exists("vllm.v1.spec_decode.registry:get_speculative_method"):
        from vllm.v1.spec_decode.registry import get_speculative_method

        entry = get_speculative_method("ddtree")
        report["registered"] = entry and entry.speculator
    print(json.dumps(report))


if __name__ == "__main__":
    main()
