# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM takes in and its worker cannot hold, refused in time."""

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams


def check_request(params: SamplingParams) -> None:
    """Refuse what would raise in the worker and so end the engine.

    Raises:
        VLLMValidationError: an option has more entries than the worker has room for.

    """
    # The worker's module brings Triton along.
    from vllm.v1.worker.gpu.sample.logit_bias import (
        MAX_NUM_ALLOWED_TOKEN_IDS,
        MAX_NUM_LOGIT_BIAS_TOKENS,
        MAX_NUM_STOP_TOKEN_IDS,
    )

    stop_token_ids = params.all_stop_token_ids if params.min_tokens > 0 else ()
    limits = (
        ("allowed_token_ids", params.allowed_token_ids, MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", params.logit_bias, MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids", stop_token_ids, MAX_NUM_STOP_TOKEN_IDS),
    )
    for name, entries, most in limits:
        if entries and len(entries) > most:
            raise VLLMValidationError(
                f"{name} has {len(entries)} entries, the most are {most}"
                f"{' with min_tokens' if name == 'stop_token_ids' else ''}.",
                parameter=name,
                value=len(entries),
            )
