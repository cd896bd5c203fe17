# SPDX-License-Identifier: Apache-2.0
"""Reference of `ops.verify_inputs`."""

import torch

from vllm_ddtree.tree import TreeBatch


def prepare_verify_inputs(
    tree: TreeBatch,
    tree_slots: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    prefill_len: torch.Tensor,
) -> None:
    """Mark the tree requests of a batch and move their rows to depth positions.

    A request holds a tree iff it has draft rows and its root, the bonus token, lies
    past its prompt. The root stays at position L; node i of the tree moves from its
    storage position L + 1 + i, which its KV slot keeps, to L + depth(i), which is
    where RoPE and the sampling noise of a plain decode would see that token.
    """
    tree_slots.fill_(-1)
    for req_idx, slot in enumerate(idx_mapping.tolist()):
        num_rows = int(cu_num_logits[req_idx + 1] - cu_num_logits[req_idx])
        root = int(query_start_loc[req_idx + 1]) - num_rows
        if num_rows < 2 or positions[root] < prefill_len[slot]:
            continue
        tree_slots[req_idx] = slot
        depths = tree.depths[slot, : num_rows - 1]
        positions[root + 1 : root + num_rows] = positions[root] + depths


def restore_positions(
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    budget: int,
) -> None:
    """Undo `prepare_verify_inputs`: row i of every request is at L + i again."""
    for req_idx in range(len(cu_num_logits) - 1):
        num_rows = int(cu_num_logits[req_idx + 1] - cu_num_logits[req_idx])
        root = int(query_start_loc[req_idx + 1]) - num_rows
        positions[root : root + num_rows] = positions[root] + torch.arange(num_rows)
