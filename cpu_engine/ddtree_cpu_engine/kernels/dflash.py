# SPDX-License-Identifier: Apache-2.0
"""The input kernel of `vllm.v1.worker.gpu.spec_decode.dflash.speculator`."""

import numpy as np
import torch


def prepare_dflash_inputs_kernel(
    out_input_ids_ptr: torch.Tensor,
    out_query_positions_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    out_query_slot_mapping_ptr: torch.Tensor,
    out_context_positions_ptr: torch.Tensor,
    out_context_slot_mapping_ptr: torch.Tensor,
    out_sample_indices_ptr: torch.Tensor,
    out_sample_pos_ptr: torch.Tensor,
    out_sample_idx_mapping_ptr: torch.Tensor,
    out_temperature_ptr: torch.Tensor,
    out_seeds_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    target_query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    BLOCK_SIZE: int,
) -> None:
    if CP_SIZE != 1:
        raise NotImplementedError("The CPU engine has no context parallelism.")
    idx_mapping = idx_mapping_ptr.tolist()
    num_reqs = len(idx_mapping)
    query_start_loc = target_query_start_loc_ptr.tolist()
    num_sampled = num_sampled_ptr.tolist()
    num_rejected = num_rejected_ptr.tolist()
    positions = target_positions_ptr.numpy()
    sample_offset = 0 if SAMPLE_FROM_ANCHOR else 1
    num_samples = num_query_per_req - sample_offset

    def slots(req_idx: int, of_positions: np.ndarray) -> torch.Tensor:
        table = block_table_ptr[req_idx].numpy()
        block_nums = np.minimum(of_positions // block_size, block_table_stride - 1)
        block_ids = table[block_nums].astype(np.int64)
        in_block = block_ids * block_size + of_positions % block_size
        # Block 0 is vLLM's null block: nothing may be written there.
        return torch.from_numpy(np.where(block_ids != 0, in_block, PAD_SLOT_ID))

    for req_idx, req_state_idx in enumerate(idx_mapping):
        start, end = query_start_loc[req_idx : req_idx + 2]
        valid_end = end - num_rejected[req_idx]
        context = positions[start:valid_end].astype(np.int64)
        out_context_positions_ptr[start:valid_end] = torch.from_numpy(context)
        out_context_positions_ptr[valid_end:end] = 0
        out_context_slot_mapping_ptr[start:valid_end] = slots(req_idx, context)
        out_context_slot_mapping_ptr[valid_end:end] = PAD_SLOT_ID

        next_pos = int(positions[valid_end - 1]) + 1
        query = slice(req_idx * num_query_per_req, (req_idx + 1) * num_query_per_req)
        query_pos = next_pos + np.arange(num_query_per_req, dtype=np.int64)
        source = last_sampled_ptr if num_sampled[req_idx] > 0 else next_prefill_tokens_ptr
        out_input_ids_ptr[query] = parallel_drafting_token_id
        out_input_ids_ptr[query.start] = source[req_state_idx]
        clamped_pos = np.minimum(query_pos, max_model_len - 1)
        out_query_positions_ptr[query] = torch.from_numpy(clamped_pos)
        out_query_slot_mapping_ptr[query] = slots(req_idx, query_pos)

        # As the kernel does, one row per query that samples, rows of a request apart
        # by num_speculative_steps.
        first = req_idx * num_speculative_steps
        sample = slice(first, first + num_samples)
        sample_rows = torch.arange(query.start + sample_offset, query.stop)
        out_sample_indices_ptr[sample] = sample_rows
        sample_pos = query_pos + 1 if SAMPLE_FROM_ANCHOR else query_pos[1:]
        out_sample_pos_ptr[sample] = torch.from_numpy(sample_pos)
        out_sample_idx_mapping_ptr[sample] = req_state_idx

        out_query_start_loc_ptr[req_idx] = query.start
        out_seq_lens_ptr[req_idx] = min(next_pos + num_query_per_req, max_model_len)
        out_temperature_ptr[req_state_idx] = temperature_ptr[req_state_idx]
        out_seeds_ptr[req_state_idx] = seeds_ptr[req_state_idx]

    num_query_tokens = num_reqs * num_query_per_req
    out_query_start_loc_ptr[num_reqs : max_num_reqs + 1] = num_query_tokens
    out_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    padding = slice(
        num_reqs * num_speculative_steps, max_num_reqs * num_speculative_steps
    )
    out_sample_indices_ptr[padding] = 0
    out_sample_pos_ptr[padding] = 0
    out_sample_idx_mapping_ptr[padding] = -1
    out_query_slot_mapping_ptr[num_query_tokens:max_num_tokens] = PAD_SLOT_ID
