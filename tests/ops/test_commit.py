# SPDX-License-Identifier: Apache-2.0
"""The commit equals a slow copy, and touches nothing else."""

import numpy as np
import pytest
import torch
from cases import property_of
from hypothesis import strategies as st

from vllm_ddtree.ops.commit import commit_kv, path_index
from vllm_ddtree.ops.reference.commit import commit_kv as commit_kv_reference
from vllm_ddtree.ops.reference.commit import path_index as path_index_reference

NUM_REQS = 2
BLOCK_SIZES = (1, 16, 32, 128, 256)
# Rows of bf16 and of 1-byte types, down to odd sizes that no wider word divides.
ROW_BYTES = (1, 2, 3, 6, 8, 12, 66, 128, 256, 328)


def draw_path(rng, max_depth: int, width: int) -> tuple[list[int], int]:
    """Accepted rows, ascending and padded, and num_sampled; often mostly in place."""
    num_accepted = int(rng.integers(0, min(max_depth, width - 1) + 1))
    kind = rng.choice(["identity", "prefix", "any", "tight"])
    rows = np.arange(1, num_accepted + 1)
    if kind == "any":
        rows = np.sort(rng.permutation(width - 1)[:num_accepted]) + 1
    elif kind == "prefix":
        rows[int(rng.integers(num_accepted + 1)) :] += width - 1 - num_accepted
    elif kind == "tight":
        rows += min(1, width - 1 - num_accepted)
    # Padding requests have sampled nothing at all.
    num_sampled = num_accepted + 1 if num_accepted or rng.random() < 0.7 else 0
    return [*rows.tolist(), *[-1] * (max_depth - num_accepted)], num_sampled


class Cache:
    """A byte buffer with planes in it, and canaries between and around the rows."""

    def __init__(self, rng, block_size: int, row_bytes: int, num_blocks: int, device):
        # Strides may be less aligned than the rows are.
        align = int(np.gcd(rng.choice([1, 2, 4, 8, 8]), row_bytes))
        self.row_bytes = row_bytes
        self.slot_stride = row_bytes + align * int(rng.integers(0, 3))
        used = self.slot_stride * block_size
        self.block_stride = used + align * int(rng.integers(0, 3))
        self.num_planes = int(rng.integers(1, 4))
        plane_bytes = self.block_stride * num_blocks + 8 * int(rng.integers(0, 3))
        plane_bytes += -plane_bytes % 8
        size = self.num_planes * plane_bytes + 64
        data = rng.integers(0, 256, size=size, dtype=np.uint8)
        self.bytes = torch.from_numpy(data).to(device)
        self.offsets = [8 + plane * plane_bytes for plane in range(self.num_planes)]

    def plane_ptrs(self, buffer: torch.Tensor) -> torch.Tensor:
        addresses = [buffer.data_ptr() + offset for offset in self.offsets]
        return torch.tensor(addresses, dtype=torch.int64, device=buffer.device)

    def geometry(self) -> tuple[int, int, int]:
        return self.block_stride, self.slot_stride, self.row_bytes

    def expected(self, table, block_size: int, roots, paths, counts) -> np.ndarray:
        """Copy by one gather before any write, from the definition of a slot."""
        before = self.bytes.cpu().numpy()
        after = before.copy()

        def place(req_idx: int, pos: int) -> int:
            block = int(table[req_idx][pos // block_size])
            return block * self.block_stride + pos % block_size * self.slot_stride

        for offset in self.offsets:
            for req_idx, (path, count) in enumerate(zip(paths, counts, strict=True)):
                for depth, row in enumerate(path[: max(count - 1, 0)], start=1):
                    source = offset + place(req_idx, roots[req_idx] + row)
                    target = offset + place(req_idx, roots[req_idx] + depth)
                    moved = before[source : source + self.row_bytes]
                    after[target : target + self.row_bytes] = moved
        return after


@property_of(
    NUM_REQS,
    block_size=st.sampled_from(BLOCK_SIZES),
    row_bytes=st.sampled_from(ROW_BYTES),
    max_depth=st.integers(1, 16),
)
def test_commit_equals_a_slow_copy(device, rng, block_size, row_bytes, max_depth):
    width = int(rng.integers(2, 65))
    roots = rng.integers(0, 2 * block_size + 1, size=NUM_REQS).tolist()
    max_blocks = (max(roots) + width) // block_size + 1
    num_blocks = NUM_REQS * max_blocks + 1
    table = rng.permutation(num_blocks)[:-1].reshape(NUM_REQS, max_blocks)
    cache = Cache(rng, block_size, row_bytes, num_blocks, device)
    drawn = [draw_path(rng, max_depth, width) for _ in range(NUM_REQS)]
    paths, counts = [p for p, _ in drawn], [n for _, n in drawn]
    expected = torch.from_numpy(cache.expected(table, block_size, roots, paths, counts))
    args = (
        *cache.geometry(),
        torch.from_numpy(table.astype(np.int32)).to(device),
        block_size,
        torch.tensor(roots, device=device),
        torch.tensor(paths, dtype=torch.int32, device=device),
        torch.tensor(counts, dtype=torch.int32, device=device),
    )
    if device == "cpu":
        copied = cache.bytes.clone()
        commit_kv_reference(cache.plane_ptrs(copied), *args)
        assert torch.equal(copied, expected)
    commit_kv(cache.plane_ptrs(cache.bytes), *args, use_kernel=True)
    assert torch.equal(cache.bytes.cpu(), expected)


def test_nothing_is_read_for_an_identity_path(device):
    """The planes are at address 0: any access would be a fault."""
    planes = torch.zeros(3, dtype=torch.int64, device=device)
    table = torch.zeros(3, 1, dtype=torch.int32, device=device)
    path = torch.tensor([[1, 2, 3], [1, -1, -1], [-1, -1, -1]], device=device).int()
    num_sampled = torch.tensor([4, 2, 0], dtype=torch.int32, device=device)
    roots = torch.zeros(3, dtype=torch.int64, device=device)
    args = (64, 8, 8, table, 8, roots, path, num_sampled)
    commit_kv(planes, *args, use_kernel=True)
    if device == "cuda":
        torch.cuda.synchronize()


def test_offsets_beyond_two_gigabytes(device):
    """A block whose bytes start past 2**31; untouched pages cost no memory here."""
    block_size, row_bytes = 16, 256
    block_bytes = block_size * row_bytes
    block = 2**31 // block_bytes + 3
    buffer = torch.from_numpy(np.zeros((block + 1) * block_bytes, dtype=np.uint8))
    buffer = buffer.to(device)
    rows = buffer[block * block_bytes :].view(block_size, row_bytes)
    rows.copy_(torch.arange(block_size)[:, None])
    commit_kv(
        torch.tensor([buffer.data_ptr()], device=device),
        block_bytes,
        row_bytes,
        row_bytes,
        torch.tensor([[block]], dtype=torch.int32, device=device),
        block_size,
        torch.tensor([4], device=device),
        torch.tensor([[2, 5]], dtype=torch.int32, device=device),
        torch.tensor([3], dtype=torch.int32, device=device),
        use_kernel=True,
    )
    expected = list(range(block_size))
    expected[5], expected[6] = 6, 9
    assert rows[:, 0].tolist() == expected
    assert rows[:, -1].tolist() == expected


@property_of(NUM_REQS + 1, max_depth=st.integers(1, 16), has_out=st.booleans())
def test_index_orders_hidden_states_by_path(device, rng, max_depth, has_out):
    num_reqs = NUM_REQS + 1
    num_rows = rng.integers(0, 20, size=num_reqs)
    num_prefill = rng.choice([0, 0, 3, 300], size=num_reqs)
    starts = np.concatenate([[0], np.cumsum(num_rows + num_prefill)])
    num_tokens = int(starts[-1]) + int(rng.integers(0, 5))
    paths, counts = [], []
    for n in num_rows:
        path, count = draw_path(rng, max_depth, max(int(n), 1))
        paths.append(path)
        counts.append(min(count, int(n)))
    args = (
        torch.tensor(paths, dtype=torch.int32, device=device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.from_numpy(starts.astype(np.int32)).to(device),
        torch.tensor([0, *num_rows.tolist()]).cumsum(0).int().to(device),
        num_tokens,
    )
    out = torch.full((num_tokens + 2,), -7, device=device) if has_out else None
    index = path_index(*args, out, use_kernel=True)
    assert torch.equal(index, path_index_reference(*args))

    expected = list(range(num_tokens))
    for req_idx in range(num_reqs):
        root = int(starts[req_idx] + num_prefill[req_idx])
        for j in range(counts[req_idx] - 1):
            expected[root + 1 + j] = root + paths[req_idx][j]
    assert index.tolist() == expected
    if out is not None:
        assert out.tolist() == [*expected, -7, -7]


@pytest.mark.parametrize("num_reqs", [1, 2, 3, 4, 5, 8, 9, 16, 17])
def test_index_finds_the_request_of_each_token(device, num_reqs):
    """Every request accepts its row 2 alone."""
    path = torch.tensor([[2]] * num_reqs, dtype=torch.int32, device=device)
    num_sampled = torch.full((num_reqs,), 2, dtype=torch.int32, device=device)
    starts = torch.arange(num_reqs + 1, device=device).int() * 3
    index = path_index(path, num_sampled, starts, starts, 3 * num_reqs, use_kernel=True)
    expected = [3 * r + row for r in range(num_reqs) for row in (0, 2, 2)]
    assert index.tolist() == expected
