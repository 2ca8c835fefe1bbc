"""Measures of evaluation: pure functions on arrays of graded answers, problems first.

P problems, S samples of each, n agents. ``correct`` is 0 or 1 (or a score in [0, 1]) in float or bool, [P, S]. A
``*_at_k`` returns one value per problem [P]; its mean is the benchmark's figure, and ``interval`` its uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hacrl_jax.tasks.normal import normalize, squeezed
from hacrl_jax.types import UserError

EXACT_FLIPS = 16  # differing problems up to which the sign-flip test enumerates all signs
DRAWS = 10_000


def avg_at_k(correct: np.ndarray) -> np.ndarray:
    """Mean over all samples: the expected accuracy of one sample. [P, S] -> [P]."""
    return np.asarray(correct, np.float64).mean(axis=1)


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Probability that at least one of k samples is correct, unbiased: 1 - C(S - c, k) / C(S, k). [P, S] -> [P].

    Chen et al., arXiv 2107.03374, equation 1. Raises UserError for k outside 1..S.
    """
    correct = np.asarray(correct, bool)
    samples = _samples(correct, k)
    total = math.comb(samples, k)
    return np.array([1.0 - math.comb(samples - int(c), k) / total for c in correct.sum(axis=1)])


def best_at_k(score: np.ndarray, k: int) -> np.ndarray:
    """Expected best score of k samples drawn without replacement; pass@k for scores of 0 and 1. [P, S] -> [P].

    The i-th smallest of S scores is the best of C(i - 1, k - 1) of the C(S, k) subsets. Raises UserError as pass_at_k.
    """
    ordered = np.sort(np.asarray(score, np.float64), axis=1)
    samples = _samples(ordered, k)
    weight = np.array([math.comb(i, k - 1) / math.comb(samples, k) for i in range(samples)])  # [S]
    return ordered @ weight


def maj_at_k(label: np.ndarray, correct: np.ndarray, k: int) -> np.ndarray:
    """Is the most frequent answer of k samples correct? Mean over the S // k disjoint runs of k samples. -> [P].

    label [P, S] int: equal answers share a label within a problem, negative is no answer and has no vote
    (``vote_labels``). Tied answers count by the share of them that is correct. Raises UserError as pass_at_k.
    """
    label, correct = np.asarray(label), np.asarray(correct, bool)
    samples = _samples(label, k)
    runs = [slice(start, start + k) for start in range(0, samples - k + 1, k)]
    return np.array(
        [np.mean([_majority(row[run], right[run]) for run in runs]) for row, right in zip(label, correct, strict=True)]
    )


def _majority(label: np.ndarray, correct: np.ndarray) -> float:
    answers, votes = np.unique(label[label >= 0], return_counts=True)
    if not len(answers):
        return 0.0
    leading = answers[votes == votes.max()]
    return float(np.mean([correct[label == answer].any() for answer in leading]))


def vote_labels(answers: Sequence[str | None], correct: Sequence[bool]) -> np.ndarray:
    """Labels of one problem's answers for maj_at_k: correct ones are 0, wrong ones by normalized text. -> [S].

    None is no answer: -1.
    """
    known: dict[str, int] = {}
    labels = []
    for answer, right in zip(answers, correct, strict=True):
        if answer is None:
            labels.append(-1)
        else:
            labels.append(0 if right else known.setdefault(squeezed(normalize(answer)), len(known) + 1))
    return np.array(labels, np.int64)


def _samples(values: np.ndarray, k: int) -> int:
    if not 1 <= k <= values.shape[1]:
        raise UserError(f"eval: k = {k} needs at least {max(k, 1)} samples per problem, there are {values.shape[1]}")
    return values.shape[1]


# ---- uncertainty and comparison


def interval(values: np.ndarray, *, confidence: float = 0.95, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of values [P], resampling problems with all their samples."""
    return average_interval([values], confidence=confidence, draws=draws, seed=seed)


def average_interval(
    benchmarks: Sequence[np.ndarray], *, confidence: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """The same for the mean over benchmarks of their means; each is resampled within itself. A list of values [P]."""
    generator = np.random.default_rng(seed)
    total = np.zeros(draws)
    for values in benchmarks:
        values = np.asarray(values, np.float64)
        for start in range(0, draws, 500):  # [500, P] at a time
            size = (min(500, draws - start), len(values))
            total[start : start + size[0]] += values[generator.integers(0, len(values), size)].mean(axis=1)
    low, high = np.quantile(total / len(benchmarks), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints on the same problems, b against a."""

    difference: float  # mean of b - a
    low: float  # bootstrap interval of the difference
    high: float
    wins: int  # problems on which b is better
    losses: int
    ties: int
    p_value: float  # two-sided, under exchangeable signs of the differences


def compare(a: np.ndarray, b: np.ndarray, *, confidence: float = 0.95, seed: int = 0) -> Comparison:
    """Paired comparison of per-problem values a, b [P] by a sign-flip permutation test.

    For 0/1 values of one sample the exact test is McNemar's. Exact up to 16 differing problems, else from 10,000 draws.
    Raises UserError when the two do not have the same problems.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise UserError(f"eval: a paired comparison needs the same problems, got {len(a)} and {len(b)}")
    change = b - a
    low, high = interval(change, confidence=confidence, seed=seed)
    return Comparison(
        difference=float(change.mean()), low=low, high=high, wins=int((change > 0).sum()),
        losses=int((change < 0).sum()), ties=int((change == 0).sum()), p_value=_sign_flip(change, seed),
    )  # fmt: skip


def _sign_flip(change: np.ndarray, seed: int) -> float:
    """Share of the sign assignments whose |sum| is at least the observed one."""
    change = change[change != 0]
    if not len(change):
        return 1.0
    observed = abs(change.sum()) - 1e-12
    if len(change) <= EXACT_FLIPS:
        signs = 1.0 - 2.0 * ((np.arange(2 ** len(change))[:, None] >> np.arange(len(change))) & 1)
        return float((np.abs(signs @ change) >= observed).mean())
    generator = np.random.default_rng(seed)
    extreme = 0
    for _ in range(DRAWS // 500):
        signs = generator.choice((-1.0, 1.0), (500, len(change)))
        extreme += int((np.abs(signs @ change) >= observed).sum())
    return (extreme + 1) / (DRAWS + 1)  # the observed assignment is one of them: never 0


# ---- several agents on the same problems: correct [n, P, S]


def team_pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Probability that at least one of n * k samples, k of each agent, is correct. [n, P, S] -> [P]."""
    return 1.0 - np.prod([1.0 - pass_at_k(each, k) for each in np.asarray(correct)], axis=0)


def team_maj_at_k(label: np.ndarray, correct: np.ndarray, k: int) -> np.ndarray:
    """Is the most frequent answer among n * k samples, the first k of each agent, correct? [n, P, S] -> [P].

    Labels must agree between agents: label the answers of all agents to a problem together.
    """
    label, correct = np.asarray(label), np.asarray(correct, bool)
    _samples(label[0], k)
    pooled = [np.concatenate(list(array[:, :, :k]), axis=1) for array in (label, correct)]  # [P, n * k]
    return np.array([_majority(row, right) for row, right in zip(*pooled, strict=True)])


def solved_alone(correct: np.ndarray) -> np.ndarray:
    """Share of the problems that only this agent solved in any of its samples. [n, P, S] -> [n]."""
    solved = np.asarray(correct, bool).any(axis=2)  # [n, P]
    return (solved & (solved.sum(axis=0) == 1)).mean(axis=1)
