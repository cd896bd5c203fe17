# SPDX-License-Identifier: Apache-2.0
"""The lossless walk draws from the target's law; biased rules are found out."""

import copy

import numpy as np
import pytest
from enumerable import (
    LENGTH,
    NUMBER,
    PREFIXES,
    SHAPES,
    TEXTS,
    VOCAB,
    EnumerableModel,
    Requests,
    Trees,
    sample_rows,
    typical_law,
    walk,
    write,
)
from scipy import stats

NUM_SAMPLES = 200_000
P_VALUE = 0.001


def p_value(requests: Requests, law: np.ndarray) -> float:
    """Of the chi-square test; texts expected fewer than 5 times are one cell."""
    number = requests.texts @ VOCAB ** np.arange(LENGTH)[::-1]
    counts = np.bincount(number, minlength=len(TEXTS)).astype(float)
    expected = law * len(number)
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum())[1])


def seeds_of(run: int) -> np.ndarray:
    """Seeds as users and vLLM choose them: small ones, and any 64 bits."""
    small = np.arange(NUM_SAMPLES // 2) + run * NUM_SAMPLES
    rng = np.random.default_rng(run)
    large = rng.integers(-(2**63), 2**63, size=NUM_SAMPLES // 2)
    return np.concatenate([small, large])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "temperature", [0.6, 1.0, pytest.param(1.7, marks=pytest.mark.full)]
)
def test_walk_draws_from_the_law(temperature: float, shape: str) -> None:
    model = EnumerableModel(seed=3, temperature=temperature)
    requests = write(model, model.trees(shape), seeds_of(0))
    assert p_value(requests, model.law()) > P_VALUE
    assert (requests.num_accepted > 0) == (shape != "bare_root")


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_mixed_batch_draws_from_the_law_and_shape_does_not_matter(
    temperature: float,
) -> None:
    """Trees, chains and bare roots share a batch; contexts choose the shape."""
    model = EnumerableModel(seed=4, temperature=temperature)
    shapes = [model.trees(shape) for shape in SHAPES]
    mixed = mix(shapes, np.arange(len(PREFIXES)) % len(shapes))
    seeds = seeds_of(1)
    requests = write(model, mixed, seeds)
    assert p_value(requests, model.law()) > P_VALUE
    # The same seeds write the same texts, whatever was drafted.
    for trees in shapes:
        few = write(model, trees, seeds[:5000])
        assert np.array_equal(few.texts, requests.texts[:5000])


def mix(shapes: list[Trees], choice: np.ndarray) -> Trees:
    """For each context the tree of one of the shapes."""
    mixed = copy.deepcopy(shapes[0])
    for shape, trees in enumerate(shapes[1:], start=1):
        chosen = choice == shape
        for name in ("tokens", "parents", "depths", "scores", "num_nodes", "ancestors"):
            getattr(mixed.tree, name)[chosen] = getattr(trees.tree, name)[chosen]
        for name in ("row_context", "row_depth", "num_rows"):
            getattr(mixed, name)[chosen] = getattr(trees, name)[chosen]
    return mixed


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_acceptance_is_the_targets_mass_of_the_tree(temperature: float) -> None:
    """No lossless rule accepts more of a tree fixed before sampling."""
    model = EnumerableModel(seed=5, temperature=temperature)
    trees = model.trees("tree")
    parents = trees.tree.parents[0].tolist()
    mass = [1.0]
    for node, token in enumerate(trees.tree.tokens[0].tolist()):
        context = trees.row_context[0, parents[node]]
        mass.append(mass[parents[node]] * model.probs[context, token])
    seeds = seeds_of(2)
    width = trees.row_context.shape[1]
    context = np.zeros(len(seeds), dtype=np.int64)
    tokens = sample_first_step(model, trees, seeds)
    _, count = walk(trees, context, tokens.reshape(-1, width))
    accepted = count - 1
    error = accepted.std() / np.sqrt(len(seeds))
    assert abs(accepted.mean() - sum(mass[1:])) < 4 * error


def sample_first_step(
    model: EnumerableModel, trees: Trees, seeds: np.ndarray
) -> np.ndarray:
    width = trees.row_context.shape[1]
    rows = np.broadcast_to(
        model.logits[trees.row_context[0]], (len(seeds), width, VOCAB)
    )
    pos = np.tile(trees.row_depth[0], len(seeds))
    return sample_rows(
        rows.reshape(-1, VOCAB), np.repeat(seeds, width), pos, model.temperature
    )


def test_typical_acceptance_grows_as_epsilon_falls_and_is_lossy() -> None:
    """The figures of docs/sampling.md, over 20 models."""
    models = [EnumerableModel(seed, temperature=1.0) for seed in range(20)]
    accepted, distance = [], []
    for epsilon in (0.3, 0.09, 0.03, 0.01):
        runs = [typical_law(m, m.trees("tree"), epsilon, 0.3) for m in models]
        assert all(run.law.sum() == pytest.approx(1) for run in runs)
        accepted.append(np.mean([run.num_accepted for run in runs]))
        distance.append(
            np.mean(
                [
                    np.abs(run.law - model.law()).sum() / 2
                    for run, model in zip(runs, models, strict=True)
                ]
            )
        )
    assert accepted == sorted(accepted)
    assert accepted[-1] > accepted[0]
    assert min(distance) > 0.3


# Tests of the test: rules that are not lossless.


def test_ratio_test_on_top_children_is_found_out() -> None:
    """Accept a child with min(1, p / q), though it is no draw from q."""
    model = EnumerableModel(seed=3, temperature=1.0)
    requests = write_by_ratio_test(model, model.trees("tree"), seeds_of(0)[:20_000])
    assert p_value(requests, model.law()) < 1e-12


def test_one_noise_vector_for_two_depths_is_found_out() -> None:
    model = EnumerableModel(seed=3, temperature=1.0)
    trees = model.trees("tree")
    requests = write(
        model, trees, seeds_of(0), pos_of_depth=lambda depth: np.minimum(depth, 0)
    )
    assert p_value(requests, model.law()) < 1e-12


def write_by_ratio_test(
    model: EnumerableModel, trees: Trees, seeds: np.ndarray
) -> Requests:
    rng = np.random.default_rng(0)
    draft_law = model.draft_law()
    requests = Requests.start(seeds)
    for req in range(len(seeds)):
        text: list[int] = []
        while len(text) < LENGTH:
            context = NUMBER[tuple(text)]
            text += _ratio_step(model, trees, context, draft_law[context], rng)
        requests.texts[req] = text[:LENGTH]
    return requests


def _ratio_step(model, trees, context, draft_law, rng) -> list[int]:
    tree, row, emitted = trees.tree, 0, []
    while True:
        p = model.probs[trees.row_context[context, row]]
        nodes = range(trees.num_rows[context] - 1)
        children = [n for n in nodes if int(tree.parents[context, n]) == row]
        rest = p.copy()
        for node in children:
            token = int(tree.tokens[context, node])
            q = draft_law[trees.row_depth[context, row], token]
            if rng.random() < min(1.0, p[token] / q):
                emitted.append(token)
                row = node + 1
                break
            rest[token] = max(p[token] - q, 0.0)
        else:
            return [*emitted, int(rng.choice(VOCAB, p=rest / rest.sum()))]
