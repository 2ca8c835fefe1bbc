"""Equations 6 and 9 by simulation: Bernoulli agents, whose true success rates are known."""

from functools import partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hacrl_jax import hacpo
from hacrl_jax.config import ObjectiveConfig

WINDOW, PROMPTS, SAMPLES, TRIALS = 5, 32, 8, 400
SKILLS = [(0.8, 0.4), (0.3, 0.5, 0.85), (0.3, 0.45, 0.6, 0.75, 0.9)]
FREE = ObjectiveConfig(binary_guard=False, uniform_guard=False)


def baselines(skills, settings, *, seed=0, trials=TRIALS, samples=SAMPLES):
    """Each learner's mean baseline in independent windows of WINDOW steps, the last being the current: [trials, n]."""
    n, rng = len(skills), np.random.default_rng(seed)
    shape = (trials, WINDOW, n, PROMPTS, samples)
    reward = (rng.random(shape) < np.reshape(skills, (n, 1, 1))).astype(np.float32)
    prompt = jnp.tile(jnp.repeat(jnp.arange(PROMPTS), samples), n)
    source = jnp.repeat(jnp.arange(n), PROMPTS * samples)

    @jax.jit
    @partial(jax.vmap, in_axes=(0, 0))
    def one(history, current):  # [WINDOW, n], [n * PROMPTS * samples]
        ratio = hacpo.capability_ratio(hacpo.capability(history, WINDOW))
        everyone = jnp.ones(current.shape, bool)
        arguments = current, prompt, source, everyone
        return jnp.stack([hacpo.advantage(*arguments, k, ratio[k], settings)[1].mean() for k in range(n)])

    return np.asarray(one(reward.mean(axis=(-2, -1)), reward[:, -1].reshape(trials, -1)), np.float64)


def deviation(found, skills):
    """How many standard errors the mean baselines are from the true success rates: [n]."""
    return (found.mean(0) - skills) / (found.std(0, ddof=1) / np.sqrt(len(found)))


@pytest.mark.parametrize("skills", SKILLS)
def test_the_capability_aware_baseline_is_the_learners_own_success_rate(skills):
    assert np.abs(deviation(baselines(skills, FREE), skills)).max() < 3


@pytest.mark.parametrize("skills", SKILLS)
def test_the_plain_group_mean_is_not(skills):
    plain = FREE.model_copy(update={"capability_baseline": False})
    found = np.abs(deviation(baselines(skills, plain), skills))
    off = np.abs(np.mean(skills) - skills) > 0.02  # a learner of average skill is met by chance
    assert off.sum() >= 2 and found[off].min() > 10


def test_guards_pull_a_strong_learners_baseline_down():
    """The bias that docs/objective.md reports for 0.8 against 0.4: above 1 the own mean, smaller, takes its place.

    Once exactly, with known capabilities, over all outcomes of two groups of 8; once by simulation with the window's.
    """
    right = np.arange(9)
    own, other = np.repeat(right, 9), np.tile(right, 9)  # 81 groups: correct answers of each agent
    samples = np.arange(8)
    reward = np.concatenate([(samples < own[:, None]).ravel(), (samples < other[:, None]).ravel()]).astype(np.float32)
    prompt = jnp.asarray(np.tile(np.repeat(np.arange(81), 8), 2))
    source = jnp.repeat(jnp.arange(2), 81 * 8)
    arguments = jnp.asarray(reward), prompt, source, jnp.ones(2 * 81 * 8, bool), 0, jnp.asarray([1.0, 0.5])
    baseline = np.asarray(hacpo.advantage(*arguments, ObjectiveConfig())[1])[: 81 * 8 : 8]

    def probability(k, p):
        return np.array([comb(8, int(x)) for x in k]) * p**k * (1 - p) ** (8 - k)

    expected = (probability(own, 0.8) * probability(other, 0.4) * baseline).sum()
    assert expected == pytest.approx(0.7722, abs=1e-4)
    found = baselines((0.8, 0.4), ObjectiveConfig()).mean(0)
    assert found[0] == pytest.approx(0.7675, abs=0.005)
