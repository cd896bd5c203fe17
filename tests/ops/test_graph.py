# SPDX-License-Identifier: Apache-2.0
"""A step of the tree in one CUDA graph: nothing in it needs the host."""

import numpy as np
import pytest
import torch
from cases import assert_same_trees, move_tree

from vllm_ddtree.ops.ancestors import compute_ancestors
from vllm_ddtree.ops.build import build_tree
from vllm_ddtree.ops.commit import commit_kv, path_index
from vllm_ddtree.ops.reference.top_k import top_k_log_probs as top_k_reference
from vllm_ddtree.ops.top_k import top_k_log_probs
from vllm_ddtree.ops.typical import truncate_typical, walk_typical
from vllm_ddtree.ops.walk import walk_tree
from vllm_ddtree.tree import TreeBatch

NUM_REQS, DEPTH, BUDGET, VOCAB_SIZE = 3, 7, 20, 5000
BLOCK_SIZE, ROW_BYTES, NUM_PLANES = 16, 64, 4


class Step:
    """The static buffers of a step, and the step itself."""

    def __init__(self, device: str) -> None:
        width = BUDGET + 1
        ints = {"dtype": torch.int32, "device": device}
        self.draft_logits = torch.zeros(NUM_REQS * DEPTH, VOCAB_SIZE, device=device)
        self.target_logits = torch.zeros(NUM_REQS * width, VOCAB_SIZE, device=device)
        self.tree = TreeBatch.allocate(NUM_REQS, BUDGET, device)
        self.limits = [torch.full((NUM_REQS,), n, **ints) for n in (BUDGET, DEPTH, 99)]
        self.slots = torch.arange(NUM_REQS, device=device)
        self.starts = torch.arange(NUM_REQS + 1, **ints) * width
        num_blocks = 8 * NUM_REQS
        self.table = torch.arange(num_blocks, **ints).view(NUM_REQS, 8)
        self.roots = torch.arange(NUM_REQS, device=device) + 5
        block_bytes = BLOCK_SIZE * ROW_BYTES
        self.cache = torch.zeros(
            NUM_PLANES, num_blocks * block_bytes, dtype=torch.uint8, device=device
        )
        self.planes = torch.tensor([p.data_ptr() for p in self.cache], device=device)

    def fill(self, seed: int) -> None:
        """New inputs in the same places; the target agrees with the draft often."""
        rng = np.random.default_rng(seed)
        draft = torch.from_numpy(rng.normal(size=self.draft_logits.shape) * 3)
        self.draft_logits.copy_(draft)
        target = draft.view(NUM_REQS, DEPTH, -1).repeat(1, 3, 1)[:, : BUDGET + 1]
        self.target_logits.copy_(target.flatten(0, 1))
        self.cache.copy_(torch.from_numpy(rng.integers(0, 256, self.cache.shape)))

    def run(self) -> list[torch.Tensor]:
        tokens, log_probs = top_k_log_probs(self.draft_logits, BUDGET)
        shape = (NUM_REQS, DEPTH, BUDGET)
        top = (tokens.view(shape), log_probs.view(shape))
        build_tree(*top, self.tree, self.slots, *self.limits)
        compute_ancestors(self.tree, self.slots)
        chosen = self.target_logits.argmax(-1)
        walked = walk_tree(self.tree, self.slots, chosen, self.starts, DEPTH)
        path, _, num_sampled = walked
        commit_kv(
            self.planes,
            BLOCK_SIZE * ROW_BYTES,
            ROW_BYTES,
            ROW_BYTES,
            self.table,
            BLOCK_SIZE,
            self.roots,
            path,
            num_sampled,
        )
        num_tokens = NUM_REQS * (BUDGET + 1)
        index = path_index(path, num_sampled, self.starts, self.starts, num_tokens)
        log_z = truncate_typical(self.target_logits, 0.09, 0.3)
        rows = (self.target_logits, log_z, chosen, self.starts)
        typical = walk_typical(self.tree, self.slots, *rows, DEPTH)
        return [*walked, index, log_z, *typical]


@pytest.mark.gpu
def test_replay_equals_the_references():
    on_gpu, on_cpu = Step("cuda"), Step("cpu")
    on_gpu.fill(0)
    on_gpu.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = on_gpu.run()
    num_accepted = 0
    for seed in range(20):
        for step in (on_gpu, on_cpu):
            step.fill(seed)
        graph.replay()
        expected = on_cpu.run()
        host_tree = move_tree(on_gpu.tree, "cpu")
        torch.testing.assert_close(host_tree.scores, on_cpu.tree.scores)
        on_cpu.tree.scores.copy_(host_tree.scores)
        assert_same_trees(host_tree, on_cpu.tree)
        assert torch.equal(on_gpu.cache.cpu(), on_cpu.cache)
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result.cpu(), wanted)
        num_accepted += int((expected[2] - 1).sum())
    assert num_accepted > 20


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_device():
    step = Step("cuda")
    step.fill(0)
    step.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_on_the_cpu_is_its_parts():
    """The same step with the references, so that the GPU test has a sound oracle."""
    step = Step("cpu")
    step.fill(1)
    path, sampled, num_sampled = step.run()[:3]
    tokens, _ = top_k_reference(step.draft_logits, 1)
    first = tokens.view(NUM_REQS, DEPTH)[:, 0]
    assert torch.equal(sampled[:, 0], first)
    assert (num_sampled > 1).all()
    assert (path[:, 0] > 0).all()
