# SPDX-License-Identifier: Apache-2.0
"""Requests of a ddtree engine may use ``min_p`` and ``logit_bias``."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def wrap_validate_spec_decode(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if speculative_config is not None:
            from vllm_ddtree.config import DDTreeSpeculativeConfig

            if isinstance(speculative_config, DDTreeSpeculativeConfig):
                speculative_config.validate_sampling_params(self)
                return
        original(self, speculative_config)

    return _validate_spec_decode
