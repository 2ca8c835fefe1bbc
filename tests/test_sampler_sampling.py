"""Draws: their distribution, filters, masked ids, keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from hacrl_jax.sampler.sampling import distribution, draw, gaps, sampling
from hacrl_jax.types import UserError

DRAW = jax.jit(draw, static_argnums=3)


def keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


@pytest.mark.parametrize("width, vocab, temperature", [(40, 37, 1.0), (300, 300, 0.7), (1000, 777, 1.6)])
def test_frequencies_match_the_softmax(width, vocab, temperature):
    logits = 2 * np.random.default_rng(3).normal(size=width).astype(np.float32)
    token, _ = DRAW(jnp.tile(logits, (10_000, 1)), keys(10_000), sampling(temperature), vocab)
    expected = np.exp(logits[:vocab].astype(np.float64) / temperature)
    expected *= 10_000 / expected.sum()
    counts = np.bincount(token, minlength=width)
    assert counts[vocab:].sum() == 0
    common = expected > 5
    observed, expected = (np.append(x[:vocab][common], x[:vocab][~common].sum()) for x in (counts, expected))
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_ids_past_the_tokenizer_never_appear():
    logits = jnp.zeros((4096, 200)).at[:, 150:].set(50.0)
    for settings in (sampling(1.0), sampling(0.0), sampling(1.0, top_p=0.9, top_k=20, min_p=0.01)):
        token, logprob = DRAW(logits, keys(4096), settings, 150)
        assert token.max() < 150 and jnp.isfinite(logprob).all()


def test_log_probs_are_those_of_the_distribution_drawn_from():
    logits = 3 * jax.random.normal(jax.random.key(1), (64, 500))
    token, logprob = DRAW(logits, keys(64), sampling(0.8), 490)
    whole = jax.nn.log_softmax(logits[:, :490] / 0.8, axis=-1)
    np.testing.assert_allclose(logprob, whole[np.arange(64), token], atol=1e-5)
    settings = sampling(0.8, top_k=7, top_p=0.9, min_p=0.05)
    token, logprob = DRAW(logits, keys(64), settings, 490)
    kept = distribution(logits, settings, 490).reshape(64, -1)
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(kept, axis=-1)[np.arange(64), token], atol=1e-5)


def test_greedy_takes_the_first_of_the_largest():
    logits = jax.random.normal(jax.random.key(2), (32, 300)).round(1)
    token, logprob = DRAW(logits, keys(32), sampling(0.0), 280)
    np.testing.assert_array_equal(token, np.asarray(logits)[:, :280].argmax(-1))
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(logits[:, :280])[np.arange(32), token], atol=1e-5)


@pytest.mark.parametrize("top_k, top_p, min_p", [(1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.1),
                                                 (20, 0.7, 0.03), (0, 1e-6, 0.0), (10_000, 1.0, 0.0)])  # fmt: skip
def test_filters_keep_what_a_sort_keeps(top_k, top_p, min_p):
    logits = np.random.default_rng(5).normal(size=(16, 300)).astype(np.float32) * 2
    scores = distribution(jnp.asarray(logits), sampling(0.9, top_p, top_k, min_p), 290)
    kept = np.isfinite(np.asarray(scores).reshape(16, -1))
    for row, mask in zip(logits / np.float32(0.9), kept, strict=True):
        order = np.argsort(-row[:290])[: top_k or None]
        p = np.exp(row[order].astype(np.float64))
        p /= p.sum()
        order, p = order[np.cumsum(p) - p < top_p], p[np.cumsum(p) - p < top_p]
        np.testing.assert_array_equal(np.flatnonzero(mask), np.sort(order[p >= min_p * p[0]]))


def test_a_row_depends_on_its_own_key_and_logits_only():
    logits = jax.random.normal(jax.random.key(4), (50, 200))
    token, _ = DRAW(logits, keys(50), sampling(1.0), 200)
    order = np.random.default_rng(0).permutation(50)[:20]
    again, _ = DRAW(logits[order], keys(50)[order], sampling(1.0), 200)
    np.testing.assert_array_equal(again, token[order])


def test_a_draw_changes_only_where_its_lead_is_as_small_as_the_change():
    logits = jax.random.normal(jax.random.key(6), (2000, 300))
    moved = logits + 1e-2 * jax.random.uniform(jax.random.key(7), logits.shape, minval=-1.0)
    token, again = (DRAW(x, keys(2000), sampling(1.0), 300)[0] for x in (logits, moved))
    lead = gaps(distribution(logits, sampling(1.0), 300), keys(2000))
    assert (token != again).sum() > 0
    assert lead[token != again].max() < 3e-2


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 2}])
def test_settings_outside_their_range_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        sampling(**wrong)
