# SPDX-License-Identifier: Apache-2.0
"""A walk ends at the first token that ends its request."""

import numpy as np
import torch
from cases import property_of
from hypothesis import strategies as st

from vllm_ddtree.ops.reference.stop_tokens import cut_at_stop as cut_at_stop_reference
from vllm_ddtree.ops.stop_tokens import cut_at_stop

NUM_REQS = 4
NUM_SLOTS = NUM_REQS + 1
MAX_STOP_TOKENS = 8


def draw_walks(rng, max_depth: int, vocab_size: int) -> list[torch.Tensor]:
    """`path`, `sampled` and `num_sampled` as `walk_tree` returns them."""
    path = np.full((NUM_REQS, max_depth), -1, dtype=np.int32)
    sampled = np.full((NUM_REQS, max_depth + 1), -1, dtype=np.int64)
    num_sampled = rng.integers(0, max_depth + 2, size=NUM_REQS).astype(np.int32)
    for req_idx, count in enumerate(num_sampled):
        sampled[req_idx, :count] = rng.integers(vocab_size, size=count)
        if count > 1:
            path[req_idx, : count - 1] = rng.integers(1, 5, size=count - 1).cumsum()
    return [torch.from_numpy(values) for values in (path, sampled, num_sampled)]


@property_of(NUM_REQS, max_depth=st.integers(0, 16), vocab_size=st.integers(2, 40))
def test_walks_end_at_their_first_stop_token(device, rng, max_depth, vocab_size):
    walks = draw_walks(rng, max_depth, vocab_size)
    slots = torch.from_numpy(rng.permutation(NUM_SLOTS)[:NUM_REQS].astype(np.int32))
    # What lies past a slot's number is left from earlier requests.
    stop_token_ids = torch.from_numpy(
        rng.integers(vocab_size, size=(NUM_SLOTS, MAX_STOP_TOKENS)).astype(np.int32)
    )
    counts = rng.choice([0, 1, 2, MAX_STOP_TOKENS], size=NUM_SLOTS)
    num_stop_token_ids = torch.from_numpy(counts.astype(np.int32))
    tables = (slots, stop_token_ids, num_stop_token_ids)

    cut, expected = ([walk.clone() for walk in walks] for _ in range(2))
    on_device = [tensor.to(device) for tensor in cut]
    cut_at_stop(*on_device, *(table.to(device) for table in tables), use_kernel=True)
    cut_at_stop_reference(*expected, *tables)
    for result, other in zip(on_device, expected, strict=True):
        assert torch.equal(result.cpu(), other)

    path, sampled, num_sampled = (tensor.tolist() for tensor in walks)
    for req_idx, slot in enumerate(slots.tolist()):
        stops = stop_token_ids[slot, : counts[slot]].tolist()
        tokens = sampled[req_idx][: num_sampled[req_idx]]
        firsts = [tokens.index(stop) for stop in stops if stop in tokens]
        kept = tokens[: min(firsts) + 1] if firsts else tokens
        rows = path[req_idx][: max(len(kept) - 1, 0)]
        assert expected[0][req_idx].tolist() == rows + [-1] * (max_depth - len(rows))
        assert expected[1][req_idx].tolist() == kept + [-1] * (
            max_depth + 1 - len(kept)
        )
        assert expected[2][req_idx] == len(kept)
