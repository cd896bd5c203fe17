# SPDX-License-Identifier: Apache-2.0
"""Mend one fault of Triton 3.9's interpreter: a scalar comparison used as a mask.

The interpreter gives a comparison's data the type of what was compared. Combined with a
block, `block_mask & (idx >= 0)` then becomes integers, which no load or store accepts.
vLLM's grammar and draft-logits kernels do this; compiled Triton accepts it.
"""

from typing import Any

import numpy as np
from triton.runtime import interpreter


def install() -> None:
    """Patch the interpreter of this process; a second call changes nothing."""
    interpreter.InterpreterBuilder.create_splat = _create_splat


def _create_splat(self: Any, block_type: Any, scalar: Any) -> Any:
    """Broadcast `scalar` as the type that is asked for, not as that of its data."""
    element_type = block_type.scalar
    data = np.full(
        block_type.shape, scalar.data[0], dtype=interpreter._get_np_dtype(element_type)
    )
    return interpreter.TensorHandle(data, element_type)
