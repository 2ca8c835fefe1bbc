"""What crosses each edge: reductions of the loss's per-sequence values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_cases import loss_and_gradient, make_case, minibatch

from hacrl_jax import diagnostics, hacpo


@pytest.fixture(scope="module")
def found():
    """(case, minibatch, gradient, diagnostics) of a late update of one of three agents."""
    case = make_case(33, {"kl_coefficient": 0.1, "tis_cap": 1.01}, 3, 3)
    logprob, batch, _, settings = minibatch(case, np.float32)
    divisors = hacpo.denominators(batch, case["learner"], settings)
    (_, values), gradient = loss_and_gradient(logprob, batch, case["learner"], 3, divisors, settings)
    return case, batch, np.asarray(gradient), values


def test_edges(found):
    case, batch, gradient, values = found
    edges = jax.device_get(diagnostics.edges(values, 4))
    ratio, valid = np.asarray(values.ratio)[:, 0], np.asarray(case["valid"])
    for j in range(3):
        rows = valid & (np.asarray(case["source"]) == j)
        s = ratio[rows]
        assert edges.sequences[j] == rows.sum()
        assert edges.ratio_mean[j] == pytest.approx(s.mean(), rel=1e-5)
        np.testing.assert_allclose(edges.ratio_quantiles[j], np.quantile(s, diagnostics.QUANTILES), rtol=1e-5)
        assert edges.effective_sample_size[j] == pytest.approx(s.sum() ** 2 / (s**2).sum() / len(s), rel=1e-5)
        assert edges.tokens[j] == pytest.approx(np.asarray(case["length"])[rows].mean())
        assert edges.capability_ratio[j] == pytest.approx(float(batch.capability_ratio[rows][0, 0]))
        assert edges.gradient_share[j] == pytest.approx((gradient[rows] ** 2).sum() / (gradient**2).sum(), rel=1e-4)
        if j != case["learner"]:
            assert edges.clipped_low[j] == pytest.approx((s < 0.875).mean())
            assert edges.clipped_high[j] == pytest.approx((s > 1).mean())
    assert edges.gradient_share.sum() == pytest.approx(1, abs=1e-5)
    assert edges.sequences[3] == 0 and edges.gradient_share[3] == 0 and np.isnan(edges.ratio_mean[3])


def test_own_clips_count_stopped_gradients(found):
    case, _, _, values = found
    own = np.asarray(case["source"]) == case["learner"]
    stopped = np.asarray(values.clipped_low + values.clipped_high)[:, 0] > 0
    other = make_case(33, {"cross": "none"}, 3, 3)
    logprob, batch, _, settings = minibatch(other, np.float32)
    divisors = hacpo.denominators(batch, other["learner"], settings)
    (_, _), without_kl = loss_and_gradient(logprob, batch, other["learner"], 3, divisors, settings)
    moves = np.abs(np.asarray(without_kl)).sum(1) > 0
    active = own & np.asarray(case["valid"]) & (np.asarray(batch.advantage)[:, 0] != 0)
    np.testing.assert_array_equal(moves[active], ~stopped[active])


def test_mismatch_with_the_sampler(found):
    case, _, _, values = found
    got = jax.device_get(diagnostics.mismatch(values, case["learner"]))
    own = np.asarray(case["valid"]) & (np.asarray(case["source"]) == case["learner"])
    d = np.asarray(case["source_token_logprob"]) - np.asarray(case["sampler_token_logprob"])
    length = np.asarray(case["length"])
    inside = np.arange(d.shape[1]) < length[:, None]

    def mean(x):
        return (np.where(inside, x, 0).sum(1) / length)[own].mean()

    assert got["sampler_mismatch/mean"] == pytest.approx(mean(d), rel=1e-3, abs=1e-6)
    assert got["sampler_mismatch/kl"] == pytest.approx(mean(np.exp(d) - 1 - d), rel=1e-2)
    assert got["tis/weight"] == pytest.approx(mean(np.minimum(np.exp(d), 1.01)), rel=1e-4)
    assert got["tis/truncated"] == pytest.approx(mean(np.exp(d) >= 1.01), rel=1e-4)
    assert got["score_mismatch"] == 0 and got["kl"] > 0


def test_token_inflation():
    got = diagnostics.token_inflation(jnp.asarray([6, 9, 50]), jnp.asarray([4, 6, 1]), jnp.asarray([True, True, False]))
    assert float(got) == pytest.approx(1.5)


def test_summary_is_flat_finite_and_free_of_absent_edges(found):
    case, _, _, values = found
    metrics = diagnostics.summary(values, case["learner"], 5)
    assert all(isinstance(x, float | int) and np.isfinite(x) for x in metrics.values())
    others = {j for j in range(3) if j != case["learner"]}
    assert {int(key.split("/")[1]) for key in metrics if key.startswith("edge/")} == others
    for key in ("ratio/own/mean", "ratio/cross/mean", "clip/own/low", "clip/cross/high", "kl", "gradient_share/cross"):
        assert key in metrics
    own = case | {"settings": case["settings"] | {"cross": "none"}}
    logprob, batch, _, settings = minibatch(own, np.float32)
    divisors = hacpo.denominators(batch, own["learner"], settings)
    (_, alone), _ = loss_and_gradient(logprob, batch, own["learner"], 1, divisors, settings)
    keys = diagnostics.summary(alone, own["learner"], 3).keys()
    assert not [key for key in keys if "cross" in key or key.startswith("edge")]
