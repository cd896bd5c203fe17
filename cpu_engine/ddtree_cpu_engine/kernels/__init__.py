# SPDX-License-Identifier: Apache-2.0
"""NumPy and torch implementations of the kernels that dominate an interpreted step.

Kept to those that run over the whole vocabulary or a whole prompt. Each gives what the
interpreted kernel gives, bit for bit, and is tested against it; where the interpreter
cannot run a kernel, it is tested against the definition.
"""

from collections.abc import Callable
from types import MappingProxyType

from . import dflash, logprobs, rejection, sampling, truncation

_SAMPLE = "vllm.v1.worker.gpu.sample"
_SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode"

OVERRIDES: MappingProxyType[str, Callable[..., None]] = MappingProxyType(
    {
        f"{_SAMPLE}.gumbel._gumbel_sample_kernel": sampling.gumbel_sample_kernel,
        f"{_SAMPLE}.gumbel._temperature_kernel": sampling.temperature_kernel,
        f"{_SAMPLE}.min_p._min_p_kernel": sampling.min_p_kernel,
        f"{_SAMPLE}.penalties._penalties_kernel": sampling.penalties_kernel,
        f"{_SAMPLE}.logprob._topk_log_softmax_kernel": (
            logprobs.topk_log_softmax_kernel
        ),
        f"{_SAMPLE}.logprob._ranks_kernel": logprobs.ranks_kernel,
        "vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel": (
            truncation.topk_topp_kernel
        ),
        f"{_SPEC_DECODE}.dflash.speculator._prepare_dflash_inputs_kernel": (
            dflash.prepare_dflash_inputs_kernel
        ),
        f"{_SPEC_DECODE}.rejection_sampler_utils._compute_local_logits_stats_kernel": (
            rejection.compute_local_logits_stats_kernel
        ),
        f"{_SPEC_DECODE}.rejection_sampler_utils._resample_kernel": (
            rejection.resample_kernel
        ),
    }
)
"""Full name of a vLLM kernel -> what replaces it."""
