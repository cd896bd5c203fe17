# SPDX-License-Identifier: Apache-2.0
"""Tree attention equals masked attention with a mask built by brute force."""

import itertools

import numpy as np
import torch
from cases import closure_of, draw_tree, property_of
from hypothesis import strategies as st

from vllm_ddtree.ops.ancestors import compute_ancestors
from vllm_ddtree.ops.reference import tree_attention as reference
from vllm_ddtree.ops.tree_attention import merge_tree_attention
from vllm_ddtree.tree import TreeBatch

NUM_REQS = 3
# Relative error of the whole output; fp32 accumulation in both.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


class Batch:
    """Trees, causal requests and a padded row over a paged cache."""

    def __init__(self, rng, device, budget, group, head_size, block_size, dtype):
        self.tree = draw_tree(rng, NUM_REQS, budget, 50, "cpu")
        compute_ancestors(self.tree)
        # The last row of the batch is graph padding without tokens.
        self.query_lens = [*rng.integers(1, budget + 2, NUM_REQS).tolist(), 0]
        self.prefix_lens = [*rng.choice([0, 1, 15, 16, 17, 40], NUM_REQS), 0]
        self.slots = rng.permutation(NUM_REQS).tolist()
        self.slots[int(rng.integers(NUM_REQS))] = -1
        self.scale = head_size**-0.5
        num_kv_heads, num_blocks = 2, 24
        torch.manual_seed(int(rng.integers(2**31)))
        num_tokens = sum(self.query_lens)
        self.query = torch.randn(num_tokens, num_kv_heads * group, head_size)
        self.kv_cache = torch.randn(num_blocks, num_kv_heads, block_size, 2 * head_size)
        blocks = torch.from_numpy(rng.permutation(num_blocks)).int()
        self.block_table = blocks[: NUM_REQS * 8].view(NUM_REQS, 8)
        self.block_table = torch.cat([self.block_table, self.block_table[:1] * 0])
        starts = np.cumsum([0, *self.query_lens])
        self.query_start_loc = torch.from_numpy(starts).int()
        for name in ("query", "kv_cache"):
            setattr(self, name, getattr(self, name).to(dtype))
        self.seq_lens = torch.tensor(
            [p + q for p, q in zip(self.prefix_lens, self.query_lens, strict=True)]
        ).int()
        self.tree_slots = torch.tensor([*self.slots, -1]).int()
        self.device = device

    def kv_of(self, req_idx: int, first: int, last: int) -> torch.Tensor:
        """`[num_kv_heads, last - first, 2 * head_size]` at those positions."""
        pos = torch.arange(first, last)
        block_size = self.kv_cache.shape[2]
        blocks = self.block_table[req_idx, pos // block_size].long()
        return self.kv_cache[blocks, :, pos % block_size].transpose(0, 1)

    def mask_of(self, req_idx: int) -> torch.Tensor:
        """`[query_len, seq_len]` bool, by the definition of an ancestor."""
        num_rows, prefix = self.query_lens[req_idx], self.prefix_lens[req_idx]
        among = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
        slot = self.slots[req_idx]
        if slot >= 0:
            num_nodes = int(self.tree.num_nodes[slot])
            parents = self.tree.parents[slot, :num_nodes].tolist()
            among = closure_of(parents, self.tree.width)[:num_rows, :num_rows]
        seen = torch.ones(num_rows, prefix, dtype=torch.bool)
        return torch.cat([seen, among], dim=1)

    def expected(self) -> torch.Tensor:
        """Masked attention in float64, request by request."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        group = self.query.shape[1] // self.kv_cache.shape[1]
        for req_idx in range(NUM_REQS):
            begin, end = self.query_start_loc[req_idx : req_idx + 2].tolist()
            kv = self.kv_of(req_idx, 0, int(self.seq_lens[req_idx])).double()
            keys, values = kv.repeat_interleave(group, 0).chunk(2, dim=-1)
            queries = self.query[begin:end].double().transpose(0, 1)
            scores = queries @ keys.transpose(-1, -2) * self.scale
            scores = scores.masked_fill(~self.mask_of(req_idx), -torch.inf)
            out[begin:end] = (scores.softmax(-1) @ values).transpose(0, 1)
        return out


def attend_prefix(
    batch: Batch, rng: np.random.Generator, num_parts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention over parts of the prefix, its log-sum-exp, the query rows' own KV."""
    num_tokens, num_heads, _ = batch.query.shape
    # Rows without keys hold rubbish, as an attention kernel may leave it.
    out = torch.full(
        (num_parts, *batch.query.shape), torch.nan, dtype=batch.query.dtype
    )
    lse = torch.full((num_parts, num_heads, num_tokens), -torch.inf)
    own = []
    group = num_heads // batch.kv_cache.shape[1]
    for req_idx in range(NUM_REQS):
        begin, end = batch.query_start_loc[req_idx : req_idx + 2].tolist()
        prefix, seq_len = batch.prefix_lens[req_idx], int(batch.seq_lens[req_idx])
        own.append(batch.kv_of(req_idx, prefix, seq_len).transpose(0, 1))
        cuts = sorted(rng.integers(0, prefix + 1, num_parts - 1).tolist())
        for part, (first, last) in enumerate(itertools.pairwise([0, *cuts, prefix])):
            if first == last:
                continue
            kv = batch.kv_of(req_idx, first, last).float().repeat_interleave(group, 0)
            keys, values = kv.chunk(2, dim=-1)
            queries = batch.query[begin:end].float().transpose(0, 1)
            scores = queries @ keys.transpose(-1, -2) * batch.scale
            lse[part, :, begin:end] = scores.logsumexp(-1)
            attended = (scores.softmax(-1) @ values).transpose(0, 1)
            out[part, begin:end] = attended.to(out.dtype)
    return out, lse, torch.cat(own)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    assert not out.isnan().any()
    return float((out.double() - expected).norm() / expected.norm())


shapes = {
    "budget": st.sampled_from([1, 7, 31, 32, 33, 63, 64, 70]),
    "group": st.sampled_from([1, 4]),
    "head_size": st.sampled_from([64, 80, 128, 256]),
    "block_size": st.sampled_from([16, 32, 128]),
}


@property_of(NUM_REQS, **shapes, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_reference_equals_masked_attention(
    rng, budget, group, head_size, block_size, dtype
):
    batch = Batch(rng, "cpu", budget, group, head_size, block_size, dtype)
    out = torch.full_like(batch.query, torch.nan)
    reference.tree_attention(
        batch.query,
        batch.kv_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.tree_slots,
        batch.tree.ancestors,
        batch.scale,
        out,
    )
    assert relative_error(out, batch.expected()) < TOLERANCE[dtype]


@property_of(
    NUM_REQS,
    **shapes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    use_kernel=st.sampled_from([True, True, False]),
    num_parts=st.sampled_from([1, 1, 2, 5]),
)
def test_merge_equals_masked_attention(
    device, rng, budget, group, head_size, block_size, dtype, use_kernel, num_parts
):
    batch = Batch(rng, device, budget, group, head_size, block_size, dtype)
    prefix, lse, own = attend_prefix(batch, rng, num_parts)
    key, value = (half.contiguous() for half in own.chunk(2, dim=-1))
    if not use_kernel:
        device = "cpu"
    elif device == "cpu" and dtype == torch.bfloat16:
        # The interpreter multiplies the bits of bfloat16, not their values.
        return
    prefix = prefix.to(device)
    # One part may be the output's own memory.
    out = prefix[0] if num_parts == 1 else torch.empty_like(prefix[0])
    merge_tree_attention(
        out,
        prefix,
        lse.to(device),
        batch.query.to(device),
        key.to(device),
        value.to(device),
        batch.query_start_loc.to(device),
        batch.tree_slots.to(device),
        batch.tree.ancestors.to(device),
        batch.scale,
        max(batch.query_lens),
        use_kernel=use_kernel,
    )
    assert relative_error(out.cpu(), batch.expected()) < TOLERANCE[dtype]


def test_a_chain_is_causal(device):
    """A tree without branches gives what a causal mask gives, to the last bit."""
    torch.manual_seed(0)
    num_rows, heads, head_size = 40, 4, 64
    tree = TreeBatch.allocate(1, num_rows - 1, "cpu")
    tree.parents.copy_(torch.arange(num_rows - 1))
    tree.depths.copy_(torch.arange(1, num_rows))
    tree.num_nodes.fill_(num_rows - 1)
    compute_ancestors(tree)
    query, key, value, prefix = torch.randn(
        4, num_rows, heads, head_size, device=device
    )
    lse = torch.randn(heads, num_rows, device=device)
    outs = []
    for slot in (0, -1):
        out = prefix.clone()
        merge_tree_attention(
            out,
            out[None],
            lse[None],
            query,
            key,
            value,
            torch.tensor([0, num_rows], dtype=torch.int32, device=device),
            torch.tensor([slot], dtype=torch.int32, device=device),
            tree.ancestors.to(device),
            0.125,
            num_rows,
            use_kernel=True,
        )
        outs.append(out)
    assert torch.equal(*outs)
