"""Random minibatches as plain dicts, and their evaluation by hacpo.py; for test_hacpo_* and the reference script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from hacrl_jax import hacpo
from hacrl_jax.config import ObjectiveConfig
from hacrl_jax.types import Minibatch

BASE = {"kl_coefficient": 0.0}
VARIANTS = {  # name -> (settings that differ from ours without KL, update index, agents)
    "hacpo": ({}, 0, 2),
    "hacpo_late": ({}, 3, 2),
    "hacpo_three_agents": ({"alpha": 3.0, "delta_step": 0.01}, 2, 3),
    "alpha_zero": ({"alpha": 0.0}, 1, 2),
    "no_clip": ({"clip_cross": False}, 1, 2),
    "no_capability": ({"capability_baseline": False, "capability_gradient": False}, 1, 2),
    "naive": ({"cross": "naive", "capability_baseline": False}, 1, 2),
    "gspo": ({"cross": "none"}, 1, 2),
    "grpo": ({"cross": "none", "ratio": "token", "eps_low": 0.2, "eps_high": 0.28, "aggregation": "token_mean"}, 1, 2),
    "grpo_sequence_mean": ({"cross": "none", "ratio": "token", "eps_low": 0.2, "eps_high": 0.28}, 1, 2),
    "dr_grpo": ({"cross": "none", "ratio": "token", "eps_low": 0.2, "eps_high": 0.2, "aggregation": "constant",
                 "aggregation_constant": 70, "advantage_by_std": False}, 1, 2),
    "token_ratio_with_partners": ({"ratio": "token", "eps_low": 0.2, "eps_high": 0.28}, 1, 3),
    "first_visit_token": ({"ratio": "token", "eps_low": 0.2, "eps_high": 0.28}, 0, 2),
    "token_mean": ({"aggregation": "token_mean"}, 1, 2),
    "constant": ({"aggregation": "constant", "aggregation_constant": 99}, 1, 2),
    "guards_off": ({"binary_guard": False, "uniform_guard": False}, 1, 2),
    "kl_k1": ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, 0, 2),
    "kl_k2": ({"kl_coefficient": 0.1, "kl_estimator": "k2"}, 1, 2),
    "kl_k3": ({"kl_coefficient": 0.1, "kl_estimator": "k3"}, 1, 2),
    "kl_k3_straight_through": ({"kl_coefficient": 0.1, "kl_estimator": "k3_straight_through"}, 1, 2),
    "tis": ({"tis_cap": 1.05}, 1, 2),
    "tis_token": ({"tis_cap": 1.05, "ratio": "token", "eps_low": 0.2, "eps_high": 0.28}, 1, 3),
}  # fmt: skip


@contextmanager
def double_precision() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def make_case(seed: int, overrides: dict, update_index: int, n: int, *, prompts: int = 2, samples: int = 4,
              tokens: int = 6) -> dict:  # fmt: skip
    """One minibatch of n agents, a few samples dropped, own ratios near GSPO's clip, other agents' spread wider."""
    rng = np.random.default_rng(seed)
    rows = n * prompts * samples
    prompt = np.tile(np.repeat(np.arange(prompts), samples), n)
    source = np.repeat(np.arange(n), prompts * samples)
    length = rng.integers(1, tokens + 1, rows)
    logprob = -rng.exponential(0.8, (rows, tokens))
    learner = int(rng.integers(n))
    spread = np.where(source == learner, 4e-4 if overrides.get("ratio") != "token" else 0.3, 0.25)
    old = logprob + rng.normal(0, 1, (rows, tokens)) * spread[:, None]
    inside = np.arange(tokens) < length[:, None]
    settings = ObjectiveConfig(**BASE | overrides).model_dump()
    return {
        "settings": settings, "update_index": update_index, "learner": learner, "window": 5,
        "exact_first_visit": bool(seed % 2), "history": rng.uniform(0.2, 0.8, (7, n)).tolist(),
        "prompt": prompt.tolist(), "source": source.tolist(), "length": length.tolist(),
        "reward": rng.integers(0, 2, rows).astype(float).tolist(), "valid": (rng.random(rows) > 0.15).tolist(),
        "token_logprob": logprob.tolist(), "source_token_logprob": old.tolist(),
        "source_logprob": ((old * inside).sum(1) / length).tolist(),
        "sampler_token_logprob": (old + rng.normal(0, 0.1, old.shape)).tolist(),
        "reference_token_logprob": (logprob + rng.normal(0, 0.3, old.shape)).tolist(),
    }  # fmt: skip


def all_cases() -> dict[str, dict]:
    return {name: make_case(100 + index, *variant) for index, (name, variant) in enumerate(VARIANTS.items())}


def minibatch(case: dict, dtype=np.float64):
    """A case as (token log-probs [N, T], Minibatch of padded rows, baseline [N], ObjectiveConfig)."""
    settings = ObjectiveConfig(**case["settings"])
    logprob = jnp.asarray(case["token_logprob"], dtype)
    source = jnp.asarray(case["source"], jnp.int32)
    valid = jnp.asarray(case["valid"])
    ratio = hacpo.capability_ratio(hacpo.capability(jnp.asarray(case["history"], dtype), case["window"]))
    reward = jnp.asarray(case["reward"], dtype)
    prompt = jnp.asarray(case["prompt"], jnp.int32)
    advantage, baseline = jax.jit(hacpo.advantage, static_argnums=6)(
        reward, prompt, source, valid, case["learner"], ratio[case["learner"]], settings
    )
    scored = jnp.arange(logprob.shape[1]) < jnp.asarray(case["length"])[:, None]
    batch = Minibatch(
        tokens=jnp.zeros(scored.shape, jnp.int32), positions=jnp.zeros(scored.shape, jnp.int32),
        segment=jnp.ones(scored.shape, jnp.int32), scored=scored,
        source_token_logprob=jnp.asarray(case["source_token_logprob"], dtype),
        sampler_token_logprob=jnp.asarray(case["sampler_token_logprob"], dtype),
        reference_token_logprob=jnp.asarray(case["reference_token_logprob"], dtype),
        source_logprob=jnp.asarray(case["source_logprob"], dtype)[:, None], advantage=advantage[:, None],
        capability_ratio=ratio[case["learner"], source][:, None], source=source[:, None], valid=valid[:, None],
    )  # fmt: skip
    return logprob, batch, baseline, settings


# These programs run for microseconds and compile for a second.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@partial(jax.jit, static_argnames=("settings", "exact_first_visit"), compiler_options=QUICKLY)
def loss_and_gradient(logprob, batch, learner, update_index, divisors, settings, exact_first_visit=True):
    """((loss, Diagnostics), gradient with respect to the token log-probs), compiled."""

    def loss(x):
        return hacpo.loss(
            x, batch, learner, update_index, divisors, settings, exact_first_visit=exact_first_visit
        )  # fmt: skip

    return jax.value_and_grad(loss, has_aux=True)(logprob)


def evaluate(case: dict, dtype=np.float64) -> dict[str, np.ndarray]:
    """What tests/torch_objective.py's evaluate returns, by hacpo.py."""
    logprob, batch, baseline, settings = minibatch(case, dtype)
    divisors = hacpo.denominators(batch, case["learner"], settings)
    (value, diagnostics), gradient = loss_and_gradient(
        logprob, batch, case["learner"], case["update_index"], divisors, settings, case["exact_first_visit"]
    )
    result = {
        "advantage": batch.advantage[:, 0], "baseline": baseline, "ratio": diagnostics.ratio[:, 0],
        "objective": diagnostics.objective[:, 0], "loss": value, "gradient": gradient,
    }  # fmt: skip
    assert all(x.dtype == dtype for x in result.values())
    return {key: np.asarray(x, np.float64) for key, x in result.items()}
