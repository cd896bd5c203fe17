# SPDX-License-Identifier: Apache-2.0
"""The choice of budgets is the exhaustive one."""

import math
import random

import pytest

from vllm_ddtree.budget import (
    Chain,
    best_budget,
    choose_budget,
    choose_schedule,
    gains_over_chain,
    interpolate_costs,
    slower_than_chain,
    tokens_per_step,
)

BUDGETS = (7, 15, 31, 63, 127)
BATCH_SIZES = (1, 2, 4, 8, 16)


def draw_table(rng: random.Random) -> dict[int, dict[int, float]]:
    """Seconds per step that grow with the batch size and with the budget."""
    costs: dict[int, dict[int, float]] = {}
    previous = dict.fromkeys(BUDGETS, 0.0)
    for batch_size in BATCH_SIZES:
        floor = rng.uniform(0.001, 0.01)
        row = {}
        for budget in BUDGETS:
            floor = max(floor, previous[budget]) + rng.choice([0.0, rng.random() / 100])
            row[budget] = floor
        costs[batch_size] = previous = row
    return costs


def draw_tokens(rng: random.Random) -> dict[int, float]:
    tokens, length = {}, 1.0
    for budget in BUDGETS:
        length += rng.choice([0.0, rng.random() * 2])
        tokens[budget] = length
    return tokens


def test_schedules_of_random_tables_are_the_exhaustive_maximum():
    rng = random.Random(0)
    for _ in range(1000):
        costs, tokens = draw_table(rng), draw_tokens(rng)
        schedule = choose_schedule(costs, tokens, max_batch_size=20)
        assert [first for first, _, _ in schedule] == [1] + [
            last + 1 for _, last, _ in schedule[:-1]
        ]
        assert schedule[-1][1] == 20
        for first, last, budget in schedule:
            for size in range(first, last + 1):
                below = max(n for n in BATCH_SIZES if n <= size)
                above = min((n for n in BATCH_SIZES if n >= size), default=below)
                share = (size - below) / (above - below) if above > below else 0.0
                rates = [
                    tokens[b]
                    / ((1 - share) * costs[below][b] + share * costs[above][b])
                    for b in BUDGETS
                ]
                assert rates[BUDGETS.index(budget)] == pytest.approx(
                    max(rates), rel=1e-12
                )


def test_one_budget_of_random_tables_is_the_exhaustive_maximum():
    rng = random.Random(1)
    num_chosen = 0
    for _ in range(1000):
        costs, tokens = draw_table(rng), draw_tokens(rng)
        chain = Chain(
            rng.uniform(1, tokens[15]), {n: costs[n][15] for n in BATCH_SIZES}
        )
        gains = gains_over_chain(costs, tokens, chain)
        rates = {
            budget: [
                tokens[budget] / costs[n][budget] / (chain.tokens_per_step / c)
                for n, c in chain.costs.items()
            ]
            for budget in BUDGETS
        }
        never_slower = [b for b, row in rates.items() if min(row) >= 1]
        chosen = choose_budget(gains)
        if chosen is None:
            assert not never_slower
            continue
        num_chosen += 1
        assert chosen in never_slower
        best = max(math.prod(rates[b]) for b in never_slower)
        assert math.prod(rates[chosen]) == pytest.approx(best, rel=1e-12)
    assert num_chosen > 100


def test_equal_rates_take_the_smaller_budget():
    assert best_budget({31: 1.0, 15: 1.0, 63: 1.0}, {15: 2.0, 31: 2.0, 63: 1.9}) == 15
    gains = {1: {15: 1.5, 31: 1.5}, 2: {15: 1.5, 31: 1.5}}
    assert choose_budget(gains) == 15


def test_budgets_that_were_not_measured_everywhere():
    costs = {1: {15: 1.0, 255: 1.1}, 4: {15: 2.0}}
    assert interpolate_costs(costs, 2) == {15: pytest.approx(4 / 3)}
    tokens = {15: 3.0, 255: 9.0}
    assert choose_schedule(costs, tokens, 4) == [(1, 1, 255), (2, 4, 15)]
    chain = Chain(3.0, {1: 1.0, 4: 2.0})
    assert choose_budget(gains_over_chain(costs, tokens, chain)) == 15


def test_the_chain_can_win():
    costs = {1: {15: 1.0, 63: 1.1}, 8: {15: 2.0, 63: 4.0}}
    tokens = {15: 4.0, 63: 5.0}
    chain = Chain(4.1, {1: 1.0, 8: 1.9})
    gains = gains_over_chain(costs, tokens, chain)
    assert slower_than_chain(gains) == [8]
    assert choose_budget(gains) is None


def test_tokens_of_smaller_budgets_are_read_from_the_largest():
    paths = [[1, 2, 9], [], [4], [1, 70]]
    assert tokens_per_step(paths, [1, 3, 8, 63, 127]) == {
        1: 1.5,
        3: 1.75,
        8: 2.0,
        63: 2.25,
        127: 2.5,
    }
    with pytest.raises(ValueError, match="No step"):
        tokens_per_step([], [1])
