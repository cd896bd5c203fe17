# SPDX-License-Identifier: Apache-2.0
"""The input kernel of `vllm.v1.worker.gpu.spec_decode.dflash.speculator`."""

from dataclasses import dataclass

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
    table = SlotTable(block_table_ptr.numpy(), block_size, PAD_SLOT_ID)
    positions = target_positions_ptr.numpy()
    query_start_loc = target_query_start_loc_ptr.tolist()
    num_sampled = num_sampled_ptr.tolist()
    num_rejected = num_rejected_ptr.tolist()
    sample_offset = 0 if SAMPLE_FROM_ANCHOR else 1
    num_reqs = idx_mapping_ptr.shape[0]

    for req_idx, req_state_idx in enumerate(idx_mapping_ptr.tolist()):
        start, end = query_start_loc[req_idx : req_idx + 2]
        valid_end = end - num_rejected[req_idx]
        context_pos = positions[start:valid_end]
        _fill(out_context_positions_ptr, start, context_pos)
        _fill(out_context_slot_mapping_ptr, start, table.slots(req_idx, context_pos))
        # Rejected rows write no KV.
        out_context_positions_ptr[valid_end:end] = 0
        out_context_slot_mapping_ptr[valid_end:end] = PAD_SLOT_ID

        next_pos = int(positions[valid_end - 1]) + 1
        query_pos = np.arange(next_pos, next_pos + num_query_per_req)
        first = req_idx * num_query_per_req
        has_sampled = num_sampled[req_idx] > 0
        anchor_ptr = last_sampled_ptr if has_sampled else next_prefill_tokens_ptr
        # vLLM keeps the one as a column, the other as a row.
        out_input_ids_ptr[first] = anchor_ptr.view(-1)[req_state_idx]
        out_input_ids_ptr[first + 1 : first + num_query_per_req] = (
            parallel_drafting_token_id
        )
        clamped_pos = np.minimum(query_pos, max_model_len - 1)
        _fill(out_query_positions_ptr, first, clamped_pos)
        _fill(out_query_slot_mapping_ptr, first, table.slots(req_idx, query_pos))

        sample_pos: np.ndarray = (query_pos + 1 - sample_offset)[sample_offset:]
        first_sample = req_idx * num_speculative_steps
        rows: np.ndarray = first + np.arange(sample_offset, num_query_per_req)
        _fill(out_sample_indices_ptr, first_sample, rows)
        _fill(out_sample_pos_ptr, first_sample, sample_pos)
        _fill(
            out_sample_idx_mapping_ptr,
            first_sample,
            np.full(len(rows), req_state_idx),
        )

        out_query_start_loc_ptr[req_idx] = first
        out_seq_lens_ptr[req_idx] = min(next_pos + num_query_per_req, max_model_len)
        out_temperature_ptr[req_state_idx] = temperature_ptr[req_state_idx]
        out_seeds_ptr[req_state_idx] = seeds_ptr[req_state_idx]

    num_query_tokens = num_reqs * num_query_per_req
    out_query_start_loc_ptr[num_reqs : max_num_reqs + 1] = num_query_tokens
    out_seq_lens_ptr[num_reqs:max_num_reqs] = 0
    out_query_slot_mapping_ptr[num_query_tokens:max_num_tokens] = PAD_SLOT_ID
    unused = slice(
        num_reqs * num_speculative_steps, max_num_reqs * num_speculative_steps
    )
    out_sample_indices_ptr[unused] = 0
    out_sample_pos_ptr[unused] = 0
    out_sample_idx_mapping_ptr[unused] = -1


@dataclass(frozen=True)
class SlotTable:
    """Positions of a request -> slots of the KV cache."""

    block_ids: np.ndarray
    """[max_num_reqs, max_num_blocks]; block 0 is null and never written."""
    block_size: int
    pad_slot_id: int

    def slots(self, req_idx: int, positions: np.ndarray) -> np.ndarray:
        last_block = self.block_ids.shape[1] - 1
        block_nums = np.minimum(positions // self.block_size, last_block)
        block_ids = self.block_ids[req_idx, block_nums].astype(np.int64)
        slots = block_ids * self.block_size + positions % self.block_size
        return np.where(block_ids != 0, slots, self.pad_slot_id)


def _fill(out: torch.Tensor, start: int, values: np.ndarray) -> None:
    out[start : start + len(values)] = torch.from_numpy(values)
