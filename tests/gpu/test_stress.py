# SPDX-License-Identifier: Apache-2.0
"""The same greedy batches over and over: what goes wrong rarely goes wrong here.

See docs/known_issues.md.
"""

from pathlib import Path

import pytest
from engines import ddtree, generate, token_ids
from prompts import random_prompts
from test_tokens import EAGER, plain_outputs, staggered, with_graphs
from ties import MAX_GAP, find_divergences

pytestmark = pytest.mark.gpu

NUM_BATCHES = 250
BUDGET = 63


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_no_batch_has_a_wrong_token(
    mode: str, tiny_pairs: dict[str, tuple[Path, Path]]
) -> None:
    target, draft = tiny_pairs["tiny-qwen3"]
    prompts = random_prompts(target, 8)
    plain = plain_outputs(target, prompts)
    options = EAGER if mode == "eager" else with_graphs(BUDGET)
    config = ddtree(target, draft, BUDGET, options=options)
    wrong = []
    for batch in range(NUM_BATCHES):
        size = 1 + batch % 8
        found = token_ids(generate(config, prompts[:size], staggered(size)))
        for divergence in find_divergences(plain[:size], found):
            if divergence.gap > MAX_GAP:
                # Whether the tokens after it agree again tells a wrong step from a
                # wrong copy to the host.
                tokens = plain[divergence.prompt].outputs[0].token_ids
                rest = slice(divergence.position, None)
                wrong.append(
                    f"batch {batch} of {size}: {divergence}, plain decoding "
                    f"{list(tokens)[rest]}, found {found[divergence.prompt][rest]}"
                )
    assert not wrong, "\n".join(wrong)
