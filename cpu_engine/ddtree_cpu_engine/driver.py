# SPDX-License-Identifier: Apache-2.0
"""The driver half of the backend; never active, so it displaces no GPU driver."""

from collections.abc import Callable

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("The cpu backend launches no compiled kernels.")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", "interpreter", 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable:
        raise NotImplementedError("The cpu backend has no benchmarker.")
