"""Groups without signal and overlong answers, before the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hacrl_jax import groups, hacpo
from hacrl_jax.config import ObjectiveConfig

REWARD = jnp.asarray([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
PROMPT = jnp.asarray([0, 0, 1, 1, 2, 2, 0, 0])  # prompt 0: all right; 1: mixed; 2: all wrong
SOURCE = jnp.asarray([0, 0, 0, 0, 0, 0, 1, 1])
VALID = jnp.ones(8, bool)


def test_drop_leaves_out_groups_without_signal():
    drop = ObjectiveConfig(groups="drop")
    kept = groups.keep_groups(REWARD, PROMPT, SOURCE, VALID, 0, drop)
    np.testing.assert_array_equal(kept, PROMPT == 1)
    np.testing.assert_array_equal(groups.keep_groups(REWARD, PROMPT, SOURCE, VALID, 0, ObjectiveConfig()), VALID)
    # Dropped groups leave the advantages of the others alone.
    full, _ = hacpo.advantage(REWARD, PROMPT, SOURCE, VALID, 0, jnp.ones(2), drop)
    rest, _ = hacpo.advantage(REWARD, PROMPT, SOURCE, kept, 0, jnp.ones(2), drop)
    np.testing.assert_array_equal(full, rest)


def test_signal_counts_only_samples_that_take_part():
    mixed = jnp.asarray([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0])  # the partner missed prompt 0 once
    alone, shared = ObjectiveConfig(cross="none", groups="drop"), ObjectiveConfig(groups="drop")
    assert not groups.with_signal(mixed, PROMPT, SOURCE, VALID, 0, alone)[0]
    assert groups.with_signal(mixed, PROMPT, SOURCE, VALID, 0, shared)[0]
    assert not groups.with_signal(mixed, PROMPT, SOURCE, VALID.at[6].set(False), 0, shared)[0]


def test_resampling_is_bounded_and_says_what_it_does():
    settings = ObjectiveConfig(groups="resample", resample_attempts=2)
    signal = np.asarray([True, False, True, False])
    again = groups.resample(signal, 0, settings)
    np.testing.assert_array_equal(again.prompts, [1, 3])
    assert "2 of 4 groups" in again.message and "attempt 1 of 2" in again.message
    assert len(groups.resample(signal, 1, settings).prompts) == 2
    over = groups.resample(signal, 2, settings)
    assert len(over.prompts) == 0 and "after 2 attempts" in over.message and "resample_attempts" in over.message
    assert groups.resample(np.ones(4, bool), 0, settings).message == ""
    assert len(groups.resample(signal, 0, ObjectiveConfig()).prompts) == 0


def test_overlong_answers():
    length, stopped = jnp.asarray([5, 8, 9, 10, 10]), jnp.asarray([True, True, True, True, False])
    reward, valid = jnp.ones(5), jnp.ones(5, bool)

    def treat(**overrides):
        settings = ObjectiveConfig(**overrides)
        return jax.jit(groups.overlong, static_argnums=(4, 5))(reward, length, stopped, valid, 10, settings)

    assert all((a == b).all() for a, b in zip(treat(), (reward, valid), strict=True))
    np.testing.assert_array_equal(treat(overlong="mask")[1], stopped)
    np.testing.assert_allclose(treat(overlong="penalty", overlong_buffer=4)[0], [1, 0.5, 0.25, 0, 0])
    np.testing.assert_allclose(treat(overlong="penalty")[0], [1, 1, 1, 1, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_reward_keeps_its_dtype(dtype):
    settings = ObjectiveConfig(overlong="penalty", overlong_buffer=3)
    reward, _ = groups.overlong(REWARD.astype(dtype), jnp.arange(8), VALID, VALID, 8, settings)
    assert reward.dtype == dtype
