# SPDX-License-Identifier: Apache-2.0
"""Set-up of the operation tests: device, number of cases, poisoned memory.

Every property runs its kernel in Triton's interpreter on a machine without a GPU,
and compiled on one with it. `DDTREE_EXAMPLES` is the number of generated cases per
property: 100 on the CPU and 20,000 on a GPU unless set.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import cases  # noqa: E402

if not HAS_CUDA:
    import fast_interpreter
    from ddtree_cpu_engine import interpreter_speed

    interpreter_speed.install()
    fast_interpreter.install()

settings.register_profile(
    "ops",
    deadline=None,
    derandomize=True,
    database=None,
    # Shrinking an interpreted kernel takes minutes and the seed says it all.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ops")

_NO_INTERPRETER = pytest.mark.skipif(HAS_CUDA, reason="kernels are compiled here")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("cpu", id="interpreter", marks=_NO_INTERPRETER),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors live; with `use_kernel=True` the kernel runs on either."""
    return request.param


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if cases.COUNTS:
        terminalreporter.section("generated cases per property")
    for name, count in sorted(cases.COUNTS.items()):
        terminalreporter.write_line(f"{count:8d}  {name}")
