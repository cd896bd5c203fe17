# SPDX-License-Identifier: Apache-2.0
"""Every override gives, bit for bit, what the interpreted kernel gives."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddtree_cpu_engine.kernels import OVERRIDES
from ddtree_cpu_engine.kernels.noise import gumbel_noise
from vllm.triton_utils import dispatcher

GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"
LOGPROB = "vllm.v1.worker.gpu.sample.logprob"
TOPK_TOPP = "vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel"
DFLASH_INPUTS = (
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel"
)
REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"

# Not a multiple of any block size, so that the last block is masked.
VOCAB = 2500
NUM_BLOCKS = 3
MAX_NUM_REQS = 4
UNTOUCHED = -77


def interpreted_kernel(name: str) -> Any:
    """The kernel as vLLM defines it, whether or not an engine has replaced it."""
    if name in dispatcher._registry:
        return dispatcher._registry[name][0]
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def assert_same(
    name: str, grid: tuple[int, ...], make_args: Callable[[], dict[str, Any]]
) -> None:
    """Launch both kernels on equal arguments; every tensor must end up the same."""
    expected, actual = make_args(), make_args()
    interpreted_kernel(name)[grid](**expected)
    OVERRIDES[name](**actual)
    for argument, value in expected.items():
        if isinstance(value, torch.Tensor):
            same = torch.allclose(actual[argument], value, 0, 0, equal_nan=True)
            assert same, argument


def random_logits(num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits with ties, a masked stretch and more columns than the vocabulary."""
    logits = (torch.randn(num_rows, VOCAB + 12) * 4).to(dtype)
    logits[:, 40:60] = float("-inf")
    logits[:, 100] = logits[:, 2000] = logits.amax() + 1
    return logits


def untouched(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, UNTOUCHED, dtype=dtype)


def gumbel_args(use_fp64: bool, is_drafting: bool) -> dict[str, Any]:
    """A greedy row, a padding row, and two sampled rows."""
    logits = random_logits(4)
    dtype = torch.float64 if use_fp64 else torch.float32
    return {
        "local_argmax_ptr": untouched(4, NUM_BLOCKS, dtype=torch.int64),
        "local_argmax_stride": NUM_BLOCKS,
        "local_max_ptr": untouched(4, NUM_BLOCKS, dtype=dtype),
        "local_max_stride": NUM_BLOCKS,
        "logits_cache_ptr": None,
        "logits_cache_stride_0": 0,
        "logits_cache_stride_1": 0,
        "logits_cache_col_ptr": None,
        "logits_cache_source_ptr": None,
        "logits_cache_source_stride": 0,
        "logits_ptr": logits,
        "logits_stride": logits.stride(0),
        "expanded_idx_mapping_ptr": torch.tensor([0, -1, 2, 3], dtype=torch.int32),
        "seeds_ptr": torch.tensor([5, 6, -7, 2**62 + 11]),
        "pos_ptr": torch.tensor([3, 4, 5, 2**20]),
        "temp_ptr": torch.tensor([0.0, 1.0, 0.7, 1.3]),
        "vocab_size": VOCAB,
        "BLOCK_SIZE": 1024,
        "IS_DRAFTING": is_drafting,
        "APPLY_TEMPERATURE": is_drafting,
        "USE_FP64": use_fp64,
        "PER_TOKEN_COL": False,
    }


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("is_drafting", [False, True])
def test_gumbel_sample_kernel(use_fp64: bool, is_drafting: bool) -> None:
    def make_args() -> dict[str, Any]:
        torch.manual_seed(0)
        return gumbel_args(use_fp64, is_drafting)

    assert_same(f"{GUMBEL}._gumbel_sample_kernel", (4, NUM_BLOCKS), make_args)


@pytest.mark.parametrize("columns", [[1], [2, 0, 1, 2]])
def test_gumbel_sample_kernel_caches_the_logits(columns: list[int]) -> None:
    def make_args() -> dict[str, Any]:
        torch.manual_seed(0)
        source = random_logits(4)
        cache = untouched(MAX_NUM_REQS, 3, VOCAB + 5)
        return gumbel_args(use_fp64=False, is_drafting=True) | {
            "logits_cache_ptr": cache,
            "logits_cache_stride_0": cache.stride(0),
            "logits_cache_stride_1": cache.stride(1),
            "logits_cache_col_ptr": torch.tensor(columns, dtype=torch.int32),
            "logits_cache_source_ptr": source,
            "logits_cache_source_stride": source.stride(0),
            "PER_TOKEN_COL": len(columns) > 1,
        }

    assert_same(f"{GUMBEL}._gumbel_sample_kernel", (4, NUM_BLOCKS), make_args)


def test_temperature_kernel() -> None:
    def make_args() -> dict[str, Any]:
        torch.manual_seed(1)
        logits = random_logits(4)
        return {
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            "expanded_idx_mapping_ptr": torch.tensor([3, 1, 0, 2], dtype=torch.int32),
            "temperature_ptr": torch.tensor([0.0, 1.0, 0.7, 1.3]),
            "vocab_size": VOCAB,
            "BLOCK_SIZE": 8192,
        }

    assert_same(f"{GUMBEL}._temperature_kernel", (4, 1), make_args)


def test_min_p_kernel() -> None:
    def make_args() -> dict[str, Any]:
        torch.manual_seed(2)
        logits = random_logits(3)
        return {
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            "expanded_idx_mapping_ptr": torch.tensor([2, 0, 1], dtype=torch.int32),
            "min_p_ptr": torch.tensor([0.0, 0.1, 0.003]),
            "vocab_size": VOCAB,
            "BLOCK_SIZE": 1024,
        }

    name = "vllm.v1.worker.gpu.sample.min_p._min_p_kernel"
    assert_same(name, (3,), make_args)


def test_penalties_kernel() -> None:
    def make_args() -> dict[str, Any]:
        torch.manual_seed(3)
        logits = random_logits(6)
        prompt_bin_mask = torch.randint(
            -(2**31), 2**31, (MAX_NUM_REQS, -(-VOCAB // 32)), dtype=torch.int32
        )
        output_bin_counts = torch.randint(
            0, 3, (MAX_NUM_REQS, VOCAB), dtype=torch.int32
        )
        return {
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            # All penalties with two drafts, none, one penalty, a rejected placeholder.
            "expanded_idx_mapping_ptr": torch.tensor(
                [1, 1, 1, 0, 2, 2], dtype=torch.int32
            ),
            "token_ids_ptr": torch.tensor([9, 7, 7, 3, 5, -1], dtype=torch.int32),
            "expanded_local_pos_ptr": torch.tensor(
                [0, 1, 2, 0, 0, 1], dtype=torch.int32
            ),
            "repetition_penalty_ptr": torch.tensor([1.0, 1.3, 1.0, 1.0]),
            "frequency_penalty_ptr": torch.tensor([0.0, 0.2, 0.0, 0.0]),
            "presence_penalty_ptr": torch.tensor([0.0, -0.4, 0.6, 0.0]),
            "prompt_bin_mask_ptr": prompt_bin_mask,
            "prompt_bin_mask_stride": prompt_bin_mask.stride(0),
            "output_bin_counts_ptr": output_bin_counts,
            "output_bin_counts_stride": output_bin_counts.stride(0),
            "vocab_size": VOCAB,
            "BLOCK_SIZE": 8192,
        }

    name = "vllm.v1.worker.gpu.sample.penalties._penalties_kernel"
    assert_same(name, (6, 1), make_args)


@pytest.mark.parametrize("top_k", [None, [5, VOCAB, 1]])
@pytest.mark.parametrize("top_p", [None, [0.6, 0.3, 1.0]])
def test_topk_topp_kernel(top_k: list[int] | None, top_p: list[float] | None) -> None:
    """Against the definition: the interpreter cannot run this kernel."""
    torch.manual_seed(9)
    logits = torch.randn(3, VOCAB) * 4
    expected = torch.full_like(logits, float("-inf"))
    for row, row_logits in enumerate(logits):
        kept = row_logits.argsort(descending=True)[: top_k[row] if top_k else VOCAB]
        if top_p:
            probs = row_logits[kept].double().softmax(dim=0)
            # A token is kept while those before it do not reach the mass.
            kept = kept[probs.cumsum(dim=0) - probs < top_p[row]]
        expected[row, kept] = row_logits[kept]

    dispatcher.KernelOverride(interpreted_kernel(TOPK_TOPP), OVERRIDES[TOPK_TOPP])[
        (3,)
    ](
        LOGITS=logits,
        LOGITS_STRIDE_0=logits.stride(0),
        BUFFER=logits,
        PERCENTILE_TO_STD_TABLE=logits,
        NORMAL_CDF_TO_SIGMA_TABLE=logits,
        K=torch.tensor(top_k or 0, dtype=torch.int32),
        P=torch.tensor(top_p or 0.0),
        BATCH_SIZE=3,
        VOCAB_SIZE=VOCAB,
        MASK_VALUE=float("-inf"),
        BLOCK_SIZE=256,
        BLOCK_SIZE_TRUNC=128,
        TOPK_ENABLED=top_k is not None,
        TOPP_ENABLED=top_p is not None,
        SPLIT_COVERS_PONLY=False,
        num_warps=4,
    )
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_log_softmax_kernel(dtype: torch.dtype) -> None:
    def make_args() -> dict[str, Any]:
        torch.manual_seed(4)
        logits = random_logits(3, dtype)
        topk_ids = torch.randint(0, VOCAB, (3, 5))
        return {
            "output_ptr": untouched(3, 5),
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            "topk_ids_ptr": topk_ids,
            "topk_ids_stride": topk_ids.stride(0),
            "topk": 5,
            "vocab_size": VOCAB,
            "BLOCK_SIZE": 1024,
            "TOPK_BLOCK_SIZE": 8,
        }

    assert_same(f"{LOGPROB}._topk_log_softmax_kernel", (3,), make_args)


def test_ranks_kernel() -> None:
    def make_args() -> dict[str, Any]:
        torch.manual_seed(5)
        logits = random_logits(4)
        return {
            "output_ptr": untouched(4, dtype=torch.int64),
            "logits_ptr": logits,
            "logits_stride": logits.stride(0),
            # A tie for the first rank, a masked token, two common ones.
            "token_ids_ptr": torch.tensor([100, 45, 2499, 0]),
            "vocab_size": VOCAB,
            "BLOCK_SIZE": 1024,
        }

    assert_same(f"{LOGPROB}._ranks_kernel", (4,), make_args)


@pytest.mark.parametrize("has_draft_logits", [False, True])
def test_compute_local_logits_stats_kernel(has_draft_logits: bool) -> None:
    def make_args() -> dict[str, Any]:
        torch.manual_seed(6)
        target_logits = random_logits(6)
        target_logits[1, 1024:2048] = float("-inf")
        draft_logits = torch.randn(MAX_NUM_REQS, 2, VOCAB + 3)
        outputs: dict[str, Any] = {}
        for output in (
            "target_local_argmax",
            "target_local_max",
            "target_local_sumexp",
            "draft_local_max",
            "draft_local_sumexp",
        ):
            dtype = torch.int64 if "argmax" in output else torch.float32
            outputs[f"{output}_ptr"] = untouched(6, NUM_BLOCKS, dtype=dtype)
            outputs[f"{output}_stride"] = NUM_BLOCKS
        return {
            **outputs,
            "target_logits_ptr": target_logits,
            "target_logits_stride": target_logits.stride(0),
            "draft_logits_ptr": draft_logits if has_draft_logits else None,
            "draft_logits_stride_0": draft_logits.stride(0),
            "draft_logits_stride_1": draft_logits.stride(1),
            # A sampled and a greedy request, each with its bonus row.
            "expanded_idx_mapping_ptr": torch.tensor(
                [3, 3, 3, 1, 1, 1], dtype=torch.int32
            ),
            "expanded_local_pos_ptr": torch.tensor(
                [0, 1, 2, 0, 1, 2], dtype=torch.int32
            ),
            "temp_ptr": torch.tensor([1.0, 0.0, 1.0, 0.8]),
            "vocab_size": VOCAB,
            "num_speculative_steps": 2,
            "BLOCK_SIZE": 1024,
            "HAS_DRAFT_LOGITS": has_draft_logits,
        }

    name = f"{REJECTION}._compute_local_logits_stats_kernel"
    assert_same(name, (6, NUM_BLOCKS), make_args)


def resample_args(use_fp64: bool, draft_logits: torch.Tensor | None) -> dict[str, Any]:
    """Rejected at once, rejected later, placeholder, bonus, and two greedy requests."""
    target_logits = random_logits(18)
    dtype = torch.float64 if use_fp64 else torch.float32
    has_draft_logits = draft_logits is not None
    return {
        "resampled_local_argmax_ptr": untouched(6, NUM_BLOCKS, dtype=torch.int64),
        "resampled_local_argmax_stride": NUM_BLOCKS,
        "resampled_local_max_ptr": untouched(6, NUM_BLOCKS, dtype=dtype),
        "resampled_local_max_stride": NUM_BLOCKS,
        "target_logits_ptr": target_logits,
        "target_logits_stride": target_logits.stride(0),
        "target_rejected_logsumexp_ptr": torch.logsumexp(target_logits[:6], dim=1),
        "draft_logits_ptr": draft_logits,
        "draft_logits_stride_0": draft_logits.stride(0) if has_draft_logits else 0,
        "draft_logits_stride_1": draft_logits.stride(1) if has_draft_logits else 0,
        "draft_rejected_logsumexp_ptr": torch.full((6,), 8.0),
        "rejected_step_ptr": torch.tensor([0, 1, 1, 2, 0, 2], dtype=torch.int32),
        "cu_num_logits_ptr": torch.arange(0, 19, 3, dtype=torch.int32),
        "expanded_idx_mapping_ptr": torch.tensor([0, 1, 2, 3, 4, 5])
        .repeat_interleave(3)
        .to(torch.int32),
        "draft_sampled_ptr": torch.tensor(
            [1, 100, 4, 1, 7, 2000, 1, 3, -1, 1, 5, 6, 1, 8, 9, 1, 3, 2]
        ),
        "temp_ptr": torch.tensor([1.0, 0.6, 1.0, 1.4, 0.0, 0.0]),
        "seed_ptr": torch.tensor([1, 2**40, 3, 4, 5, 6]),
        "pos_ptr": torch.arange(18),
        "cumulative_log_p_ptr": None,
        "contexts_ptr": None,
        "contexts_stride": 0,
        "watermarking_ptr": None,
        "watermarking_skip_mask_ptr": None,
        "watermark_key_0": 0,
        "watermark_key_1": 0,
        "vocab_size": VOCAB,
        "BLOCK_SIZE": 1024,
        "HAS_DRAFT_LOGITS": has_draft_logits,
        "USE_FP64": use_fp64,
        "USE_BLOCK_VERIFICATION": False,
        "CONTEXT_WIDTH": 1,
        "WATERMARK": False,
        "DEDUPLICATE_CONTEXTS": False,
    }


@pytest.mark.parametrize("use_fp64", [False, True])
def test_resample_kernel_with_one_hot_drafts(use_fp64: bool) -> None:
    def make_args() -> dict[str, Any]:
        torch.manual_seed(7)
        return resample_args(use_fp64, draft_logits=None)

    assert_same(f"{REJECTION}._resample_kernel", (6, NUM_BLOCKS), make_args)


def test_resample_kernel_with_draft_logits() -> None:
    """Against the definition in float64: the interpreter has no log1p."""
    torch.manual_seed(8)
    draft_logits = torch.randn(6, 2, VOCAB + 3) * 3
    args = resample_args(False, draft_logits)
    OVERRIDES[f"{REJECTION}._resample_kernel"](**args)

    row, req_idx, step, temp = 4, 1, 1, 0.6
    target = args["target_logits_ptr"][row, :VOCAB].double()
    draft = draft_logits[req_idx, step, :VOCAB].double() / temp
    target_probs = (target - args["target_rejected_logsumexp_ptr"][req_idx]).exp()
    draft_probs = (draft - args["draft_rejected_logsumexp_ptr"][req_idx]).exp()
    residual = (target_probs - draft_probs).clamp(min=0).log()
    noise = gumbel_noise(2**40, row, VOCAB, is_drafting=False, use_fp64=False)
    noised = residual + torch.from_numpy(noise)
    for block, block_logits in enumerate(noised.split(1024)):
        value, index = block_logits.max(dim=0)
        assert (
            args["resampled_local_argmax_ptr"][req_idx, block] == block * 1024 + index
        )
        torch.testing.assert_close(
            args["resampled_local_max_ptr"][req_idx, block].double(),
            value,
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_prepare_dflash_inputs_kernel(sample_from_anchor: bool) -> None:
    num_query_per_req = 4 if not sample_from_anchor else 3
    max_num_reqs, max_num_tokens = 5, 40

    def make_args() -> dict[str, Any]:
        outputs = {
            "input_ids": untouched(max_num_tokens, dtype=torch.int32),
            "query_positions": untouched(max_num_tokens, dtype=torch.int64),
            "query_start_loc": untouched(max_num_reqs + 1, dtype=torch.int32),
            "seq_lens": untouched(max_num_reqs, dtype=torch.int32),
            "query_slot_mapping": untouched(max_num_tokens, dtype=torch.int64),
            "context_positions": untouched(max_num_tokens, dtype=torch.int64),
            "context_slot_mapping": untouched(max_num_tokens, dtype=torch.int64),
            "sample_indices": untouched(max_num_reqs * 3, dtype=torch.int64),
            "sample_pos": untouched(max_num_reqs * 3, dtype=torch.int64),
            "sample_idx_mapping": untouched(max_num_reqs * 3, dtype=torch.int64),
            "temperature": untouched(max_num_reqs),
            "seeds": untouched(max_num_reqs, dtype=torch.int64),
        }
        # The second request reads a null block and runs past the model length; the
        # third is a prefill chunk, which has sampled nothing.
        block_table = torch.tensor([[3, 4, 0], [6, 0, 0], [8, 9, 10]]).to(torch.int32)
        return {
            **{f"out_{name}_ptr": tensor for name, tensor in outputs.items()},
            "target_positions_ptr": torch.tensor([3, 4, 5, 6, 12, 13, 0, 1, 2, 3, 4]),
            "target_query_start_loc_ptr": torch.tensor(
                [0, 4, 6, 11], dtype=torch.int32
            ),
            "idx_mapping_ptr": torch.tensor([4, 0, 2], dtype=torch.int32),
            "last_sampled_ptr": torch.tensor([[50], [51], [52], [53], [54]]),
            "next_prefill_tokens_ptr": torch.arange(60, 65, dtype=torch.int32)[None],
            "num_sampled_ptr": torch.tensor([2, 1, 0], dtype=torch.int32),
            "num_rejected_ptr": torch.tensor([2, 0, 0], dtype=torch.int32),
            "temperature_ptr": torch.arange(max_num_reqs) * 0.25,
            "seeds_ptr": torch.arange(max_num_reqs) * 7,
            "block_table_ptr": block_table,
            "block_table_stride": block_table.stride(0),
            "parallel_drafting_token_id": 16,
            "block_size": 8,
            "num_query_per_req": num_query_per_req,
            "num_speculative_steps": 3,
            "max_num_reqs": max_num_reqs,
            "max_num_tokens": max_num_tokens,
            "max_model_len": 16,
            "cp_rank": 0,
            "SAMPLE_FROM_ANCHOR": sample_from_anchor,
            "PAD_SLOT_ID": -1,
            "CP_SIZE": 1,
            "CP_INTERLEAVE": 1,
            "BLOCK_SIZE": 8,
        }

    assert_same(DFLASH_INPUTS, (3, 2), make_args)
