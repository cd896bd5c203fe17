# SPDX-License-Identifier: Apache-2.0
"""Batches of requests with committed text and a tree, for logits processing."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from cases import draw_tree, move_tree

from vllm_ddtree.tree import TreeBatch

MAX_MODEL_LEN = 48
MAX_DEPTH = 15
NUM_SLOTS = 5
NUM_REQS = 3


@dataclass
class Batch:
    """Some slots are in the batch; every row of a slot's tree is a verify row."""

    tree: TreeBatch
    # [num_reqs]
    req_state_idx: torch.Tensor
    # [num_reqs] the same, -1 for a request without a tree
    slots: torch.Tensor
    # [num_reqs + 1]
    cu_num_logits: torch.Tensor
    # [num_logits]
    expanded_idx_mapping: torch.Tensor
    # [num_slots, MAX_MODEL_LEN]
    all_token_ids: torch.Tensor
    # [num_slots]
    prompt_len: torch.Tensor
    total_len: torch.Tensor
    # [num_logits, vocab_size]
    logits: torch.Tensor

    @property
    def num_logits(self) -> int:
        return self.logits.shape[0]

    def paths(self) -> list[list[int]]:
        """Tokens of the path of every row, from each node's parent upwards."""
        tokens, parents = self.tree.tokens.tolist(), self.tree.parents.tolist()
        num_nodes = self.tree.num_nodes.tolist()
        paths = []
        starts = self.cu_num_logits.tolist()
        for slot, (start, end) in zip(
            self.slots.tolist(), itertools.pairwise(starts), strict=True
        ):
            for row in range(end - start):
                path: list[int] = []
                while row > 0 and slot >= 0 and row <= num_nodes[slot]:
                    path.insert(0, tokens[slot][row - 1])
                    row = parents[slot][row - 1]
                paths.append(path)
        return paths


def draw_batch(
    rng: np.random.Generator,
    vocab_size: int,
    device: str,
    *,
    max_budget: int = 16,
    is_chain: bool = False,
) -> Batch:
    """`NUM_REQS` random trees behind random text."""
    budget = int(rng.integers(1, max_budget + 1))
    tree = draw_tree(rng, NUM_SLOTS, budget, vocab_size, "cpu")
    if is_chain:
        num_nodes = int(rng.integers(0, min(budget, MAX_DEPTH) + 1))
        tree.num_nodes.fill_(num_nodes)
        nodes = torch.arange(budget)
        tree.parents[:] = nodes
        tree.depths[:] = nodes + 1
        drafts = rng.integers(0, vocab_size, size=tree.tokens.shape)
        tree.tokens[:] = torch.from_numpy(drafts)
    req_state_idx = torch.from_numpy(rng.permutation(NUM_SLOTS)[:NUM_REQS])
    slots = req_state_idx.int()
    slots[torch.from_numpy(rng.random(NUM_REQS) < 0.2)] = -1
    num_rows = tree.num_nodes[req_state_idx].long() + 1
    if not is_chain:
        # Rows without a node, and nodes without a row.
        num_rows += torch.from_numpy(rng.choice([-1, 0, 0, 2], size=NUM_REQS))
    num_rows = num_rows.clamp(min=1, max=tree.width)
    total_len = rng.integers(1, MAX_MODEL_LEN + 1, size=NUM_SLOTS)
    texts = rng.integers(0, vocab_size, size=(NUM_SLOTS, MAX_MODEL_LEN))
    logits = rng.normal(size=(int(num_rows.sum()), vocab_size)) * 3
    logits[rng.random(logits.shape) < 0.1] = rng.choice([-np.inf, 0.0, 1e30, -1e30])
    return Batch(
        move_tree(tree, device),
        req_state_idx.to(device),
        slots.to(device),
        torch.cat([torch.zeros(1), num_rows.cumsum(0)]).int().to(device),
        req_state_idx.repeat_interleave(num_rows).int().to(device),
        torch.from_numpy(texts.astype(np.int32)).to(device),
        torch.from_numpy((total_len * rng.random(NUM_SLOTS)).astype(np.int32)).to(
            device
        ),
        torch.from_numpy(total_len.astype(np.int32)).to(device),
        torch.from_numpy(logits.astype(np.float32)).to(device),
    )


def chain_rows(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's kernels read: the token of every row and its place in the chain."""
    tokens, local_pos = [], []
    starts = batch.cu_num_logits.tolist()
    for req_state_idx, (start, end) in zip(
        batch.req_state_idx.tolist(), itertools.pairwise(starts), strict=True
    ):
        root = batch.all_token_ids[req_state_idx, batch.total_len[req_state_idx] - 1]
        drafts = batch.tree.tokens[req_state_idx, : end - start - 1]
        tokens += [int(root), *drafts.tolist()]
        local_pos += range(end - start)
    device = batch.logits.device
    return (
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(local_pos, dtype=torch.int32, device=device),
    )


def assert_equal_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert torch.equal(left.view(torch.int32), right.view(torch.int32))
