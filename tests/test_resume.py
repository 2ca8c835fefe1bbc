"""A run goes on as if nothing had happened, or says why it cannot."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import small_run

from hacrl_jax import checkpoint, metrics, resuming
from hacrl_jax.config import CheckpointConfig
from hacrl_jax.types import UserError

TORTURE = Path(__file__).parent.parent / "scripts" / "torture.py"


def dumped(**changes):
    return small_run.config(Path("runs"), **changes).model_dump(mode="json")


def test_equal_configs_do_not_differ():
    assert resuming.differences(dumped(), dumped()) == ([], [])


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"}, {"runs": "elsewhere"}, {"steps": 99}, {"eval": {"every": 3}}, {"checkpoint": {"every": 7}},
        {"journal": {"text": False}}, {"guard": {"grace": 5}}, {"verifier": {"workers": 4, "deadline": 9.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_what_cannot_change_the_agents_may_change(changes):
    assert resuming.differences(dumped(), dumped(**changes)) == ([], [])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 1}, "seed: was 0, is 1"),
        ({"minibatch": 4}, "minibatch"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature: was 1.0, is 0.5"),
        ({"objective": {"delta": 0.9}}, "objective.delta"),
        ({"verifier": {"policy": {"boxes": "all"}}}, "verifier.policy.boxes"),
        ({"agents": {"qwen": {"optimizer": {"lr": 1.0}}}}, "agents.qwen.optimizer.lr"),
        ({"agents": {"llama": {"lora": None}}}, "agents.llama.lora: was {'rank'"),
        ({"agents": {"qwen": {"name": "renamed"}}}, "agents.renamed: was absent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_matters_is_listed(changes, key):
    matters, rounding = resuming.differences(dumped(), dumped(**changes))
    assert any(line.startswith(key) for line in matters) and not rounding


def test_what_changes_the_order_of_additions_is_told_apart():
    changes = {"mesh": {"fsdp": 4}, "rollout": {"slots": 3}, "agents": {"qwen": {"micro_batch": 4, "remat": "full"}}}
    matters, rounding = resuming.differences(dumped(), dumped(**changes))
    assert not matters and len(rounding) == 4


def test_the_length_matters_where_the_learning_rate_depends_on_it():
    linear = {"agents": {"qwen": {"optimizer": {"schedule": "linear"}}}}
    assert resuming.differences(dumped(**linear), dumped(**linear, steps=99))[0] == ["steps: was 4, is 99"]


def test_checkpoints_elsewhere_are_named_after_the_run():
    here = small_run.config(Path("runs"))
    assert resuming.place(here, Path("runs/x")) == str(Path("runs/x/checkpoints"))
    away = small_run.config(Path("runs"), checkpoint={"folder": "gs://bucket/all/"})
    assert resuming.place(away, Path("runs/x")) == "gs://bucket/all/x"


def test_a_hub_model_is_pinned_to_its_commit_and_resumed_from_there(monkeypatch, tmp_path):
    commit, folder = "a" * 40, tmp_path / "small"
    models = {"qwen": {"model": "some/model"}}
    monkeypatch.setattr(resuming.models, "resolve", lambda model, revision: tmp_path / "snapshots" / commit)
    pinned = resuming.pin(small_run.config(tmp_path, agents=models))
    assert pinned.agents[0].revision == commit
    saved = {"config": pinned.model_dump(mode="json"), "machine": resuming.machine()}
    with checkpoint.Store(folder / "checkpoints", CheckpointConfig()) as store:
        store.save(1, {"qwen": {"x": jnp.zeros(3)}}, saved)
    settled = resuming.settle(small_run.config(tmp_path, agents=models), folder, print)
    assert settled.agents[0].revision == commit
    newer = {"qwen": {"model": "some/model", "revision": "newer"}}  # wanted by name: the weights decide
    assert resuming.settle(small_run.config(tmp_path, agents=newer), folder, print).agents[0].revision == "newer"


def test_a_second_process_is_kept_out_of_a_run_folder(tmp_path):
    here = small_run.config(tmp_path)
    with metrics.Run.open(here, show=False):
        for options in ({"resume_step": 0}, {"fresh": True}):
            with pytest.raises(UserError, match="is in use by another process"):
                metrics.Run.open(here, show=False, **options)
    metrics.Run.open(here, show=False, resume_step=0).close()


def test_rows_of_an_unfinished_evaluation_are_cut(tmp_path):
    here = small_run.config(tmp_path)
    with metrics.Run.open(here, show=False) as run:
        for row in ({"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}, {"step": 2, "eval/a/avg@1": 0.1}):
            run.log(row)
    for evaluated, left in ((True, 3), (False, 2)):
        metrics.Run.open(here, show=False, resume_step=2, evaluated=evaluated).close()
        assert len(metrics.read(run.folder / "metrics.jsonl")) == left


@pytest.mark.slow
class TestAFinishedRun:
    def test_one_nan_changes_nothing_but_the_count(self, finished_run):
        rows = [row for row in metrics.read(finished_run.folder / "metrics.jsonl") if "loss" in row]
        counts = {(row["step"], row["agent"]): row["nonfinite"] for row in rows}
        assert counts == {(s, a): int((s, a) == (3, "qwen")) for s in (1, 2, 3, 4) for a in ("qwen", "llama")}
        before, after = finished_run.poisoned
        assert int(after.updates) == int(before.updates) + 1
        changed = [  # the clock alone
            name for name, x in checkpoint.flatten(before).items()
            if not np.array_equal(x, checkpoint.flatten(after)[name])
        ]  # fmt: skip
        assert changed == ["updates"]
        norms = {(row["step"], row["agent"]): row["grad_norm"] for row in rows}
        assert norms[3, "qwen"] is None and norms[3, "llama"] > 0
        assert all(norms[4, name] > 0 for name in small_run.NAMES)

    def test_another_config_is_refused_with_the_list(self, finished_run):
        other = small_run.config(finished_run.folder.parent, seed=5, objective={"alpha": 2.0})
        with pytest.raises(UserError, match=r"seed: was 0, is 5; objective.alpha: was 1.0, is 2.0"):
            resuming.settle(other, finished_run.folder, print)

    def test_another_number_of_devices_is_said(self, finished_run, monkeypatch):
        said = []
        monkeypatch.setattr(resuming, "machine", lambda: {"devices": 2, "XLA_FLAGS": "new"})
        resuming.settle(finished_run.config, finished_run.folder, said.append)
        assert len(said) == 1 and "may differ in the last bits" in said[0] and "devices was 8, is 2" in said[0]

    def test_the_record_holds_all_that_a_resumed_run_compares(self, finished_run):
        with checkpoint.Store(finished_run.folder / "checkpoints", CheckpointConfig(), write=False) as store:
            record = store.record(4)
        assert record["seed"] == 0 and len(record["ability"]) == 4 and record["skipped"] == {"qwen": 0, "llama": 0}
        assert set(record["initial"]) == set(record["prompts"]) == set(small_run.NAMES) and record["evaluated"]
        names = record["agents"]["llama"]["arrays"]
        assert names and all("lora_" in name for name in names if name.startswith("trainable/"))
        assert not any(name.startswith("frozen") for name in names)  # the base is the model's own

    def test_other_first_weights_are_refused(self, finished_run):
        store = checkpoint.Store(finished_run.folder / "checkpoints", CheckpointConfig(), write=False)
        with store, pytest.raises(UserError, match=r"agent qwen: .* other weights than those the run started from"):
            resuming.load(store, finished_run.agents, {"qwen": "0", "llama": "0"}, print)

    def test_a_full_disk_stops_it_in_one_line_and_the_last_checkpoint_opens(self, finished_run, tmp_path):
        shutil.copytree(finished_run.folder, tmp_path / "small")
        command = [sys.executable, "-m", "hacrl_jax.cli", "train", str(finished_run.folder / "config.yaml")]
        command += ["--resume", f"runs={tmp_path}", "steps=5"]

        def go(kilobytes="unlimited"):  # that a file may have: room for all but a checkpoint
            limited = ["bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "bash", *command]
            return subprocess.run(limited, capture_output=True, text=True, timeout=900, check=False)

        full = go(400)
        assert full.returncode == 2, full.stderr
        told = full.stderr.splitlines()[-1]
        assert told.startswith("error: the checkpoint of step 5 could not be saved in "), full.stderr
        assert "of step 4" in told and "resuming after step 4" in full.stderr and "Traceback" not in full.stderr
        again = go()
        assert again.returncode == 0 and "resuming after step 4" in again.stderr, again.stderr
        assert (tmp_path / "small" / "checkpoints" / "step_5").is_dir()


def torture():
    spec = importlib.util.spec_from_file_location("torture", TORTURE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MOMENTS = [
    {"signal": "KILL", "phase": "generate", "after": 2, "seconds": 0.02},
    {"signal": "KILL", "phase": "save", "after": 1, "seconds": 0.005},  # while the checkpoint is being written
    {"signal": "KILL", "phase": "verify", "after": 1, "seconds": 0.0},
    {"signal": "KILL", "phase": "update llama", "after": 2, "seconds": 0.05},  # the second agent's
    {"signal": "TERM", "phase": "generate", "after": 3, "seconds": 0.01},
    {"signal": "TERM", "phase": "update qwen", "after": 1, "seconds": 0.01},
]


@pytest.mark.slow
def test_killed_at_every_kind_of_moment_it_ends_as_if_untouched(tmp_path):
    module = torture()
    whole = module.untouched(tmp_path)
    victim = module.torture(tmp_path, MOMENTS)
    assert module.differences(whole / "run", victim / "run") == []


def test_the_comparison_of_runs_sees_every_kind_of_difference(tmp_path):
    module = torture()

    def write(name, loss=0.5, text="x", fingerprint="f", step=2):
        run = tmp_path / name
        (run / "rollouts").mkdir(parents=True)
        (run / "rollouts" / "step_000001.jsonl").write_text(text)
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss, "time/wall": len(name)}) + "\n")
        record = run / "checkpoints" / f"step_{step}" / "record"
        record.mkdir(parents=True)
        (record / "metadata").write_text(json.dumps({"agents": {"a": {"fingerprint": fingerprint}}}))
        return run

    one = write("one")
    assert module.differences(one, write("same")) == []
    for number, change in enumerate(({"loss": 0.6}, {"text": "y"}, {"fingerprint": "g"}, {"step": 3})):
        assert module.differences(one, write(f"other{number}", **change)) != []
    shutil.rmtree(one)
