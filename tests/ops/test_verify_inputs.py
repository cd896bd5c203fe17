# SPDX-License-Identifier: Apache-2.0
"""A batch of chains becomes one of trees, and back."""

import itertools

import torch
from cases import draw_tree, property_of

from vllm_ddtree.ops.verify_inputs import prepare_verify_inputs, restore_positions

NUM_REQS = 4
MAX_NUM_REQS = 6


def draw_batch(rng, tree):
    """Query lengths, verify rows, root positions and prompt lengths."""
    num_rows = rng.integers(1, tree.budget + 2, NUM_REQS)
    num_rows[rng.random(NUM_REQS) < 0.2] = 1
    # Prefill chunks put prompt tokens before their only verify row.
    query_lens = num_rows + (num_rows == 1) * rng.integers(0, 5, NUM_REQS)
    starts = rng.integers(0, 1000, NUM_REQS)
    prefill_len = rng.integers(1, 1000, tree.num_slots)
    return num_rows, query_lens, starts, prefill_len


@property_of(NUM_REQS)
def test_positions_follow_depth_and_come_back(device, rng):
    budget = int(rng.choice([1, 5, 31, 63, 70]))
    tree = draw_tree(rng, MAX_NUM_REQS, budget, 50, device)
    num_rows, query_lens, starts, prefill_len = draw_batch(rng, tree)
    slots = rng.permutation(MAX_NUM_REQS)[:NUM_REQS]
    storage = [list(range(s, s + n)) for s, n in zip(starts, query_lens, strict=True)]
    positions = torch.tensor([*itertools.chain(*storage)], device=device)
    before = positions.clone()
    query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    cu_num_logits = torch.tensor([0, *num_rows]).cumsum(0).int().to(device)
    tree_slots = torch.full((MAX_NUM_REQS,), 77, dtype=torch.int32, device=device)
    prepare_verify_inputs(
        tree,
        tree_slots,
        positions,
        torch.from_numpy(slots).to(device),
        query_start_loc,
        cu_num_logits,
        torch.from_numpy(prefill_len).int().to(device),
        use_kernel=True,
    )

    expected_slots, expected = [], []
    for req_idx, slot in enumerate(slots.tolist()):
        rows = storage[req_idx][-num_rows[req_idx] :]
        is_tree = len(rows) > 1 and rows[0] >= prefill_len[slot]
        expected_slots.append(slot if is_tree else -1)
        if is_tree:
            depths = tree.depths[slot, : len(rows) - 1].tolist()
            rows = [rows[0], *(rows[0] + depth for depth in depths)]
        expected += storage[req_idx][: -num_rows[req_idx]] + rows
    padding = [-1] * (MAX_NUM_REQS - NUM_REQS)
    assert tree_slots.tolist() == expected_slots + padding
    assert positions.tolist() == expected

    restore_positions(
        positions, query_start_loc, cu_num_logits, budget, use_kernel=True
    )
    assert torch.equal(positions, before)
