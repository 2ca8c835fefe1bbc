"""The presets and the paper's configurations say what the paper, its authors' code and the algorithms' papers say."""

from pathlib import Path

import pytest

from hacrl_jax.config import PRESETS, load, resolve
from hacrl_jax.types import UserError

PAPER = Path(__file__).parent.parent / "configs" / "paper"
PAIRS = {  # (alpha, lower bound, step) by the models' names, as the paper's table has them
    ("Qwen3-4B", "Qwen3-4B-Instruct-2507"): (3, 0.8, 0.01),
    ("Qwen3-1.7B-Base", "Qwen3-4B-Base"): (1, 0.8, 0.025),
    ("Qwen3-4B-Base", "Qwen3-8B-Base"): (3, 0.8, 0.025),
    ("Llama-3.2-1B-Instruct", "Llama-3.2-3B-Instruct"): (1, 0.9, 0.01),
    ("Qwen3-1.7B-Base", "Llama-3.2-1B-Instruct"): (1, 0.8, 0.025),
    ("Qwen3-4B-Base", "Llama-3.2-3B-Instruct"): (1, 0.8, 0.025),
}
RAW = {
    "name": "t", "agents": [{"name": "a", "model": "x"}, {"name": "b", "model": "y"}],
    "data": {"source": "arithmetic"},
}  # fmt: skip


def objective(*presets):
    return resolve(RAW | {"preset": list(presets)}).objective


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.yaml")), ids=lambda path: path.stem)
def test_paper_configurations(path):
    config = load(path)
    alpha, lower, step = PAIRS[tuple(agent.model.split("/")[1] for agent in config.agents)]
    assert (config.objective.alpha, config.objective.delta_step) == (alpha, step)
    assert config.objective.delta == pytest.approx(1 - lower)
    assert (config.rollout.max_prompt, config.rollout.max_response, config.rollout.temperature) == (1024, 4096, 1.0)
    assert (config.rollout.prompts, config.minibatch, config.rollout.samples, config.epochs) == (128, 64, 8, 1)
    assert (config.objective.capability_window, config.objective.kl_coefficient) == (5, 0.001)
    assert (config.eval.every, config.eval.final_max_response) == (3, 8192)
    assert [(s.temperature, s.samples) for s in config.eval.sets] == [(0.0, 1)]
    for agent in config.agents:
        o = agent.optimizer
        assert (o.lr, o.schedule, o.weight_decay, o.grad_clip, o.b1, o.b2) == (1e-6, "constant", 0.01, 1.0, 0.9, 0.999)
        assert agent.prompt.template_args == {"enable_thinking": False}


def test_every_pair_has_a_configuration():
    found = {tuple(a.model.split("/")[1] for a in load(path).agents) for path in PAPER.glob("*.yaml")}
    assert found == set(PAIRS)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name):
    resolve(RAW | {"preset": name})


def test_algorithms_are_settings():
    grpo = objective("grpo")
    assert (grpo.ratio, grpo.eps_low, grpo.eps_high, grpo.cross) == ("token", 0.2, 0.28, "none")
    dr_grpo = objective("dr_grpo")
    assert (dr_grpo.aggregation, dr_grpo.advantage_by_std) == ("constant", False)
    gspo = objective("gspo")
    assert (gspo.ratio, gspo.eps_low, gspo.eps_high, gspo.cross) == ("sequence", 3e-4, 4e-4, "none")
    plain, double = resolve(RAW | {"preset": "gspo"}), resolve(RAW | {"preset": "gspo_x2"})
    assert double.objective == plain.objective
    assert double.rollout.samples == 2 * plain.rollout.samples == 16
    assert double.updates_per_step() == 2 * plain.updates_per_step()
    naive = objective("naive")
    assert (naive.cross, naive.capability_baseline) == ("naive", False)
    assert objective("hacpo") == objective()


def test_every_ablation_differs_from_hacpo_in_one_setting():
    full = objective("hacpo").model_dump()
    for name in PRESETS:
        if name.startswith("hacpo_"):
            changed = {key for key, value in objective(name).model_dump().items() if full[key] != value}
            assert len(changed) == (0 if name == "hacpo_alpha_1" else 1), (name, changed)


def test_paper_and_authors():
    assert objective("paper").capability == "mean_reward"
    authors = objective("authors")
    assert (authors.eos, authors.cross_too_long, authors.capability) == ("excluded", "truncate", "positive_rate")
    assert (authors.kl_coefficient, authors.kl_estimator, authors.order) == (0.001, "k3", "own_first")


def test_a_preset_on_the_command_line_lies_over_the_file_and_under_other_overrides():
    path = PAPER / "qwen3_4b_and_8b.yaml"
    assert load(path, ["preset=hacpo_alpha_0"]).objective.alpha == 0
    assert load(path, ["objective.alpha=2.0", "preset=[authors,hacpo_alpha_0]"]).objective.alpha == 2
    double = load(path, ["preset=gspo_x2"])
    assert (double.minibatch, double.rollout.samples, double.preset) == (32, 16, ("gspo_x2",))
    with pytest.raises(UserError, match="no preset 'gpso'"):
        load(path, ["preset=gpso"])


def test_a_schedule_that_closes_is_refused():
    five = RAW | {"agents": [{"name": name, "model": name} for name in "abcde"]}
    with pytest.raises(UserError, match="reaches 1 by update 9"):
        resolve(five)
    resolve(five | {"objective": {"allow_closed_clip": True}})
    resolve(five | {"objective": {"delta_step": 0.02}})
