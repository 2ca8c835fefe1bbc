"""Estimators against enumeration and closed forms."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl_jax import measures
from hacrl_jax.types import UserError

SMALL = {"max_examples": 40, "deadline": None}


def rows(values, samples):
    return np.array(values).reshape(-1, samples)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
@settings(**SMALL)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(row, data):
    k = data.draw(st.integers(1, len(row)))
    subsets = list(itertools.combinations(row, k))
    expected = np.mean([any(subset) for subset in subsets])
    np.testing.assert_allclose(measures.pass_at_k(rows(row, len(row)), k), [expected], atol=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=7), st.data())
@settings(**SMALL)
def test_best_at_k_is_the_mean_best_of_all_subsets(row, data):
    k = data.draw(st.integers(1, len(row)))
    expected = np.mean([max(subset) for subset in itertools.combinations(row, k)])
    np.testing.assert_allclose(measures.best_at_k(rows(row, len(row)), k), [expected], atol=1e-9)


def test_pass_is_best_for_zeros_and_ones_and_avg_is_pass_at_one():
    correct = np.random.default_rng(0).random((20, 6)) < 0.3
    for k in range(1, 7):
        np.testing.assert_allclose(measures.pass_at_k(correct, k), measures.best_at_k(correct, k), atol=1e-12)
    np.testing.assert_allclose(measures.pass_at_k(correct, 1), measures.avg_at_k(correct), atol=1e-12)


def test_pass_at_k_with_many_samples_neither_overflows_nor_leaves_the_unit_interval():
    correct = np.zeros((2, 2000), bool)
    correct[1, :1000] = True
    assert list(measures.pass_at_k(correct, 1000)) == [0.0, 1.0 - 1 / math.comb(2000, 1000)]


@pytest.mark.parametrize(
    ("label", "correct", "k", "expected"),
    [
        ([1, 1, 0], [0, 0, 1], 3, 0.0),
        ([0, 1, 0], [1, 0, 1], 3, 1.0),
        ([0, 1], [1, 0], 2, 0.5),  # a tie
        ([0, 1, 2, 0], [1, 0, 0, 1], 2, 0.5),  # two runs with a tie each
        ([-1, -1, 0], [0, 0, 1], 3, 1.0),  # no answer has no vote
        ([-1, -1], [0, 0], 2, 0.0),
        ([0, 1, 1], [1, 0, 0], 1, 1 / 3),  # maj@1 is avg
    ],
)
def test_majority(label, correct, k, expected):
    np.testing.assert_allclose(measures.maj_at_k(rows(label, len(label)), rows(correct, len(label)), k), [expected])


def test_vote_labels_join_spellings_of_one_wrong_answer():
    labels = measures.vote_labels([r"\frac12", r"\dfrac{1}{2}", None, "3", "x=3", r"\frac{1}{3}"], [0, 0, 0, 1, 1, 0])
    assert list(labels) == [1, 1, -1, 0, 0, 2]


def test_k_outside_the_samples_is_a_user_error():
    for function in (measures.pass_at_k, measures.best_at_k):
        for k in (0, 5):
            with pytest.raises(UserError, match="samples per problem"):
                function(np.ones((2, 4)), k)


def test_interval_covers_the_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        low, high = measures.interval(generator.random(60) < 0.4, draws=500, seed=trial)
        covered += low <= 0.4 <= high
    assert 0.88 <= covered / 200 <= 0.99
    assert measures.interval(np.ones(9)) == (1.0, 1.0)
    assert measures.interval(np.arange(9.0), seed=3) == measures.interval(np.arange(9.0), seed=3)


def mcnemar(wins, losses):
    n = wins + losses
    tail = sum(math.comb(n, i) for i in range(max(wins, losses), n + 1)) / 2**n
    return min(1.0, 2 * tail - (math.comb(n, n // 2) / 2**n if wins == losses else 0))


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 0), (6, 2), (4, 4), (9, 3)])
def test_paired_comparison_is_the_exact_mcnemar_test_for_single_samples(wins, losses):
    a = np.array([0] * wins + [1] * losses + [1, 0, 1])
    b = np.array([1] * wins + [0] * losses + [1, 0, 1])
    found = measures.compare(a, b)
    assert (found.wins, found.losses, found.ties) == (wins, losses, 3)
    assert found.difference == pytest.approx((wins - losses) / len(a))
    assert found.low <= found.difference <= found.high
    assert found.p_value == pytest.approx(mcnemar(wins, losses) if wins + losses else 1.0)


def test_paired_comparison_by_draws_agrees_with_the_exact_one():
    wins, losses = 30, 14
    a, b = np.array([0] * wins + [1] * losses), np.array([1] * wins + [0] * losses)
    assert measures.compare(a, b).p_value == pytest.approx(mcnemar(wins, losses), abs=0.006)
    assert measures.compare(a, b).p_value == measures.compare(b, a).p_value


def test_paired_comparison_needs_the_same_problems():
    with pytest.raises(UserError, match="same problems"):
        measures.compare(np.zeros(3), np.zeros(4))


def test_team_measures_against_enumeration():
    correct = np.random.default_rng(2).random((3, 8, 4)) < 0.3
    for k in (1, 2, 4):
        expected = []
        for problem in range(8):
            picks = [list(itertools.combinations(correct[agent, problem], k)) for agent in range(3)]
            expected.append(np.mean([any(map(any, choice)) for choice in itertools.product(*picks)]))
        np.testing.assert_allclose(measures.team_pass_at_k(correct, k), expected, atol=1e-12)
    solved = correct.any(axis=2)
    alone = [np.mean([solved[a, p] and solved[:, p].sum() == 1 for p in range(8)]) for a in range(3)]
    np.testing.assert_allclose(measures.solved_alone(correct), alone)


def test_team_majority_pools_the_votes():
    label = np.array([[[0, 1]], [[0, 2]], [[1, 1]]])  # one problem, three agents
    correct = label == 0
    assert measures.team_maj_at_k(label, correct, 1) == [1.0]  # 0, 0, 1
    assert measures.team_maj_at_k(label, correct, 2) == [0.0]  # 0, 1, 0, 2, 1, 1
