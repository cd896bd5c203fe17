# SPDX-License-Identifier: Apache-2.0
"""What every tree attention backend asks of a layer."""

from vllm.v1.attention.backend import AttentionType


def refuse_unsupported_layer(
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    attn_type: str,
) -> None:
    """Raise ValueError for a layer whose attention a tree would get wrong."""
    for what, present in (
        ("ALiBi", alibi_slopes is not None),
        ("a sliding window", sliding_window is not None),
        ("attention soft-capping", bool(logits_soft_cap)),
        (f"attention of type {attn_type}", attn_type != AttentionType.DECODER),
    ):
        if present:
            raise ValueError(
                f"Speculative method 'ddtree' does not support {what} in the target "
                "yet; use method 'dflash' for this model."
            )
