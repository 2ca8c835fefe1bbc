"""hacpo.py against PyTorch: stored outputs, live comparison, other trainers' definitions, and the golden vectors."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import VARIANTS, all_cases, double_precision, evaluate, make_case

from hacrl_jax import hacpo

ROOT = Path(__file__).parent.parent
REFERENCES = json.loads((ROOT / "tests" / "references" / "objective.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def x64():
    with double_precision():
        yield


def torch_objective():
    pytest.importorskip("torch", reason="the live comparison needs PyTorch")
    import torch_objective

    return torch_objective


def assert_close(result, expect, *, exact):
    assert result.keys() == expect.keys()
    for key, value in result.items():
        wanted = np.asarray(expect[key])
        scale = np.abs(expect["objective"] if key == "loss" else wanted).max(initial=0)
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-10 if exact else 2e-5 * scale, err_msg=key)


@pytest.mark.parametrize("name", REFERENCES)
def test_stored_references(name):
    assert_close(evaluate(REFERENCES[name]["case"]), REFERENCES[name]["expect"], exact=True)


@pytest.mark.parametrize("name", [
    name if name in ("hacpo", "grpo", "kl_k3", "tis") else pytest.param(name, marks=pytest.mark.slow)
    for name in REFERENCES
])  # fmt: skip
def test_stored_references_in_float32(name):
    assert_close(evaluate(REFERENCES[name]["case"], np.float32), REFERENCES[name]["expect"], exact=False)


def test_stored_references_are_those_of_the_script():
    reference = torch_objective()
    cases = all_cases()
    assert cases.keys() == REFERENCES.keys()
    for name, case in cases.items():
        assert_close(reference.evaluate(case), REFERENCES[name]["expect"], exact=True)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(1000, 10**6), name=st.sampled_from(sorted(VARIANTS)))
def test_live_comparison(seed, name):
    reference = torch_objective()
    case = make_case(seed, *VARIANTS[name])
    assert_close(evaluate(case), reference.evaluate(case), exact=True)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type, aggregation, beta", [
    ("grpo", "sequence_mean", 0.0), ("grpo", "sequence_mean", 0.04), ("bnpo", "token_mean", 0.0),
    ("dr_grpo", "constant", 0.0),
])  # fmt: skip
def test_trl(level, loss_type, aggregation, beta):
    """TRL's KL is aggregated like its objective; ours is a token mean per sequence: the same for `grpo` only."""
    reference = torch_objective()
    import torch

    eps = (0.2, 0.28) if level == "token" else (3e-4, 4e-4)
    ours = {
        "cross": "none", "ratio": level, "eps_low": eps[0], "eps_high": eps[1], "aggregation": aggregation,
        "kl_coefficient": beta, "aggregation_constant": 8 * 6 if aggregation == "constant" else 0,
    }  # fmt: skip
    case = make_case(7, ours, 1, 1) | {"valid": [True] * 8}
    result = evaluate(case)
    tensors = {key: reference.tensor(case[f"{key}_token_logprob"]) for key in ("source", "reference")}
    logprob = reference.tensor(case["token_logprob"]).requires_grad_()
    mask = (torch.arange(6) < torch.tensor(case["length"])[:, None]).double()
    value = reference.grpo_trl(
        logprob, tensors["source"], tensors["reference"], mask, reference.tensor(result["advantage"]), level=level,
        loss_type=loss_type, eps_low=eps[0], eps_high=eps[1], beta=beta, max_completion_length=6,
    )  # fmt: skip
    value.backward()
    np.testing.assert_allclose(result["loss"], float(value.detach()), atol=1e-12)
    np.testing.assert_allclose(result["gradient"], logprob.grad.numpy(), atol=1e-12)


def test_verl_gspo():
    reference = torch_objective()
    import torch

    case = make_case(9, {"cross": "none"}, 1, 1) | {"valid": [True] * 8}
    result = evaluate(case)
    logprob = reference.tensor(case["token_logprob"]).requires_grad_()
    mask = (torch.arange(6) < torch.tensor(case["length"])[:, None]).double()
    value = reference.gspo_verl(
        logprob, reference.tensor(case["source_token_logprob"]), mask, reference.tensor(result["advantage"]),
        eps_low=3e-4, eps_high=4e-4,
    )  # fmt: skip
    value.backward()
    np.testing.assert_allclose(result["loss"], float(value.detach()), atol=1e-12)
    np.testing.assert_allclose(result["gradient"], logprob.grad.numpy(), atol=1e-12)


def test_a_ratio_worked_by_hand():
    new, old = jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.2, -1.9, -0.6])
    ratio = hacpo.sequence_ratio(new.mean(), old.mean(), 10.0)
    assert float(ratio) == pytest.approx(1.0689, abs=5e-5)
    assert float(ratio) == pytest.approx(np.exp(0.2 / 3), abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_straight_through"])
def test_kl_estimators_in_expectation(estimator):
    """In exact expectation k1 and k3 have the value of the KL, k2 and the straight-through its gradient."""
    theta, reference = jnp.array([0.3, -0.4, 0.9, 0.1]), jax.nn.log_softmax(jnp.array([0.0, 0.5, 0.2, -0.3]))

    def exact(theta):
        logp = jax.nn.log_softmax(theta)
        return (jnp.exp(logp) * (logp - reference)).sum()

    def estimate(theta):  # the samples' weights are constants, as in training
        logp = jax.nn.log_softmax(theta)
        return (jax.lax.stop_gradient(jnp.exp(logp)) * hacpo.kl_estimate(logp, reference, estimator)).sum()

    if estimator != "k2":
        assert float(estimate(theta)) == pytest.approx(float(exact(theta)), abs=1e-12)
    agrees = np.allclose(jax.grad(estimate)(theta), jax.grad(exact)(theta), atol=1e-12)
    assert agrees == (estimator in ("k2", "k3_straight_through"))


def test_kl_is_divided_by_all_sequences_of_the_minibatch():
    case = make_case(3, {"kl_coefficient": 0.5}, 1, 2)
    with_kl, without = evaluate(case), evaluate(case | {"settings": case["settings"] | {"kl_coefficient": 0.0}})
    d = np.asarray(case["token_logprob"]) - np.asarray(case["reference_token_logprob"])
    inside = np.arange(d.shape[1]) < np.asarray(case["length"])[:, None]
    k3 = np.where(inside, np.exp(-d) - 1 + d, 0).sum(1) / np.asarray(case["length"])
    own = np.asarray(case["valid"]) & (np.asarray(case["source"]) == case["learner"])
    assert with_kl["loss"] - without["loss"] == pytest.approx(0.5 * k3[own].sum() / np.sum(case["valid"]), abs=1e-12)


@pytest.mark.slow
def test_golden_vectors_pass_the_script(shared):
    script = ROOT / "scripts" / "check_objective.py"
    command = [sys.executable, str(script), str(shared / "golden" / "hacpo_objective.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for quantity in ("capability", "omega", "advantage", "baseline", "ratio", "objective", "loss", "gradient"):
        assert quantity in done.stdout


@pytest.mark.parametrize("key", [None, "advantage", "objective", "loss", "grad_token_logprob"])
def test_the_script_fails_on_wrong_vectors(shared, tmp_path, key):
    case = json.loads((shared / "golden" / "hacpo_objective.json").read_text())["late_update"]
    if key:
        wrong = np.asarray(case["expect"][key])
        case["expect"][key] = (wrong + 3e-9 * (np.arange(wrong.size).reshape(wrong.shape) == 0)).tolist()
    (tmp_path / "vectors.json").write_text(json.dumps({"late_update": case}))
    assert script().main([str(tmp_path / "vectors.json")]) == (1 if key else 0)


def test_the_script_names_what_it_cannot_read(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"a": {"settings": {"loss": {"gamma": 1}}}}')
    assert script().main([str(tmp_path / "a.json")]) == 2
    assert "gamma" in capsys.readouterr().err
    (tmp_path / "b.json").write_text('{"a": {"settings": {}}}')
    assert script().main([str(tmp_path / "b.json")]) == 2
    assert script().main([str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def script():
    spec = importlib.util.spec_from_file_location("check_objective", ROOT / "scripts" / "check_objective.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
