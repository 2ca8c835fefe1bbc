"""One loss and one gradient, whatever the micro-batches, padding, packing and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from objective_cases import double_precision, loss_and_gradient, make_case, minibatch

from hacrl_jax import hacpo
from hacrl_jax.config import ObjectiveConfig
from hacrl_jax.types import Minibatch

KINDS = {
    "sequence_mean": {"kl_coefficient": 0.1},
    "token_mean": {"kl_coefficient": 0.1, "aggregation": "token_mean", "ratio": "token", "tis_cap": 2.0},
    "constant": {"kl_coefficient": 0.1, "aggregation": "constant", "ratio": "token", "eps_low": 0.2},
}
slow = pytest.mark.slow  # more of the same: every shape and layout compiles anew
PER_SEQUENCE = ("source_logprob", "advantage", "capability_ratio", "source", "valid")


@pytest.fixture(scope="module", autouse=True)
def x64():
    with double_precision():
        yield


@pytest.fixture(scope="module", params=["sequence_mean", "token_mean", pytest.param("constant", marks=slow)])
def whole(request):
    """(log-probs, minibatch, learner, divisors, settings, loss, gradient, diagnostics) of 16 rows in one go."""
    case = make_case(21, KINDS[request.param], 1, 2)
    logprob, batch, _, settings = minibatch(case)
    divisors = hacpo.denominators(batch, case["learner"], settings, max_response=6)
    (value, diagnostics), gradient = loss_and_gradient(logprob, batch, case["learner"], 1, divisors, settings)
    assert float(value) != 0 and np.abs(gradient).sum() > 0
    return logprob, batch, case["learner"], divisors, settings, value, gradient, diagnostics


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=slow), 8])
def test_micro_batches_add_up(whole, size):
    logprob, batch, learner, divisors, settings, value, gradient, diagnostics = whole
    total, parts, rows = 0.0, [], []
    for start in range(0, 16, size):
        cut = jax.tree.map(lambda x, start=start: x[start : start + size], batch)
        (share, found), part = loss_and_gradient(logprob[start : start + size], cut, learner, 1, divisors, settings)
        total, parts, rows = total + share, [*parts, part], [*rows, found]
    assert float(total) == pytest.approx(float(value), abs=1e-14)
    np.testing.assert_allclose(np.concatenate(parts), gradient, atol=1e-15)
    together = jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-14), together, diagnostics)


def test_a_fully_masked_micro_batch_adds_nothing(whole):
    logprob, batch, learner, divisors, settings, *_ = whole
    for empty in (batch.replace(valid=jnp.zeros_like(batch.valid)), batch.replace(scored=jnp.zeros_like(batch.scored))):
        (share, diagnostics), gradient = loss_and_gradient(logprob, empty, learner, 1, divisors, settings)
        assert float(share) == 0 and not np.asarray(gradient).any()
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(diagnostics))
        # Even as a whole minibatch: the divisors stay finite.
        own = hacpo.denominators(empty, learner, settings, max_response=6)
        assert np.isfinite(loss_and_gradient(logprob, empty, learner, 1, own, settings)[0][0])


@pytest.mark.parametrize("side", [pytest.param("left", marks=slow), "right"])
def test_padding_changes_nothing(whole, side):
    logprob, batch, learner, _, settings, value, gradient, _ = whole
    width = (0, 5) if side == "right" else (5, 0)

    def pad(x, fill=0):
        return jnp.pad(x, ((0, 3), width), constant_values=fill) if x.shape[1] > 1 else jnp.pad(x, ((0, 3), (0, 0)))

    padded = jax.tree.map(pad, batch)
    divisors = hacpo.denominators(padded, learner, settings, max_response=6)
    (found, _), slope = loss_and_gradient(pad(logprob, np.nan), padded, learner, 1, divisors, settings)
    assert float(found) == pytest.approx(float(value), abs=1e-14)
    np.testing.assert_allclose(np.asarray(slope)[:16, width[0] : width[0] + 6], gradient, atol=1e-15)
    assert np.abs(slope).sum() == pytest.approx(np.abs(gradient).sum(), abs=1e-14)


@pytest.mark.parametrize("slots", [pytest.param(2, marks=slow), 4])
def test_packing_changes_nothing(whole, slots):
    """Several sequences per row, one row with an empty slot behind them."""
    logprob, batch, learner, _, settings, value, gradient, _ = whole
    rows = 16 // slots

    def pack(x):  # [16, T] -> [rows, slots * T]: unscored tails lie between the sequences, as prompts would
        return x.reshape(rows, -1)

    segment = jnp.tile(jnp.repeat(jnp.arange(1, slots + 1), 6)[None], (rows, 1)).astype(jnp.int32)
    fields = {name: pack(getattr(batch, name)) for name in Minibatch.__dataclass_fields__}
    spare = {name: jnp.pad(fields[name], ((0, 0), (0, 1))) for name in PER_SEQUENCE}
    packed = Minibatch(**fields | spare | {"segment": segment})
    divisors = hacpo.denominators(packed, learner, settings, max_response=6)
    (found, diagnostics), slope = loss_and_gradient(pack(logprob), packed, learner, 1, divisors, settings)
    assert float(found) == pytest.approx(float(value), abs=1e-14)
    np.testing.assert_allclose(np.asarray(slope).reshape(16, 6), gradient, atol=1e-15)
    assert diagnostics.ratio.shape == (rows, slots + 1)


@pytest.mark.parametrize("devices", [pytest.param(2, marks=slow), 8])
def test_devices_change_nothing(whole, devices):
    logprob, batch, learner, _, settings, value, gradient, _ = whole
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("data",))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    batch, logprob = jax.device_put((batch, logprob), spread)
    divisors = hacpo.denominators(batch, learner, settings, max_response=6)
    (found, _), slope = loss_and_gradient(logprob, batch, learner, 1, divisors, settings)
    assert float(found) == pytest.approx(float(value), abs=1e-14)
    np.testing.assert_allclose(slope, gradient, atol=1e-15)


@pytest.mark.parametrize("size", [1, 2])
def test_a_token_mean_worked_by_hand(size):
    """Lengths 1 and 3 with advantages +1 and -1 at ratio 1: -(1 - 3) / 4."""
    settings = ObjectiveConfig(cross="none", ratio="token", aggregation="token_mean", kl_coefficient=0.0)
    lengths = jnp.asarray([1, 3])
    scored = jnp.arange(3) < lengths[:, None]
    zeros, ones = jnp.zeros((2, 3)), jnp.ones((2, 1))
    batch = Minibatch(
        tokens=jnp.zeros((2, 3), jnp.int32), positions=jnp.zeros((2, 3), jnp.int32),
        segment=scored.astype(jnp.int32), scored=scored, source_token_logprob=zeros, sampler_token_logprob=zeros,
        reference_token_logprob=zeros, source_logprob=0 * ones, advantage=jnp.asarray([[1.0], [-1.0]]),
        capability_ratio=ones, source=jnp.zeros((2, 1), jnp.int32), valid=ones > 0,
    )  # fmt: skip
    divisors = hacpo.denominators(batch, 0, settings)
    total = 0.0
    for start in range(0, 2, size):
        part = jax.tree.map(lambda x, start=start: x[start : start + size], batch)
        total += loss_and_gradient(zeros[start : start + size] - 1.3, part, 0, 0, divisors, settings)[0][0]
    assert float(total) == pytest.approx(0.5, abs=1e-15)


def test_divisors_count_what_takes_part():
    case = make_case(22, {"cross": "none"}, 1, 2)
    _, batch, _, settings = minibatch(case)
    own = np.asarray(case["valid"]) & (np.asarray(case["source"]) == case["learner"])
    found = hacpo.denominators(batch, case["learner"], settings, max_response=7)
    assert float(found.sequences) == own.sum() and float(found.constant) == own.sum() * 7
    assert float(found.tokens) == np.asarray(case["length"])[own].sum()
    given = hacpo.denominators(batch, 0, ObjectiveConfig(aggregation="constant", aggregation_constant=123))
    assert float(given.constant) == 123
