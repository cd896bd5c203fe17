# SPDX-License-Identifier: Apache-2.0
"""One layer's attention inputs, and every way to compute its attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import trees
from vllm_ddtree.ops.reference import tree_attention as reference
from vllm_ddtree.ops.tree_attention import merge_tree_attention

CHAIN_ROWS = 16
TREE_DEPTH = 15

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class AttentionShape:
    num_reqs: int
    context: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int

    @property
    def cache_bytes(self) -> int:
        """Keys and values that a call reads."""
        num_tokens = self.num_reqs * (self.context + self.num_rows)
        return num_tokens * self.num_kv_heads * self.head_size * 2 * 2

    @property
    def blocks_per_req(self) -> int:
        return -(-(self.context + max(self.num_rows, CHAIN_ROWS)) // self.block_size)


class AttentionCase:
    """A cache with `context` tokens per request and the rows of one tree each."""

    def __init__(self, shape: AttentionShape, device: torch.device, seed: int) -> None:
        self.shape, self.device = shape, device
        self.scale = shape.head_size**-0.5
        n, rows = shape.num_reqs, shape.num_rows
        generator = torch.Generator(device).manual_seed(seed)
        normal = {"generator": generator, "device": device, "dtype": torch.bfloat16}
        self.query = torch.randn(n * rows, shape.num_heads, shape.head_size, **normal)
        num_blocks = n * shape.blocks_per_req
        # The same layout as vLLM's default on CUDA: [block, slot, head, K then V].
        self.kv_cache = torch.randn(
            num_blocks,
            shape.block_size,
            shape.num_kv_heads,
            2 * shape.head_size,
            **normal,
        )
        blocks = torch.randperm(num_blocks, generator=generator, device=device)
        self.block_table = blocks.int().view(n, -1)
        self.key, self.value = self._rows_of_cache()
        # One tree for all: only that can be compared with xformers.
        self.ancestors = trees.draw_trees(1, rows - 1, TREE_DEPTH, device).ancestors
        self.tree_slots = torch.zeros(n, dtype=torch.int32, device=device)

    def starts(self, num_rows: int) -> torch.Tensor:
        reqs = torch.arange(self.shape.num_reqs + 1, device=self.device)
        return (num_rows * reqs).int()

    def lens(self, length: int) -> torch.Tensor:
        return torch.full(
            (self.shape.num_reqs,), length, dtype=torch.int32, device=self.device
        )

    def gathered(self, length: int) -> torch.Tensor:
        """`[num_reqs, length, num_kv_heads, 2 * head_size]`, the cache in order."""
        blocks = self.kv_cache[self.block_table.long()]
        return blocks.flatten(1, 2)[:, :length]

    def _rows_of_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' own keys and values, which are in the cache too."""
        shape = self.shape
        positions = torch.arange(
            shape.context, shape.context + shape.num_rows, device=self.device
        )
        blocks = self.block_table[:, positions // shape.block_size].long()
        rows = self.kv_cache[blocks, positions % shape.block_size].flatten(0, 1)
        key, value = rows.split(shape.head_size, dim=-1)
        return key.contiguous(), value.contiguous()

    def chain_query(self) -> torch.Tensor:
        rows = self.query.view(self.shape.num_reqs, self.shape.num_rows, -1)
        rows = rows[:, :CHAIN_ROWS].reshape(
            -1, self.shape.num_heads, self.shape.head_size
        )
        return rows.contiguous()

    def expected(self, peer: str) -> torch.Tensor:
        """The peer's output in float32, request by request."""
        num_rows, query = self.shape.num_rows, self.query
        slots = self.tree_slots
        if peer in ("causal", "chain"):
            slots = torch.full_like(slots, -1)
        if peer == "chain":
            query = self.chain_query()
            num_rows = query.shape[0] // self.shape.num_reqs
        out = torch.empty_like(query, dtype=torch.float32)
        for req_idx in range(self.shape.num_reqs):
            rows = slice(req_idx * num_rows, (req_idx + 1) * num_rows)
            # The reference makes its masks on the current default device.
            with torch.device(self.device):
                reference.tree_attention(
                    query[rows].float(),
                    self.kv_cache.transpose(1, 2),
                    self.block_table[req_idx : req_idx + 1],
                    torch.tensor([0, num_rows]),
                    torch.tensor([self.shape.context + num_rows]),
                    slots[:1],
                    self.ancestors,
                    self.scale,
                    out[rows],
                )
        return out


def peers(device: torch.device) -> dict[str, Callable[[AttentionCase], Run]]:
    """Name -> what prepares a call. Without a GPU, torch stands in for kernels."""
    if device.type == "cpu":
        return {
            "tree": _tree_on_cpu,
            "causal": _causal_on_cpu,
            "chain": _chain_on_cpu,
            "xformers": _xformers,
        }
    return {
        "tree": _tree,
        "causal": _causal,
        "chain": _chain,
        "xformers": _xformers,
    }


def _flash_attention(
    case: AttentionCase, query: torch.Tensor, length: int, causal: bool
) -> tuple[torch.Tensor, Callable[[], Any]]:
    """A call of vLLM's FlashAttention as its backend makes it inside a FULL graph."""
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
    )

    shape = case.shape
    num_rows = query.shape[0] // shape.num_reqs
    version = get_flash_attn_version(head_size=shape.head_size)
    starts, lens = case.starts(num_rows), case.lens(length)
    metadata, num_splits = None, 0
    if version == 3:
        # vLLM's own bound on splits in captured graphs.
        num_splits = 32
        metadata = get_scheduler_metadata(
            batch_size=shape.num_reqs,
            max_seqlen_q=num_rows,
            max_seqlen_k=length,
            num_heads_q=shape.num_heads,
            num_heads_kv=shape.num_kv_heads,
            headdim=shape.head_size,
            cache_seqlens=lens,
            qkv_dtype=query.dtype,
            cu_seqlens_q=starts,
            page_size=shape.block_size,
            causal=causal,
            num_splits=num_splits,
        )
    key, value = case.kv_cache.split(shape.head_size, dim=-1)
    out = torch.empty_like(query)

    def run() -> Any:
        return flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=num_rows,
            seqused_k=lens,
            max_seqlen_k=length,
            softmax_scale=case.scale,
            causal=causal,
            block_table=case.block_table,
            scheduler_metadata=metadata,
            fa_version=version,
            num_splits=num_splits,
            return_softmax_lse=not causal,
        )

    return out, run


def _merge(
    case: AttentionCase,
    starts: torch.Tensor,
    out: torch.Tensor,
    prefix: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    merge_tree_attention(
        out,
        prefix,
        lse,
        case.query,
        case.key,
        case.value,
        starts,
        case.tree_slots,
        case.ancestors,
        case.scale,
        case.shape.num_rows,
    )


def _tree(case: AttentionCase) -> Run:
    """What the engine runs: a lone request attends to parts of its prefix."""
    if case.shape.num_reqs == 1:
        return _tree_in_parts(case) or _tree_after_prefix(case)
    return _tree_after_prefix(case)


def _tree_after_prefix(case: AttentionCase) -> Run:
    out, prefix = _flash_attention(case, case.query, case.shape.context, causal=False)
    starts = case.starts(case.shape.num_rows)

    def run() -> torch.Tensor:
        _, lse = prefix()
        _merge(case, starts, out, out[None], lse[None])
        return out

    return run


def _tree_in_parts(case: AttentionCase) -> Run | None:
    """None where the backend would not part the prefix."""
    from vllm.v1.attention.backends.fa_utils import (
        get_flash_attn_version,
        get_scheduler_metadata,
    )

    from vllm_ddtree.attention import cuda

    shape = case.shape
    num_parts = cuda.num_prefix_parts(
        shape.num_rows * shape.num_heads // shape.num_kv_heads,
        shape.num_kv_heads,
        torch.cuda.get_device_properties(case.device).multi_processor_count,
    )
    if num_parts == 1 or get_flash_attn_version(head_size=shape.head_size) != 3:
        return None
    unit = cuda.part_unit(shape.block_size)
    width = cuda.part_width(shape.blocks_per_req, num_parts, unit)
    part_lens = torch.zeros(num_parts, dtype=torch.int32, device=case.device)
    part_blocks = torch.zeros(num_parts, width, dtype=torch.int32, device=case.device)
    # Once per step, for all layers.
    cuda.split_prefix(
        case.lens(shape.context),
        case.block_table[0],
        shape.block_size,
        unit,
        part_lens,
        part_blocks,
    )
    metadata = get_scheduler_metadata(
        batch_size=num_parts,
        max_seqlen_q=shape.num_rows,
        max_seqlen_k=width * shape.block_size,
        num_heads_q=shape.num_heads,
        num_heads_kv=shape.num_kv_heads,
        headdim=shape.head_size,
        cache_seqlens=part_lens,
        qkv_dtype=case.query.dtype,
        page_size=shape.block_size,
        causal=False,
        num_splits=1,
    )
    key, value = case.kv_cache.split(shape.head_size, dim=-1)
    starts, out = case.starts(shape.num_rows), torch.empty_like(case.query)

    def run() -> torch.Tensor:
        prefix, lse = cuda.attend_parts(
            case.query, key, value, part_lens, part_blocks, case.scale, metadata
        )
        _merge(case, starts, out, prefix, lse)
        return out

    return run


def _causal(case: AttentionCase) -> Run:
    length = case.shape.context + case.shape.num_rows
    out, attend = _flash_attention(case, case.query, length, causal=True)
    return lambda: (attend(), out)[1]


def _chain(case: AttentionCase) -> Run:
    query = case.chain_query()
    length = case.shape.context + query.shape[0] // case.shape.num_reqs
    out, attend = _flash_attention(case, query, length, causal=True)
    return lambda: (attend(), out)[1]


def _xformers(case: AttentionCase) -> Run:
    """xformers' tree attention over a contiguous cache."""
    from xformers.ops.fmha import common, triton_splitk
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention

    # Its Triton kernels run where its compiled extension, built for one release of
    # PyTorch, was not loaded; its own choice of kernels needs FlashAttention 2.
    common._built_with_cuda = True
    shape = case.shape
    n, rows, groups = shape.num_reqs, shape.num_rows, shape.num_kv_heads
    heads = shape.num_heads // groups

    def grouped(x: torch.Tensor) -> torch.Tensor:
        # [n, tokens, kv heads, head size] -> one more axis for the query heads
        return x.unsqueeze(3).expand(-1, -1, -1, heads, -1)

    query = case.query.view(n, rows, groups, heads, shape.head_size)
    cache = case.gathered(shape.context)
    cache_key, cache_value = (
        grouped(x.contiguous()) for x in cache.split(shape.head_size, dim=-1)
    )
    key, value = (
        grouped(x.view(n, rows, groups, shape.head_size))
        for x in (case.key, case.value)
    )
    words = case.ancestors[0]
    columns = torch.arange(rows, device=case.device)
    sees = (words[:, columns // 64] >> (columns % 64)) & 1 == 1
    bias = torch.zeros(rows, rows, dtype=query.dtype, device=case.device)
    bias.masked_fill_(~sees, -torch.inf)
    prefix_bias = BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[rows] * n,
        kv_padding=shape.context,
        kv_seqlen=[shape.context] * n,
        device=case.device,
    )

    def run() -> torch.Tensor:
        out = tree_attention(
            query,
            key,
            value,
            cache_key,
            cache_value,
            bias,
            prefix_bias,
            prefix_op=triton_splitk.FwOp,
            suffix_op=triton_splitk.FwOp,
        )
        return out.reshape(n * rows, shape.num_heads, shape.head_size)

    return run


def _attend_on_cpu(
    case: AttentionCase, query: torch.Tensor, length: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp `[num_heads, num_tokens]` in plain torch."""
    shape = case.shape
    num_rows = query.shape[0] // shape.num_reqs
    group = shape.num_heads // shape.num_kv_heads
    kv = case.gathered(length).float().transpose(1, 2).repeat_interleave(group, 1)
    keys, values = kv.split(shape.head_size, dim=-1)
    queries = query.float().view(shape.num_reqs, num_rows, shape.num_heads, -1)
    scores = queries.transpose(1, 2) @ keys.transpose(-1, -2) * case.scale
    if causal:
        sees = torch.ones(num_rows, length, dtype=torch.bool).tril(length - num_rows)
        scores = scores.masked_fill(~sees, -torch.inf)
    out = (scores.softmax(-1) @ values).transpose(1, 2).flatten(0, 1)
    lse = scores.logsumexp(-1).transpose(0, 1).flatten(1, 2)
    return out.to(query.dtype), lse


def _tree_on_cpu(case: AttentionCase) -> Run:
    starts = case.starts(case.shape.num_rows)

    def run() -> torch.Tensor:
        context = case.shape.context
        out, lse = _attend_on_cpu(case, case.query, context, causal=False)
        _merge(case, starts, out, out[None], lse[None])
        return out

    return run


def _causal_on_cpu(case: AttentionCase) -> Run:
    length = case.shape.context + case.shape.num_rows
    return lambda: _attend_on_cpu(case, case.query, length, causal=True)[0]


def _chain_on_cpu(case: AttentionCase) -> Run:
    query = case.chain_query()
    length = case.shape.context + query.shape[0] // case.shape.num_reqs
    return lambda: _attend_on_cpu(case, query, length, causal=True)[0]
