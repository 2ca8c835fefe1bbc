"""Algorithm 1 end to end on the embedded agents: what a run leaves, what is exact, what is refused."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import small_run
import yaml

import hacrl_jax
from hacrl_jax import algorithm, cli, frame, metrics
from hacrl_jax.agent import Agent
from hacrl_jax.types import UserError

COMPILED = []  # names of programs, as they are compiled
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **details: (
        COMPILED.append(details.get("fun_name")) if event.endswith("backend_compile_duration") else None
    )
)


def rows(folder: Path, drop: tuple[str, ...] = ("time/", "tokens_per_second")) -> list[dict]:
    return [
        {key: value for key, value in row.items() if not drop or not key.startswith(drop)}
        for row in metrics.read(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three agents, two tokenizers, five steps of one own update each; programs compiled after step 2 are counted."""
    runs, after = tmp_path_factory.mktemp("runs"), {}
    agents = {
        "qwen": {"model": str(small_run.AGENTS / "tiny-qwen3-b")},
        "other": {"name": "other", "model": str(small_run.AGENTS / "tiny-qwen3-b"), "optimizer": {"lr": 2e-3}},
    }
    config = small_run.config(runs, name="team", steps=5, checkpoint={"every": 0}, agents={"qwen": agents["qwen"]})
    other = config.agents[0].model_copy(update={"name": "other"})
    config = config.model_copy(update={"agents": (*config.agents, other)})
    step = algorithm.train_step

    def counted(problems, number, *arguments):
        result = step(problems, number, *arguments)
        after[number] = len(COMPILED)
        return result

    algorithm.train_step = counted
    try:
        summary = hacrl_jax.train(config, show=False)
    finally:
        algorithm.train_step = step
    return summary.folder, config, after


@pytest.mark.slow
class TestRun:
    def test_every_step_and_agent_has_a_row_with_what_users_look_for(self, run):
        folder, config, _ = run
        names = [agent.name for agent in config.agents]
        found = rows(folder, ())
        assert [(row["step"], row["agent"]) for row in found] == [(s, name) for s in range(1, 6) for name in names]
        for row in found:
            for key in (
                "reward", "capability", "ratio/own/mean", "ratio/own/p05", "ratio/cross/mean", "ratio/cross/p95",
                "clip/own/low", "clip/cross/low", "clip/own/high", "clip/cross/high", "kl", "entropy", "grad_norm",
                "response_length", "stop_rate", "truncated", "dropped", "groups_without_signal", "time/generate",
                "time/verify", "time/exchange", "time/score", "time/update", "tokens_per_second", "score_mismatch",
            ):  # fmt: skip
                assert isinstance(row[key], int | float), key

    def test_own_samples_of_the_first_minibatch_have_ratio_exactly_one(self, run):
        folder, config, _ = run
        assert config.minibatch == config.rollout.prompts  # so each step's only own update is its first
        for row in rows(folder):
            assert [row[f"ratio/own/{key}"] for key in ("mean", "p05", "p50", "p95")] == [1.0] * 4
            assert row["score_mismatch"] < 1e-4 and abs(row["sampler_mismatch/mean"]) < 1e-4

    def test_nothing_is_compiled_after_the_second_step(self, run):
        _, _, after = run
        assert after[2] > 0 and COMPILED[after[2] : after[5]] == []

    def test_rollouts_read_like_a_table(self, run):
        folder, config, _ = run
        lines = [json.loads(line) for line in (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
        assert len(lines) == 3 * 8 * 4
        for line in lines:
            assert {"agent", "prompt", "response", "gold", "reward"} <= line.keys()
            assert (line["reward"] == 1.0) == (line["verdict"] == "equal")
        assert {line["agent"] for line in lines} == {agent.name for agent in config.agents}

    def test_capability_is_the_window_of_mean_rewards(self, run):
        folder, _, _ = run
        reward = {}
        for row in rows(folder):
            reward.setdefault(row["agent"], []).append(row["reward"])
            assert row["capability"] == pytest.approx(max(np.mean(reward[row["agent"]][-5:]), 1e-8))

    def test_the_resolved_config_is_saved(self, run):
        folder, config, _ = run
        saved = hacrl_jax.load(folder / "config.yaml")
        assert saved.agents == config.agents and saved.objective == config.objective


@pytest.mark.slow
def test_one_agent_is_plain_gspo(tmp_path):
    alone = {"agents": {}, "steps": 2, "objective": {"kl_coefficient": 0.0}}
    hacpo = small_run.config(tmp_path, name="hacpo", **alone)
    hacpo = hacpo.model_copy(update={"agents": hacpo.agents[:1]})
    gspo = small_run.config(tmp_path, name="gspo", **(alone | {"objective": {"kl_coefficient": 0.0, "cross": "none"}}))
    gspo = gspo.model_copy(update={"agents": gspo.agents[:1]})
    folders = [hacrl_jax.train(config, show=False).folder for config in (hacpo, gspo)]
    assert rows(folders[0]) == rows(folders[1])


def write(folder: Path, **changes) -> Path:
    config = small_run.config(folder / "runs", **changes)
    (folder / "c.yaml").write_text(hacrl_jax.config.dump(config))
    return folder / "c.yaml"


def mistake(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


def test_an_agent_without_weights_is_refused_by_name(tmp_path, capsys):
    folder = tmp_path / "agent"
    shutil.copytree(small_run.AGENTS / "tiny-qwen3-b", folder)
    (folder / "model.safetensors").unlink()
    path = write(tmp_path, agents={"qwen": {"model": str(folder)}})
    assert str(folder) in mistake(capsys, "train", str(path))
    assert not (tmp_path / "runs").exists()


def test_another_architecture_is_refused_by_name(tmp_path, capsys):
    folder = tmp_path / "agent"
    shutil.copytree(small_run.AGENTS / "tiny-qwen3-b", folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    (folder / "config.json").write_text(json.dumps(raw))
    path = write(tmp_path, agents={"qwen": {"model": str(folder)}})
    assert "Gemma" in mistake(capsys, "train", str(path))
    assert not (tmp_path / "runs").exists()


def test_a_broken_row_of_data_is_named_by_its_number(tmp_path, capsys):
    (tmp_path / "d.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2", "ans\n')
    raw = yaml.safe_load(write(tmp_path).read_text())
    raw["data"] = {"source": str(tmp_path / "d.jsonl")}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
    assert "row 2" in mistake(capsys, "train", str(tmp_path / "c.yaml"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["minibatch=3"], "minibatch 3"),
        (["mesh.data=3", "mesh.fsdp=-1"], "mesh"),
        (["agents.0.micro_batch=2", "mesh.fsdp=-1"], "micro_batch 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path, capsys, overrides, said):
    assert said in mistake(capsys, "train", str(write(tmp_path)), *overrides)
    assert not (tmp_path / "runs").exists()


def test_long_prompts_leave_for_all_agents_together(tmp_path):
    from hacrl_jax.tasks import data
    from hacrl_jax.tokenizer import load, render

    config = small_run.config(tmp_path)
    problems, _ = data.problems(config.data)
    tokenizers = [load(agent.model, agent.prompt) for agent in config.agents]
    lengths = np.asarray([[len(render(tok, problem)) for problem in problems] for tok in tokenizers])
    limit = int(np.median(lengths.max(axis=0)))
    rollout = config.rollout.model_copy(update={"max_prompt": limit})
    agents = [fake(tok, config.model_copy(update={"rollout": rollout})) for tok in tokenizers]
    kept, left_out = frame.readable(problems, agents)
    assert kept == [problems[i] for i in np.flatnonzero(lengths.max(axis=0) <= limit)]
    assert left_out == len(problems) - len(kept)
    tiny = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_prompt": 1})})
    with pytest.raises(UserError, match="max_prompt 1"):
        frame.readable(problems, [fake(tok, tiny) for tok in tokenizers])


def test_a_long_prompt_of_an_evaluation_is_told_before_training(tmp_path):
    from hacrl_jax.tasks import data
    from hacrl_jax.tokenizer import load, render

    test = {"source": "arithmetic", "split": "test", "arithmetic": {"digits": 1, "size": 8}}
    config = small_run.config(tmp_path, eval={"sets": [{"data": test}]})
    held_out = [(own, data.problems(own.data)[0]) for own in config.eval.sets]
    tok = load(config.agents[0].model, config.agents[0].prompt)
    longest = max(len(render(tok, problem)) for problem in held_out[0][1])

    def agent(limit):
        own = fake(tok, config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_prompt": limit})}))
        own.name = "ada"
        return own

    frame.check_held_out(held_out, [agent(longest)])
    said = rf"eval.sets arithmetic: \d+ of 8 prompts are .* {longest - 1} for agent ada; set it to {longest}"
    with pytest.raises(UserError, match=said):
        frame.check_held_out(held_out, [agent(longest - 1)])


def fake(tok, config) -> Agent:
    agent = object.__new__(Agent)
    agent.tokenizer, agent.config = tok, config
    return agent


def test_ability_keeps_its_window_and_counts_every_sample():
    ability = algorithm.Ability(np.zeros((0, 2)))
    objective = small_run.config(Path()).objective.model_copy(update={"capability_window": 2})
    for reward in ([[0, 1], [1, 1]], [[0, 0], [1, np.nan]], [[0.5, 2], [0, 0]]):
        ability = ability.observe(np.asarray(reward, float), objective)
    assert ability.history.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    graded = objective.model_copy(update={"capability": "mean_reward"})
    assert ability.observe(np.asarray([[0.5, 2.0], [0, 1]]), graded).history[-1].tolist() == [1.25, 0.5]
    with pytest.raises(UserError, match="positive_rate"):
        ability.observe(np.asarray([[-0.5, 2.0], [0, 1]]), graded)
