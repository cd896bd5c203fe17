# SPDX-License-Identifier: Apache-2.0
"""The tokens on the way to every row."""

from cases import property_of
from histories import MAX_DEPTH, NUM_REQS, draw_batch
from hypothesis import strategies as st

from vllm_ddtree.ops.path_tokens import gather_path_tokens
from vllm_ddtree.ops.reference import path_tokens as reference


@property_of(NUM_REQS, vocab_size=st.integers(2, 200))
def test_path_tokens_equal_a_climb_from_every_row(device, rng, vocab_size):
    batch = draw_batch(rng, vocab_size, device, max_budget=int(rng.choice([8, 100])))
    extra_depth = int(rng.integers(0, 2))
    args = (batch.tree, batch.slots, batch.cu_num_logits, batch.num_logits)
    args += (MAX_DEPTH + extra_depth,)
    results = (
        gather_path_tokens(*args, use_kernel=True),
        reference.gather_path_tokens(*args),
    )
    paths = batch.paths()
    for path_tokens, row_depths in results:
        width = path_tokens.shape[1]
        assert width == MAX_DEPTH + extra_depth
        assert row_depths.tolist() == [len(path) for path in paths]
        padded = [path + [-1] * (width - len(path)) for path in paths]
        assert path_tokens.tolist() == padded
