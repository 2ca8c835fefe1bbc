"""Check hacrl_jax/hacpo.py against a file of numeric vectors: python scripts/check_objective.py FILE

FILE has the format of $HACRL_SHARED/golden/hacpo_objective.json (its README explains the fields). Every case is
evaluated in float64 and in float32; the table shows the largest absolute error per quantity over all cases, and for
float32 the largest error relative to the quantity's magnitude in its case. Exit status: 0 within the tolerances, 1
above them, 2 for a file that cannot be read.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from hacrl_jax import hacpo
from hacrl_jax.config import ObjectiveConfig
from hacrl_jax.types import Minibatch, UserError

FLOAT64_TOLERANCE = 1e-9  # absolute
# Files are rounded to 12 decimals, inputs included: a value of 2e4 (a ratio of exp(10)) cannot be met to 1e-9.
FILE_ROUNDING = 1e-12  # relative to the expected value, element by element
FLOAT32_TOLERANCE = 2e-5  # relative to the largest expected magnitude in the case
QUANTITIES = {  # our name -> the file's
    "capability": "capability", "omega": "omega", "advantage": "advantage", "baseline": "baseline", "ratio": "ratio",
    "objective": "objective", "loss": "loss", "gradient": "grad_token_logprob",
}  # fmt: skip
ADVANTAGE_SETTINGS = {
    "use_capability": "capability_baseline", "binary_guard": "binary_guard", "uniform_guard": "uniform_guard",
    "by_std": "advantage_by_std", "eps": "advantage_eps",
}  # fmt: skip
LOSS_SETTINGS = {
    "eps_low": "eps_low", "eps_high": "eps_high", "delta": "delta", "delta_step": "delta_step", "alpha": "alpha",
    "gradient_capability": "capability_gradient", "cross": "cross", "max_abs_log_ratio": "max_abs_log_ratio",
}  # fmt: skip


def settings_of(case: dict, where: str) -> tuple[ObjectiveConfig, int]:
    """The case's settings in our names, and its update index. Raises UserError for a setting we do not know."""
    ours = {"kl_coefficient": 0.0}
    given = case.get("settings", {})
    loss = dict(given.get("loss", {}))
    update_index = loss.pop("update_index", 0)
    for name, table, values in (
        ("advantage", ADVANTAGE_SETTINGS, given.get("advantage", {})),
        ("loss", LOSS_SETTINGS, loss),
    ):
        for key, value in values.items():
            if key not in table:
                raise UserError(f"{where}: unknown setting {name}.{key}; there are {', '.join(table)}")
            ours[table[key]] = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    return ObjectiveConfig(**ours), update_index


def evaluate(case: dict, where: str, dtype: type) -> dict[str, np.ndarray]:
    """All quantities of one case, computed by hacpo.py in dtype."""
    settings, update_index = settings_of(case, where)
    given = case["inputs"]
    logprob = jnp.asarray(given["token_logprob"], dtype)  # [N, T]
    # Group ids of a file are arbitrary integers; hacpo wants them below N.
    prompt = np.unique(given["prompt"], return_inverse=True)[1].reshape(-1)
    inputs = {
        "history": jnp.asarray(given["capability_history"], dtype), "reward": jnp.asarray(given["reward"], dtype),
        "source_logprob": jnp.asarray(given["source_mean_logprob"], dtype), "prompt": jnp.asarray(prompt, jnp.int32),
        "source": jnp.asarray(given["source"], jnp.int32),
        "scored": jnp.asarray(given["token_mask"], bool).reshape(logprob.shape),
    }  # fmt: skip
    compiled = jax.jit(quantities, static_argnames=("window", "learner", "update_index", "settings"))
    results = compiled(logprob, inputs, window=given["capability_window"], learner=case["learner"],
                       update_index=update_index, settings=settings)  # fmt: skip
    for name, result in results.items():
        if result.dtype != dtype:
            raise UserError(f"{where}: {name} came out as {result.dtype}, not {np.dtype(dtype)}")
    return {name: np.asarray(result, np.float64) for name, result in results.items()}


def quantities(
    logprob: jax.Array, inputs: dict, *, window: int, learner: int, update_index: int, settings: ObjectiveConfig
) -> dict[str, jax.Array]:
    """hacpo.py's functions applied one after the other to all N rows as one minibatch of padded rows."""
    capability = hacpo.capability(inputs["history"], window)
    ratio = hacpo.capability_ratio(capability)
    source, valid = inputs["source"], jnp.ones_like(inputs["source"], dtype=bool)
    advantage, baseline = hacpo.advantage(
        inputs["reward"], inputs["prompt"], source, valid, learner, ratio[learner], settings
    )
    zeros = jnp.zeros_like(logprob)
    batch = Minibatch(
        tokens=zeros.astype(jnp.int32), positions=zeros.astype(jnp.int32), segment=jnp.ones(zeros.shape, jnp.int32),
        scored=inputs["scored"], source_token_logprob=zeros, sampler_token_logprob=zeros,
        reference_token_logprob=zeros, source_logprob=inputs["source_logprob"][:, None],
        advantage=advantage[:, None], capability_ratio=ratio[learner, source][:, None],
        source=source[:, None], valid=valid[:, None],
    )  # fmt: skip
    divisors = hacpo.denominators(batch, learner, settings)

    def loss(logprob: jax.Array) -> tuple[jax.Array, hacpo.Diagnostics]:
        # The file's own samples keep their stored source at update 0 too.
        return hacpo.loss(logprob, batch, learner, update_index, divisors, settings, exact_first_visit=False)

    (value, diagnostics), gradient = jax.value_and_grad(loss, has_aux=True)(logprob)
    return {
        "capability": capability, "omega": 1 / ratio, "advantage": advantage, "baseline": baseline,
        "ratio": diagnostics.ratio[:, 0], "objective": diagnostics.objective[:, 0], "loss": value,
        "gradient": gradient,
    }  # fmt: skip


def errors(case: dict, where: str, dtype: type) -> dict[str, tuple[float, float, float]]:
    """Per quantity: largest absolute error, its excess over the file's rounding, and it relative to the magnitude."""
    result, expect = evaluate(case, where, dtype), case["expect"]
    found = {}
    for name, value in result.items():
        wanted = np.asarray(expect[QUANTITIES[name]], np.float64)
        if wanted.shape != value.shape:
            raise UserError(f"{where}: expect.{QUANTITIES[name]} has shape {wanted.shape}, not {value.shape}")
        # A loss is a mean of objectives that may cancel: their size is what rounding is measured by.
        scale = np.abs(np.asarray(expect["objective"] if name == "loss" else wanted, np.float64)).max(initial=0.0)
        error = np.nan_to_num(np.abs(value - wanted), nan=np.inf)
        worst, excess = error.max(initial=0.0), (error - FILE_ROUNDING * np.abs(wanted)).max(initial=0.0)
        found[name] = (worst, excess, worst / scale if scale else worst)
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python scripts/check_objective.py FILE", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    jax.config.update("jax_enable_x64", True)
    try:
        cases = json.loads(path.read_text())
        worst: dict[str, list[float]] = {name: [0.0, 0.0, 0.0] for name in QUANTITIES}
        failed = []
        for case_name, case in cases.items():
            exact = errors(case, case_name, np.float64)
            single = errors(case, case_name, np.float32)
            for name in QUANTITIES:
                row = (exact[name][0], single[name][0], single[name][2])
                worst[name] = [max(old, new) for old, new in zip(worst[name], row, strict=True)]
                if exact[name][1] > FLOAT64_TOLERANCE or row[2] > FLOAT32_TOLERANCE:
                    failed.append(f"{case_name}: {name}: float64 {row[0]:.1e}, float32 relative {row[2]:.1e}")
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, UserError) as error:
        print(f"error: {path}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        print(f"error: {path}: not a vectors file: {type(error).__name__} {error}", file=sys.stderr)
        return 2
    print(f"{len(cases)} cases, largest error\n{'quantity':<12}{'float64':>10}{'float32':>10}{'float32 relative':>18}")
    for name, row in worst.items():
        print(f"{name:<12}{row[0]:>10.1e}{row[1]:>10.1e}{row[2]:>18.1e}")
    for line in failed:
        print(f"above tolerance: {line}")
    print("FAILED" if failed else "ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
