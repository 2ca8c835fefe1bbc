"""`hacrl eval` on the embedded agents: benchmarks, interruptions, comparisons; and `hacrl data inspect`."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import hacrl_jax
from hacrl_jax import agent as policy
from hacrl_jax import checkpoint, cli, evaluate, metrics, resuming
from hacrl_jax import config as configs
from hacrl_jax.sharding import make_mesh
from hacrl_jax.tasks import data as tasks
from hacrl_jax.types import UserError

AGENTS = Path(hacrl_jax.__file__).parent / "agents"
ADA, BOB = AGENTS / "tiny-qwen3-a", AGENTS / "tiny-qwen3-b"


@pytest.fixture
def hacrl(capsys):
    def call(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(list(map(str, arguments)))
        return (caught.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def benchmark(tmp_path):
    """Six sums as the embedded agents know them, as rows with question and answer."""
    rows = [
        {"question": rf"What is {a}+{a + 3}? Answer in \boxed{{}}.", "answer": str(2 * a + 3), "id": 10 * a}
        for a in range(2, 8)
    ]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_sets_ask_as_the_paper_does(tmp_path):
    config, checkpoints = evaluate.target(str(ADA), ["rollout.max_response=64"])
    assert checkpoints is None and config.agents[0].name == "tiny-qwen3-a" and config.rollout.max_response == 64
    aime, other = (evaluate.benchmark(config, f"data/{name}.jsonl") for name in ("AIME24", "math500"))
    assert (aime.samples, aime.temperature) == (30, 1.0)
    assert (other.samples, other.temperature) == (1, 0.0)
    assert other.data.instruction == evaluate.INSTRUCTION
    assert evaluate.benchmark(config, "x.jsonl", samples=4, temperature=0.5, instruction="").temperature == 0.5
    with pytest.raises(UserError, match="nowhere"):
        evaluate.target("nowhere", [])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "eval.sets is empty"),
        (["--on", "none.jsonl"], "none.jsonl does not exist"),
        (["--on", "arithmetic", "--agent", "zoe"], "--agent zoe"),
        (["--on", "arithmetic", "--on", "arithmetic"], "same name"),
        (["--on", "arithmetic", "--against", "none.jsonl"], "none.jsonl does not exist"),
    ],
)
def test_mistakes_are_one_line(hacrl, more, said):
    status, out, err = hacrl("eval", ADA, *more)
    assert status == 2 and out == "" and err.count("\n") == 1 and said in err


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on_and_ends_with_the_same_table(tmp_path, hacrl, benchmark):
    ask = (
        "eval",
        ADA,
        "rollout.prompts=4",
        "--on",
        benchmark,
        "--samples",
        3,
        "--max-response",
        24,
        "--instruction",
        "",
    )
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    status, table, _ = hacrl(*ask, "--to", whole)
    rows = metrics.read(whole)
    assert status == 0 and len(rows) == 18 and {row["problem"] for row in rows} == {10 * a for a in range(2, 8)}
    assert 0 < sum(row["reward"] for row in rows) < 18  # or the comparison below would say little
    assert "avg@3" in table and "pass@3" in table and "maj@3" in table and "6 problems, 3 answers each" in table

    lines = whole.read_text().splitlines(keepends=True)
    broken.write_text("".join(lines[:7]) + lines[7][:20])  # killed while it wrote the third problem
    broken.with_name("broken.jsonl.settings.json").write_text(whole.with_name("whole.jsonl.settings.json").read_text())
    status, again, err = hacrl(*ask, "--to", broken)
    assert status == 0 and again == table and "4 problems" in err
    assert broken.read_text() == whole.read_text()

    status, out, err = hacrl(*ask, "--to", broken)  # nothing is left to do
    assert (status, out, err) == (0, table, "")
    assert hacrl("eval", broken)[1] == table
    status, out, err = hacrl(*ask, "--temperature", 0.5, "--to", broken)
    assert status == 2 and "other settings (sets)" in err and broken.read_text() == whole.read_text()
    whole.with_name("whole.jsonl.settings.json").unlink()
    assert "settings.json" in hacrl(*ask, "--to", whole)[2]


@pytest.mark.slow
def test_agents_of_a_config_as_a_team_and_compared(tmp_path, hacrl, benchmark):
    (tmp_path / "two.yaml").write_text(json.dumps({
        "name": "two", "agents": [{"name": "ada", "model": str(ADA)}, {"name": "bob", "model": str(BOB)}], "data": {},
        "rollout": {"prompts": 4, "max_response": 24}, "minibatch": 4,
        "eval": {"sets": [{"data": {"source": str(benchmark)}}]},
    }))  # fmt: skip
    answers = tmp_path / "greedy.jsonl"
    out = hacrl("eval", tmp_path / "two.yaml", "--to", answers, "--json")[1]
    ada, bob, team = map(json.loads, out.splitlines())
    correct = {(row["agent"], row["problem"]): row["reward"] for row in metrics.read(answers)}
    ids = sorted({problem for _, problem in correct})
    for row, name in ((ada, "ada"), (bob, "bob")):
        assert row["agent"] == name and row["eval/sums/avg@1"] == pytest.approx(sum(correct[name, i] for i in ids) / 6)
    assert team["team/pass@1"] == pytest.approx(sum(max(correct["ada", i], correct["bob", i]) for i in ids) / 6)
    out = hacrl("eval", answers, "--against", answers, "--json")[1]
    changes = [json.loads(line) for line in out.splitlines()][3:]
    assert [(row["before"], row["wins"], row["ties"], row["p_value"]) for row in changes] == [
        ("ada", 0, 6, 1.0), ("bob", 0, 6, 1.0),
    ]  # fmt: skip


def checkpoints(folder, data):
    """A run folder whose step 1 holds the model as it is and whose step 2 a policy that always says the same."""
    config = configs.resolve({
        "name": "run", "runs": str(folder), "agents": [{"name": "ada", "model": str(ADA)}],
        "data": {"source": str(data)}, "minibatch": 4,
        "rollout": {"prompts": 4, "samples": 1, "max_prompt": 8, "max_response": 24},
    })  # fmt: skip
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(configs.dump(config))
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh), checkpoint.Store(resuming.place(config, run), config.checkpoint) as store:
        agent = policy.create(config, 0, mesh, 1)
        initial, (problems, _) = resuming.first_weights([agent]), tasks.problems(config.data)
        for step in (1, 2):
            mark = resuming.Mark(step, np.zeros((1, 1)), {}, True, {})
            record = resuming.record(config, [agent], initial, problems, mark)
            store.save(step, {"ada": resuming.saved(agent)}, record)
            store.wait()
            agent.state = agent.state.replace(trainable=jax.tree.map(lambda x: 0 * x, agent.state.trainable))
    return run


@pytest.mark.slow
def test_any_checkpoint_of_a_run(tmp_path, hacrl, benchmark):
    run = checkpoints(tmp_path, benchmark)

    def responses(target, *more):
        to = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        assert hacrl("eval", target, "--on", benchmark, "--max-response", 24, "--to", to, *more)[0] == 0
        found = metrics.read(to)
        return {row["step"] for row in found}, [row["response"] for row in found]

    first, newest = responses(run, "--step", 1), responses(run)
    assert first[0] == {1} and newest[0] == {2} and len(set(newest[1])) == 1
    assert first[1] == responses(ADA, "--instruction", "")[1]  # greedy: the step has no say
    assert "holds steps 1, 2" in hacrl("eval", run, "--on", benchmark, "--step", 9)[2]


def test_inspect_measures_prompts_for_every_agent_of_a_config(tmp_path, hacrl):
    rows = [{"question": "1 + 1 =", "answer": "2"}, {"question": "2 + 2 =" * 20, "answer": "4"}]
    rows += [rows[0], {**rows[0], "answer": "3"}, *[{"question": f"{i}?", "answer": ""} for i in range(7)]]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(json.dumps({
        "name": "c",
        "agents": [{"name": "ada", "model": str(ADA)}, {"name": "lia", "model": str(AGENTS / "tiny-llama")}],
        "data": {"source": str(tmp_path / "d.jsonl")}, "rollout": {"max_prompt": 40},
        "eval": {"sets": [{"data": {"source": "arithmetic", "split": "test", "arithmetic": {"size": 30}}}]},
    }))  # fmt: skip
    status, out, _ = hacrl("data", "inspect", tmp_path / "c.yaml")
    assert status == 0 and "d: 11 rows, 4 problems" in out and "arithmetic: 30 rows, 30 problems" in out
    assert "dropped, empty gold answer: 7" in out and "and 2 more" in out
    assert "repeated questions: 2; with different gold answers: 1" in out
    assert "prompt tokens for ada" in out and "prompt tokens for lia" in out and "over 40 for any of them: 1" in out
    status, out, _ = hacrl("data", "inspect", tmp_path / "d.jsonl", "--config", tmp_path / "c.yaml", "--json")
    found = json.loads(out)
    assert set(found["prompt_tokens"]) == {"ada", "lia"} and len(found["dropped"]["empty gold answer"]) == 7
    (tmp_path / "d.jsonl").write_text('{"question": "1?", "answer": ""}\n')
    status, out, _ = hacrl("data", "inspect", tmp_path / "d.jsonl")
    assert status == 0 and "1 rows, 0 problems" in out and "dropped, empty gold answer: 1" in out
