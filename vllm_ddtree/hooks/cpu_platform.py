# SPDX-License-Identifier: Apache-2.0
"""A CPU engine may use the CUSTOM attention backend, as a CUDA engine may."""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum


def wrap_get_attn_backend_cls(original: Any) -> Any:
    choose = original.__func__
    custom: Any = AttentionBackendEnum.CUSTOM

    def get_attn_backend_cls(
        cls: type,
        selected_backend: Any,
        attn_selector_config: Any,
        num_heads: int | None = None,
    ) -> str:
        if selected_backend is custom:
            return custom.get_path()
        return choose(cls, selected_backend, attn_selector_config, num_heads)

    return classmethod(get_attn_backend_cls)
