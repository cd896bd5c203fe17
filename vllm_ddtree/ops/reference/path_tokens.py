# SPDX-License-Identifier: Apache-2.0
"""Reference of `ops.path_tokens`."""

import torch

from vllm_ddtree.tree import TreeBatch


def gather_path_tokens(
    tree: TreeBatch,
    # [num_reqs] slot of each request, negative for a bare root
    slots: torch.Tensor,
    # [num_reqs + 1]
    cu_num_logits: torch.Tensor,
    num_logits: int,
    max_depth: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafts that a row's distribution is conditioned on, in order.

    They follow the committed tokens, of which the root is the last. A root, a row
    past the tree's nodes and every row of a request without a tree have none.

    Returns `path_tokens` [num_logits, max_depth] int64, padding -1, and `row_depths`
    [num_logits] int32, the number of tokens in each row.
    """
    path_tokens = torch.full((num_logits, max_depth), -1, device=slots.device)
    row_depths = torch.zeros(num_logits, dtype=torch.int32, device=slots.device)
    starts = cu_num_logits.tolist()
    for req_idx, slot in enumerate(slots.tolist()):
        num_rows = starts[req_idx + 1] - starts[req_idx]
        if slot < 0:
            continue
        paths: list[list[int]] = [[]]
        for node in range(min(num_rows - 1, int(tree.num_nodes[slot]))):
            parent = int(tree.parents[slot, node])
            paths.append([*paths[parent], int(tree.tokens[slot, node])])
        for row, path in enumerate(paths[:num_rows], start=starts[req_idx]):
            path_tokens[row, : len(path)] = torch.tensor(path)
            row_depths[row] = len(path)
    return path_tokens, row_depths
