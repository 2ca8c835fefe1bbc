"""`hacrl export`: what goes in comes out, trained agents load elsewhere, and nothing is ever half there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from hacrl_jax import agent as policy
from hacrl_jax import checkpoint, cli, config, export, models, resuming, sharding
from hacrl_jax.models import hf, tensors
from hacrl_jax.types import UserError

AGENTS = Path(export.__file__).parent / "agents"
SOURCES = {"full": AGENTS / "tiny-qwen3-b", "low": AGENTS / "tiny-llama"}


def weights(folder: Path) -> dict[str, tuple[str, bytes]]:
    scanned = tensors.scan(folder)
    return {name: (one.code, one.read(slice(0, one.shape[0])).tobytes()) for name, one in scanned.items()}


def saved_run(runs: Path, change, steps=(1,)) -> Path:
    """A run folder as training leaves it, of an agent in full and one with low-rank updates.

    change(step, trainable leaf) stands for the training.
    """
    settings = config.resolve({
        "name": "r", "runs": str(runs), "minibatch": 4, "data": {"source": "arithmetic"},
        "agents": [
            {"name": "full", "model": str(SOURCES["full"])},
            {"name": "low", "model": str(SOURCES["low"]), "lora": {"rank": 4}},
        ],
        "rollout": {"prompts": 4, "samples": 2, "max_prompt": 40, "max_response": 16},
        "checkpoint": {"keep_last": 3},
    })  # fmt: skip
    run = runs / "r"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.dump(settings), "utf-8")
    mesh = sharding.make_mesh(settings.mesh)
    with jax.set_mesh(mesh), checkpoint.Store(resuming.place(settings, run), settings.checkpoint) as store:
        agents = [policy.create(settings, k, mesh, 1) for k in range(2)]
        initial = resuming.first_weights(agents)
        for step in steps:
            for one in agents:
                moved = jax.tree.map(lambda x, step=step: change(step, x), one.state.trainable)
                one.state = one.state.replace(trainable=moved)
            store.save(step, {one.name: resuming.saved(one) for one in agents}, {"initial": initial})
    return run


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    return saved_run(tmp_path_factory.mktemp("runs"), lambda _, x: x)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """Three steps that add 0.01 each to whatever is trained."""
    return saved_run(tmp_path_factory.mktemp("runs"), lambda _, x: x + 0.01, steps=(1, 2, 3))


@pytest.mark.parametrize("agent", SOURCES)
def test_without_training_every_byte_comes_back(untouched, tmp_path, agent):
    done = export.export(untouched, agent, tmp_path / "out")
    source = SOURCES[agent]
    assert (done.step, done.folder) == (1, tmp_path / "out")
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in done.folder.iterdir()} == names | {"README.md"}
    for name in names:
        if name != tensors.SINGLE:
            assert (done.folder / name).read_bytes() == (source / name).read_bytes()
    assert weights(done.folder) == weights(source)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_have_an_index(untouched, tmp_path):
    export.export(untouched, "full", tmp_path / "out", shard_bytes=200_000)
    index = json.loads((tmp_path / "out" / tensors.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert weights(tmp_path / "out") == weights(SOURCES["full"])


def test_the_newest_step_or_the_one_asked_for(moved, tmp_path):
    start = hf.load(SOURCES["full"])[2]
    for step, wanted in ((None, 3), (2, 2)):
        done = export.export(moved, "full", tmp_path / str(wanted), step=step)
        assert done.step == wanted
        got = hf.load(done.folder)[2]
        jax.tree.map(lambda a, b, n=wanted: np.testing.assert_allclose(a - b, 0.01 * n, atol=1e-5), got, start)


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    run = saved_run(tmp_path, lambda _, x: x + 0.01, steps=(1, 2))
    files = [file for file in (run / "checkpoints" / "step_2").rglob("d/*") if file.is_file()]
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    said = []
    assert export.export(run, "full", tmp_path / "out", say=said.append).step == 1
    assert any("step 2 is damaged" in line for line in said)
    with pytest.raises(UserError, match="step 2"):
        export.export(run, "full", tmp_path / "other", step=2)
    assert not (tmp_path / "other").exists()


def test_low_rank_updates_are_merged(moved, tmp_path):
    tokens = jnp.arange(1, 21)[None]
    merged_def, model, merged = hf.load(export.export(moved, "low", tmp_path / "out").folder)
    lora = config.LoraConfig(rank=4)
    graphdef, _, params = hf.load(SOURCES["low"], lora=lora)
    params = jax.tree.map(lambda x, low: x + 0.03 if low else x, params, models.trainable(params))
    place = jnp.arange(20)[None]
    want = models.logits(params, models.apply(graphdef, params, tokens, place)[0])
    got = models.logits(merged, models.apply(merged_def, merged, tokens, place)[0])
    np.testing.assert_allclose(got, want, atol=1e-4 * float(jnp.abs(want).max()))
    assert model == hf.read_config(SOURCES["low"])
    assert set(weights(tmp_path / "out")) == set(weights(SOURCES["low"]))


def test_the_card_tells_partners_steps_and_evaluation(moved, tmp_path):
    key = "eval/sums/avg@4"
    rows = [
        {"step": step, "agent": "full", key: value, key + "/stderr": 0.01, "eval/sums/problems": 9}
        for step, value in ((0, 0.25), (2, 0.5), (3, 0.75))
    ]
    (moved / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = (export.export(moved, "full", tmp_path / "two", step=2).folder / "README.md").read_text()
    (moved / "metrics.jsonl").unlink()
    head, body = text.removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    assert "# full" in body and "`tiny-qwen3-b`" in body and "- low: `tiny-llama`" in body and "HACPO" in body
    assert "| steps | 2 |" in body and "| sums/avg@4 | 0.250 ± 0.010 | 0.500 ± 0.010 | 2 |" in body
    assert "0.75" not in body
    assert "not evaluated" in (export.export(moved, "low", tmp_path / "low").folder / "README.md").read_text()


def test_a_license_goes_along(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\nlicense_link: x\npipeline_tag: other\n---\n# Base\n")
    agent = config.AgentConfig(name="a", model="some/model")
    found = export._front_matter(agent, tmp_path)
    assert (found["license"], found["base_model"], found["pipeline_tag"]) == (
        "apache-2.0", "some/model", "text-generation",
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"run": "nowhere"}, "not a run folder"),
        ({"agent": "ful"}, "--agent ful: .* has full, low"),
        ({"step": 7}, "--step 7: .* has checkpoints of steps 1$"),
        ({"to": "taken"}, "already exists"),
        ({"run": "empty"}, "no complete checkpoint"),
        ({"run": "other"}, "other weights"),
        ({"run": "rank"}, "other weights|do not fit"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(untouched, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    text = (untouched / "config.yaml").read_text()
    changes = {"empty": text, "other": text.replace("tiny-qwen3-b", "tiny-qwen3-a"),
               "rank": text.replace("lora: null", "lora: {rank: 2}")}  # fmt: skip
    for name, changed in changes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(changed)
        if name != "empty":
            (tmp_path / name / "checkpoints").symlink_to(untouched / "checkpoints")
    before = sorted(map(str, tmp_path.rglob("*")))
    with pytest.raises(UserError, match=said):
        export.export(**({"run": untouched, "agent": "full", "to": "out"} | arguments))
    assert sorted(map(str, tmp_path.rglob("*"))) == before


KILLED = """
import sys, time
from hacrl_jax import export
from hacrl_jax.models import tensors
write = tensors._write_file
def slow(file, shard, value):
    def wait(name):
        print("writing", flush=True)
        time.sleep(60)
        return value(name)
    write(file, shard, wait)
tensors._write_file = slow
export.export(sys.argv[1], "full", sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_export_leaves_nothing(untouched, tmp_path):
    command = [sys.executable, "-c", KILLED, str(untouched), str(tmp_path / "out")]
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ))
        assert process.stdout.readline() == b"writing\n"
        time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(60) != 0
        left = list(tmp_path.iterdir())
        assert left == [] if number != signal.SIGKILL else len(left) == 1 and left[0].name.startswith(".out.partial-")
    export.export(untouched, "full", tmp_path / "out")  # clears away what nobody could
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_trained_agents_load_in_transformers_with_equal_logits(finished_run, tmp_path):
    """One agent trained in full, the other by low-rank updates, in one run."""
    torch = pytest.importorskip("torch", reason="torch is not installed: the exported folders are not loaded with it")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert [one.config.agents[one.index].lora is None for one in finished_run.agents] == [True, False]
    for one in finished_run.agents:
        done = export.export(finished_run.folder, one.name, tmp_path / one.name)
        assert done.step == finished_run.config.steps
        assert weights(done.folder) != weights(one.folder)
        ids = AutoTokenizer.from_pretrained(done.folder)("What is 7+8? Answer in \\boxed{}.").input_ids
        theirs = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32)
        with torch.no_grad():
            want = theirs(torch.tensor([ids])).logits[0].numpy()
        with jax.set_mesh(one.mesh):
            tokens = jnp.asarray([ids])
            hidden, _ = models.apply(one.graphdef, one.params, tokens, jnp.arange(len(ids))[None])
            got = np.asarray(models.logits(one.params, hidden))[0]
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_on_the_command_line(untouched, tmp_path, capsys):
    for arguments, status in (["--agent", "full"], 0), (["--agent", "nobody"], 2), (["--agent", "full"], 2):
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", str(untouched), *arguments, "--to", str(tmp_path / "out")])
        out, err = capsys.readouterr()
        assert ended.value.code == status
        assert (out.startswith("full after step 1: ") and not err) if status == 0 else err.count("\n") == 1
