# SPDX-License-Identifier: Apache-2.0
"""How many nodes a tree should have, from what steps cost and what they bring.

Nothing here knows how costs were measured; everything is plain numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CostTable = Mapping[int, Mapping[int, float]]
"""Batch size -> budget -> seconds per step."""


def tokens_per_step(
    paths: Iterable[Sequence[int]], budgets: Iterable[int]
) -> dict[int, float]:
    """Mean tokens that a step would bring with each budget, the bonus included.

    Best-first trees are nested: the tree of n nodes is the first n nodes of a larger
    one, so a path accepted in the larger one is accepted as far as its rows do not
    exceed n.

    Args:
        paths: accepted rows of each step at the largest budget, as in `TreeTrace`.
        budgets: none above the largest.

    Raises:
        ValueError: there is no step.

    """
    steps = [list(path) for path in paths]
    if not steps:
        raise ValueError("No step was recorded, so nothing is known of acceptance.")
    return {
        budget: 1 + sum(row <= budget for path in steps for row in path) / len(steps)
        for budget in budgets
    }


def interpolate_costs(costs: CostTable, batch_size: int) -> dict[int, float]:
    """Seconds per step of each budget at a batch size between measured ones.

    Only budgets that were measured on both sides; linear in between, and the nearest
    measured batch size outside of the measured range.
    """
    sizes = sorted(costs)
    below = max((n for n in sizes if n <= batch_size), default=sizes[0])
    above = min((n for n in sizes if n >= batch_size), default=sizes[-1])
    if below == above:
        return dict(costs[below])
    share = (batch_size - below) / (above - below)
    return {
        budget: (1 - share) * cost + share * costs[above][budget]
        for budget, cost in costs[below].items()
        if budget in costs[above]
    }


def best_budget(costs: Mapping[int, float], tokens: Mapping[int, float]) -> int:
    """The budget that brings most tokens per second; the smaller one of equals."""
    return max(costs, key=lambda budget: (tokens[budget] / costs[budget], -budget))


def choose_schedule(
    costs: CostTable, tokens: Mapping[int, float], max_batch_size: int
) -> list[tuple[int, int, int]]:
    """`num_speculative_tokens_per_batch_size` with the best budget at every size.

    Sizes above the largest measured one get its budget.
    """
    schedule: list[tuple[int, int, int]] = []
    for batch_size in range(1, max_batch_size + 1):
        budget = best_budget(interpolate_costs(costs, batch_size), tokens)
        if schedule and schedule[-1][2] == budget:
            schedule[-1] = (schedule[-1][0], batch_size, budget)
        else:
            schedule.append((batch_size, batch_size, budget))
    return schedule


@dataclass(frozen=True)
class Chain:
    """The yardstick: stock DFlash on the same machine and prompts."""

    tokens_per_step: float
    # Batch size -> seconds per step.
    costs: Mapping[int, float]

    def tokens_per_second(self, batch_size: int) -> float:
        """Of one request."""
        return self.tokens_per_step / self.costs[batch_size]


def gains_over_chain(
    costs: CostTable, tokens: Mapping[int, float], chain: Chain
) -> dict[int, dict[int, float]]:
    """Batch size -> budget -> tokens per second over the chain's."""
    return {
        batch_size: {
            budget: tokens[budget] / cost / chain.tokens_per_second(batch_size)
            for budget, cost in row.items()
        }
        for batch_size, row in costs.items()
    }


def choose_budget(gains: Mapping[int, Mapping[int, float]]) -> int | None:
    """One budget for all measured batch sizes, or None where the chain is better.

    Of the budgets that are nowhere slower than the chain, the one with the largest
    geometric mean of its gains; the smaller one of equals.
    """
    everywhere = set.intersection(*(set(row) for row in gains.values()))
    candidates = {
        budget: math.prod(row[budget] for row in gains.values())
        for budget in everywhere
        if all(row[budget] >= 1 for row in gains.values())
    }
    if not candidates:
        return None
    return max(candidates, key=lambda budget: (candidates[budget], -budget))


def slower_than_chain(gains: Mapping[int, Mapping[int, float]]) -> list[int]:
    """Measured batch sizes at which even the best budget loses to the chain."""
    return [size for size, row in sorted(gains.items()) if max(row.values()) < 1]
