# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for an NVIDIA GPU on a machine that has none.

The interpreter accepts programs that Triton's compiler refuses. This script calls
each wrapper on CPU tensors, compiles what it would have launched, and prints a line
per kernel: registers and spills per thread, shared memory.

    python tests/ops/compile_kernels.py [--capability 90]
"""

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from vllm_ddtree.ops.ancestors import compute_ancestors
from vllm_ddtree.ops.bad_words import mask_bad_words
from vllm_ddtree.ops.build import build_tree
from vllm_ddtree.ops.commit import commit_kv, path_index
from vllm_ddtree.ops.path_tokens import gather_path_tokens
from vllm_ddtree.ops.penalties import penalize_path
from vllm_ddtree.ops.split_prefix import part_width, split_prefix
from vllm_ddtree.ops.stop_tokens import cut_at_stop
from vllm_ddtree.ops.thinking_budget import force_reasoning_end
from vllm_ddtree.ops.top_k import local_top_k, merge_top_k, top_k_log_probs
from vllm_ddtree.ops.tree_attention import merge_tree_attention
from vllm_ddtree.ops.typical import truncate_typical, walk_typical
from vllm_ddtree.ops.verify_inputs import prepare_verify_inputs, restore_positions
from vllm_ddtree.ops.walk import walk_tree
from vllm_ddtree.tree import TreeBatch


def install(capability: int, report: Callable[[str], None]) -> None:
    """Let a launch compile and report instead of run."""
    target = GPUTarget("cuda", capability, 32)
    ptxas = get_ptxas(capability).path

    def run(self: JITFunction, *args, grid, warmup, num_warps=4, **kwargs) -> None:
        names = [param.name for param in self.params]
        bound = dict(zip(names, args, strict=False)) | kwargs
        constants = {
            (names.index(name),): value
            for name, value in bound.items()
            if value is None or self.params[names.index(name)].is_constexpr
        }
        signature = {
            name: "constexpr" if (i,) in constants else mangle_type(bound[name])
            for i, name in enumerate(names)
        }
        source = ASTSource(self, signature, constants)
        options = {"num_warps": num_warps}
        compiled = triton.compile(source, target=target, options=options)
        ptx = compiled.asm["ptx"]
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx if isinstance(ptx, str) else ptx.decode())
            file.flush()
            arch = re.search(r"\.target (sm_\w+)", Path(file.name).read_text())
            command = [ptxas, "-v", f"-arch={arch[1]}", file.name, "-o", os.devnull]
            log = subprocess.run(command, capture_output=True, text=True, check=True)
        usage = ", ".join(
            re.findall(r"\d+ bytes spill \w+|Used \d+ registers", log.stderr)
        )
        shared = compiled.metadata.shared
        report(f"{self.__name__} warps={num_warps}: {usage}, {shared} bytes shared")

    JITFunction.run = run


def launch_all(budget: int, top_k: int, vocab_size: int) -> None:
    """Call each wrapper once in every mode that compiles differently."""
    depth = 15
    tree = TreeBatch.allocate(2, budget, "cpu")
    slots = torch.arange(2)
    ints = torch.ones(2, dtype=torch.int32)
    shape = (2, depth, top_k)
    top = (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape))
    for slot, keep_spine in ((slots, False), (None, True)):
        limits = (ints, ints, ints)
        build_tree(*top, tree, slot, *limits, keep_spine, use_kernel=True)
        compute_ancestors(tree, slot, use_kernel=True)

    num_logits = 2 * tree.width
    chosen = torch.zeros(num_logits, dtype=torch.int64)
    cu_num_logits = torch.tensor([0, tree.width, num_logits], dtype=torch.int32)
    logits = torch.zeros(num_logits, vocab_size)
    log_z = torch.zeros(num_logits)
    for max_nodes in (None, ints):
        args = (chosen, cu_num_logits, depth, max_nodes)
        walk_tree(tree, slots, *args, use_kernel=True)
        walk_typical(tree, slots, logits, log_z, *args, use_kernel=True)
    for is_greedy in (None, chosen > 0):
        truncate_typical(logits, 0.09, 0.3, is_greedy, use_kernel=True)

    paths = gather_path_tokens(
        tree, slots, cu_num_logits, num_logits, depth, use_kernel=True
    )
    rows = (logits, *paths, chosen)
    history = torch.zeros(2, 64, dtype=torch.int32)
    raw = logits[:, :depth].contiguous()
    floats = (log_z, log_z, log_z)
    penalize_path(
        logits, raw, *paths, chosen, *floats, history, history, use_kernel=True
    )
    words = (history, history, ints, history, ints, ints, 4)
    mask_bad_words(*rows, *words, use_kernel=True)
    markers = (ints, ints[:1], history[0, :3])
    state = (ints, history, ints, ints, ints)
    force_reasoning_end(*rows, *state, *markers, use_kernel=True)

    path = torch.zeros(2, depth, dtype=torch.int32)
    sampled = torch.zeros(2, depth + 1, dtype=torch.int64)
    cut_at_stop(path, sampled, ints, slots, history, ints, use_kernel=True)
    table = torch.zeros(2, 8, dtype=torch.int32)
    planes = torch.zeros(4, dtype=torch.int64)
    for row_bytes in (2048, 132, 66, 33):
        args = (row_bytes * 16, row_bytes, row_bytes, table, 16, slots, path, ints)
        commit_kv(planes, *args, use_kernel=True)
    path_index(path, ints, ints, ints, 512, use_kernel=True)

    for dtype in (torch.float32, torch.bfloat16):
        for k in (top_k, 65):
            local_top_k(logits.to(dtype), k, 0, use_kernel=True)
    top_k_log_probs(logits, top_k, chosen, use_kernel=True)
    merge_top_k(torch.zeros(4, 8, 2 * top_k + 1), top_k, use_kernel=True)

    positions = torch.zeros(num_logits, dtype=torch.int64)
    layout = (slots, cu_num_logits, cu_num_logits)
    tree_slots = torch.zeros(2, dtype=torch.int32)
    prepare_verify_inputs(tree, tree_slots, positions, *layout, ints, use_kernel=True)
    restore_positions(positions, *layout[1:], budget, use_kernel=True)
    for head_size in (64, 128, 256):
        query = torch.zeros(num_logits, 8, head_size, dtype=torch.bfloat16)
        key = torch.zeros(num_logits, 2, head_size, dtype=torch.bfloat16)
        args = (cu_num_logits, tree_slots, tree.ancestors, 0.125, tree.width)
        for num_parts in (1, 8, 32):
            prefix = query.expand(num_parts, *query.shape)
            lse = torch.zeros(num_parts, 8, num_logits)
            merge_tree_attention(
                query, prefix, lse, query, key, key, *args, use_kernel=True
            )
    parts = torch.zeros(8, dtype=torch.int32)
    blocks = torch.zeros(8, part_width(100, 8, 8), dtype=torch.int32)
    split_prefix(ints[:1], ints.repeat(50), 16, 8, parts, blocks, use_kernel=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 63, 255])
    options = parser.parse_args()
    install(options.capability, print)
    for budget in options.budgets:
        print(f"budget {budget}, top-k {budget}, vocabulary 151936")
        launch_all(budget, budget, vocab_size=151936)
