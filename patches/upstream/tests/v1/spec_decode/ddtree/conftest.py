# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiled kernels on a GPU; `TRITON_INTERPRET=1` runs them on a CPU."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from . import cases

settings.register_profile(
    "ops",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ops")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def poisoned_memory():
    """Fill uninitialised tensors, so that an element nobody wrote is seen."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
            allocate = getattr(owner, name)
            patch.setattr(owner, name, _poisoned(allocate))
        yield


def _poisoned(allocate):
    return lambda *args, **kwargs: cases.poison(allocate(*args, **kwargs))
