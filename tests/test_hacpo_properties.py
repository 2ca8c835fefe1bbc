"""What must hold of the objective whatever the numbers are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import double_precision, evaluate, loss_and_gradient, make_case, minibatch

from hacrl_jax import hacpo
from hacrl_jax.config import ObjectiveConfig

PLAIN = ObjectiveConfig(kl_coefficient=0.0)
ROWS = ("prompt", "source", "length", "reward", "valid", "token_logprob", "source_token_logprob", "source_logprob",
        "sampler_token_logprob", "reference_token_logprob")  # fmt: skip
some = settings(max_examples=8, deadline=None)
seeds = st.integers(0, 10**6)


@pytest.fixture(scope="module", autouse=True)
def x64():
    with double_precision():
        yield


def advantage(reward, source, *, learner=0, ratio=(1.0, 1.0, 1.0), prompt=None, valid=None, config=PLAIN):
    N = len(reward)
    prompt = np.zeros(N, np.int32) if prompt is None else np.asarray(prompt, np.int32)
    valid = np.ones(N, bool) if valid is None else np.asarray(valid)
    arguments = jnp.asarray(reward, float), jnp.asarray(prompt), jnp.asarray(source), jnp.asarray(valid)
    compiled = jax.jit(hacpo.advantage, static_argnums=6)
    return [np.asarray(x) for x in compiled(*arguments, learner, jnp.asarray(ratio, float), config)]


@some
@given(seed=seeds)
def test_the_order_of_samples_changes_nothing(seed):
    case = make_case(seed, {}, 1, 2)
    order = np.random.default_rng(seed).permutation(len(case["prompt"]))
    shuffled = case | {key: [case[key][i] for i in order] for key in ROWS}
    before, after = evaluate(case), evaluate(shuffled)
    for key in before:
        expected = before[key] if key == "loss" else before[key][order]
        np.testing.assert_allclose(after[key], expected, atol=1e-13)


@some
@given(seed=seeds)
def test_the_order_of_agents_changes_nothing(seed):
    case = make_case(seed, {}, 1, 3)
    order = np.random.default_rng(seed).permutation(3)  # agent a is called order[a]
    renamed = case | {
        "source": [int(order[j]) for j in case["source"]],
        "learner": int(order[case["learner"]]),
        "history": np.asarray(case["history"])[:, np.argsort(order)].tolist(),
    }
    before, after = evaluate(case), evaluate(renamed)
    for key in before:
        np.testing.assert_allclose(after[key], before[key], atol=1e-13)


@some
@given(seed=seeds)
def test_one_agent_is_gspo(seed):
    case = make_case(seed, {}, 1, 1)
    gspo = case | {"settings": case["settings"] | {"cross": "none"}}
    for key, value in evaluate(case).items():
        np.testing.assert_array_equal(value, evaluate(gspo)[key])


@some
@given(seed=seeds)
def test_partners_do_not_exist_for_gspo(seed):
    """cross `none` on the shared minibatch is the same as on the learner's own rows."""
    case = make_case(seed, {"cross": "none"}, 1, 2)
    own = [i for i, j in enumerate(case["source"]) if j == case["learner"]]
    together, apart = evaluate(case), evaluate(case | {key: [case[key][i] for i in own] for key in ROWS})
    assert together["loss"] == pytest.approx(apart["loss"], abs=1e-14)
    np.testing.assert_allclose(together["gradient"][own], apart["gradient"], atol=1e-14)
    assert not together["gradient"][np.asarray(case["source"]) != case["learner"]].any()


@given(st.floats(0.3, 1.5), st.floats(-3, 3), st.floats(0.1, 10))
@some
def test_alpha_zero_is_the_plain_clipped_ratio(s, a, power):
    config = ObjectiveConfig(alpha=0.0)
    value = hacpo.cross_objective(jnp.asarray(s), a, power, 0, config)
    assert float(value) == pytest.approx(min(max(s, 0.8), 1.0) * power * a, abs=1e-12)


@pytest.mark.parametrize("s, passes", [(1.0, True), (1 - 1e-9, False), (1 + 1e-9, False), (0.9, False), (2.0, False)])
def test_delta_zero_passes_a_gradient_only_at_one(s, passes):
    config = ObjectiveConfig(delta=0.0)
    gradient = jax.grad(lambda x: hacpo.cross_objective(x, 1.0, 1.0, 3, config))(jnp.asarray(s))
    assert float(gradient) == (1.0 if passes else 0.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("at", [-2.0, -1.0, 0.5, 3.0, 4.0])
def test_clip_passes_whole_gradients_on_the_closed_interval(at, dtype):
    value, gradient = jax.value_and_grad(lambda x: hacpo.clip(x, -1.0, 3.0))(jnp.asarray(at, dtype))
    assert value == min(max(at, -1.0), 3.0) and value.dtype == dtype
    assert gradient == (1.0 if -1.0 <= at <= 3.0 else 0.0)


def test_two_identical_agents_get_whole_gradients():
    """At s == 1 own and cross rows move the policy alike: A / (rows * length) per token."""
    case = make_case(1, {"capability_baseline": False, "capability_gradient": False}, 0, 2)
    inside = np.arange(6) < np.asarray(case["length"])[:, None]
    means = (np.asarray(case["token_logprob"]) * inside).sum(1) / np.asarray(case["length"])
    case |= {"source_logprob": means.tolist(), "valid": [True] * len(means)}
    logprob, batch, _, config = minibatch(case)
    # The same reduction as in the loss, so that s is 1 to the last bit.
    batch = batch.replace(source_logprob=hacpo._per_sequence(jnp.where(batch.scored, logprob, 0), batch.segment, 1)
                          / jnp.asarray(case["length"])[:, None])  # fmt: skip
    divisors = hacpo.denominators(batch, case["learner"], config)
    (_, diagnostics), gradient = loss_and_gradient(logprob, batch, case["learner"], 0, divisors, config)
    assert (np.asarray(diagnostics.ratio) == 1).all()
    per_token = -np.asarray(batch.advantage) / len(means) / np.asarray(case["length"])[:, None]
    np.testing.assert_allclose(gradient, np.where(inside, per_token, 0), atol=1e-15)


@pytest.mark.parametrize("bad", [-np.inf, np.nan, np.inf])
@pytest.mark.parametrize("overrides", [
    {}, {"ratio": "token", "kl_coefficient": 0.1, "tis_cap": 2.0}, {"aggregation": "token_mean", "kl_coefficient": 0.1},
])  # fmt: skip
def test_masked_tokens_change_nothing(bad, overrides):
    case = make_case(4, overrides, 0, 2)
    logprob, batch, _, config = minibatch(case)
    divisors = hacpo.denominators(batch, case["learner"], config)
    out = ~(batch.scored & batch.valid)  # S is 1

    def spoil(x):
        return jnp.where(out, bad, x)

    spoiled = batch.replace(
        source_token_logprob=spoil(batch.source_token_logprob),
        sampler_token_logprob=spoil(batch.sampler_token_logprob),
        reference_token_logprob=spoil(batch.reference_token_logprob),
        source_logprob=jnp.where(batch.valid, batch.source_logprob, bad),
        advantage=jnp.where(batch.valid, batch.advantage, bad),
        capability_ratio=jnp.where(batch.valid, batch.capability_ratio, bad),
    )
    for m in (0, 2):
        arguments = case["learner"], m, divisors, config
        clean = loss_and_gradient(logprob, batch, *arguments)
        dirty = loss_and_gradient(spoil(logprob), spoiled, *arguments)
        jax.tree.map(np.testing.assert_array_equal, clean, dirty)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(dirty))


@some
@given(size=st.sampled_from([2, 7]), power=st.floats(0.1, 10), graded=st.floats(0, 5))
def test_uniform_groups_give_exactly_zero(size, power, graded):
    for reward in (0.0, 1.0, graded):
        a, b = advantage([reward] * size, [0] * (size // 2) + [1] * (size - size // 2), ratio=(1.0, power))
        assert (a == 0).all() and b == pytest.approx(reward)


def test_a_group_of_one():
    for config in (PLAIN, ObjectiveConfig(uniform_guard=False), ObjectiveConfig(advantage_by_std=False)):
        a, _ = advantage([1.0, 0.0, 1.0], [0, 1, 1], prompt=[0, 1, 1], valid=[True, False, True], config=config)
        assert (a == 0).all()


def test_an_agent_without_success_in_the_window():
    history = jnp.asarray([[0.5, 0.9], [0.4, 0.0], [0.6, 0.0]])
    p = hacpo.capability(history, 2)
    np.testing.assert_allclose(p, [0.5, 1e-8])
    np.testing.assert_allclose(hacpo.capability_ratio(p), [[1, 0.1], [10, 1]])
    a, b = advantage([1, 0, 0, 0], [0, 0, 1, 1], ratio=(1.0, 0.1))
    assert np.isfinite(a).all() and b[0] == pytest.approx(0.25)
    both = hacpo.capability_ratio(hacpo.capability(jnp.zeros((5, 2)), 5))
    np.testing.assert_array_equal(both, np.ones((2, 2)))


def test_the_window_holds_the_last_steps_the_current_one_included():
    history = jnp.asarray([[9.0], [1.0], [2.0], [6.0]])
    assert float(hacpo.capability(history, 3)[0]) == 3.0
    assert float(hacpo.capability(history, 10)[0]) == 4.5


def test_two_identical_questions_stay_two_groups():
    reward, source = [1, 1, 0, 1, 0, 0, 0, 1], [0, 0, 1, 1] * 2
    a, b = advantage(reward, source, prompt=[0] * 4 + [1] * 4)
    np.testing.assert_allclose(b, [0.75] * 4 + [0.25] * 4)
    for part in (slice(0, 4), slice(4, 8)):
        np.testing.assert_allclose(a[part], advantage(reward[part], source[part])[0])


def test_dropped_rows_leave_everything_together():
    """A dropped row is as if it had never been sampled."""
    case = make_case(11, {"kl_coefficient": 0.1}, 1, 2)
    kept = [i for i, valid in enumerate(case["valid"]) if valid]
    assert 0 < len(kept) < len(case["valid"])
    whole, rest = evaluate(case), evaluate(case | {key: [case[key][i] for i in kept] for key in ROWS})
    assert whole["loss"] == pytest.approx(rest["loss"], abs=1e-14)
    for key in ("advantage", "baseline", "gradient"):
        np.testing.assert_allclose(whole[key][kept], rest[key], atol=1e-14)


def test_a_baseline_above_one_becomes_the_own_mean():
    a, b = advantage([1, 1, 1, 0], [0, 0, 1, 1], ratio=(1.0, 0.25))  # (1 + 1 + 4) / 4
    assert b == pytest.approx(1.0) and a[:3] == pytest.approx(0.0) and a[3] < 0
    free = ObjectiveConfig(binary_guard=False)
    assert advantage([1, 1, 1, 0], [0, 0, 1, 1], ratio=(1.0, 0.25), config=free)[1] == pytest.approx(1.5)
    # Graded rewards may have a baseline above 1.
    assert advantage([1, 1, 1, 0.5], [0, 0, 1, 1], ratio=(1.0, 0.25))[1] == pytest.approx(2.0)
    # None of the learner's own samples is left: the plain mean.
    _, b = advantage([1, 1, 1, 0], [0, 0, 1, 1], ratio=(1.0, 0.25), valid=[False, False, True, True])
    assert b[2:] == pytest.approx(0.5)


@some
@given(seed=seeds, m=st.integers(0, 12))
def test_the_lower_bound_rises_with_every_update_and_stops_at_one(seed, m):
    low = float(hacpo.cross_lower_bound(m, PLAIN))
    assert low == pytest.approx(min(0.8 + 0.025 * m, 1.0), abs=1e-12)


@pytest.mark.parametrize("overrides", [{}, {"ratio": "token"}])
def test_the_first_visit_of_own_samples_has_ratio_one(overrides):
    """However far the stored scores are off, and with the whole gradient."""
    case = make_case(2, overrides, 0, 2) | {"exact_first_visit": True}
    logprob, batch, _, config = minibatch(case)
    batch = batch.replace(source_logprob=batch.source_logprob + 0.01)
    divisors = hacpo.denominators(batch, case["learner"], config)
    (_, found), gradient = loss_and_gradient(logprob, batch, case["learner"], 0, divisors, config)
    own = np.asarray(batch.valid & (batch.source == case["learner"]))
    assert (np.asarray(found.ratio)[own] == 1).all()
    inside = np.asarray(batch.scored) & own
    per_token = -np.asarray(batch.advantage) / np.asarray(case["length"])[:, None] / divisors.sequences
    np.testing.assert_allclose(np.where(inside, gradient, 0), np.where(inside, per_token, 0), atol=1e-14)
    (_, later), _ = loss_and_gradient(logprob, batch, case["learner"], 1, divisors, config)
    assert (np.asarray(later.ratio)[own] != 1).all()
    assert np.abs(np.asarray(found.score_mismatch)[own]).max() > 5e-3
    assert not np.asarray(later.score_mismatch).any()


def test_far_ratios_are_limited_before_the_exponential():
    ratio, gradient = jax.value_and_grad(hacpo.sequence_ratio)(jnp.asarray(5000.0), jnp.asarray(0.0), 10.0)
    assert float(ratio) == pytest.approx(np.exp(10)) and float(gradient) == 0
    assert float(hacpo.sequence_ratio(jnp.asarray(-np.inf), jnp.asarray(0.0), 10.0)) == pytest.approx(np.exp(-10))


@pytest.mark.parametrize("overrides", [{}, {"ratio": "token", "kl_coefficient": 0.1, "tis_cap": 2.0}])
def test_the_compiled_loss_calls_no_host_and_keeps_the_dtype(overrides):
    case = make_case(5, overrides, 0, 2)
    logprob, batch, _, config = minibatch(case, np.float32)
    arguments = logprob, batch, case["learner"], jnp.asarray(1), hacpo.denominators(batch, case["learner"], config)
    traced = loss_and_gradient.trace(*arguments, config)
    text = f"{traced.jaxpr}\n{traced.lower().compile().as_text()}"
    assert "callback" not in text and "infeed" not in text and "outfeed" not in text
    (value, diagnostics), gradient = loss_and_gradient(*arguments, config)
    floats = [x for x in jax.tree.leaves((value, diagnostics, gradient)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}


def test_advantages_are_differentiable_even_of_equal_rewards():
    @jax.jit
    @jax.grad
    def slope(reward):
        N = reward.shape[0]
        ints = jnp.zeros(N, jnp.int32)
        config = ObjectiveConfig(uniform_guard=False)
        a, b = hacpo.advantage(reward, ints, ints, jnp.ones(N, bool), 0, jnp.ones(1), config)
        return (a * jnp.arange(N)).sum() + b.sum()

    assert np.isfinite(slope(jnp.ones(4))).all()
    assert np.isfinite(slope(jnp.asarray([1.0, 0.0, 1.0, 1.0]))).all()
