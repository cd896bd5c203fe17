# SPDX-License-Identifier: Apache-2.0
"""The compiler half of the backend; every compile is refused."""

from triton.backends.compiler import BaseBackend, GPUTarget

_INTERPRETER_ONLY = "The cpu backend cannot compile kernels: set TRITON_INTERPRET=1."


class CPUBackend(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "cpu-interpreter"

    def parse_options(self, options: dict) -> object:
        raise NotImplementedError(_INTERPRETER_ONLY)

    def add_stages(self, stages: dict, options: object, language: object) -> None:
        raise NotImplementedError(_INTERPRETER_ONLY)

    def load_dialects(self, context: object) -> None:
        raise NotImplementedError(_INTERPRETER_ONLY)

    def get_module_map(self) -> dict:
        return {}
