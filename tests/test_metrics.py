"""The files of a run: strict JSON, exact cuts on resume, and nothing overwritten silently."""

import io
import json
import math
import resource
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl_jax import metrics
from hacrl_jax.config import load, resolve
from hacrl_jax.types import UserError

ROLLOUT = {"agent": "a", "prompt": "1+1", "response": "\\boxed{2}\u2028", "gold": "2", "reward": 1.0}


def make(tmp_path: Path, **extra):
    agents = [{"name": "a", "model": "x"}, {"name": "b/../c", "model": "y"}]
    return resolve({"name": "r", "runs": str(tmp_path), "agents": agents, "data": {"source": "arithmetic"}} | extra)


def write(config, steps, **options):
    with metrics.Run.open(config, total=4, show=False, **options) as run:
        for step in steps:
            run.rollouts(step, [ROLLOUT, ROLLOUT])
            for agent in ("a", "b/../c"):
                run.log({"step": step, "agent": agent, "reward": step / 10, "eval/arithmetic/avg@4": 0.5})
            run.progress(step)
            run.sync()


def rows(config):
    return metrics.read(metrics.folder(config) / "metrics.jsonl")


def test_values_of_every_kind_become_strict_json(tmp_path):
    with metrics.Run.open(make(tmp_path), show=False) as run:
        run.log({"step": 1, "agent": "a", "x": jnp.float32(0.5), "y": np.nan, "z": -math.inf, "n": np.int64(3),
                 "list": jnp.arange(2), "none": None, "nested": {"v": float("inf")}})  # fmt: skip
    text = (tmp_path / "r" / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    row.pop("time/wall")
    assert row == {"step": 1, "agent": "a", "x": 0.5, "y": None, "z": None, "n": 3, "list": [0, 1], "none": None,
                   "nested": {"v": None}}  # fmt: skip


@given(
    st.recursive(
        st.floats() | st.text() | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_to_json_is_one_strict_line(value):
    line = metrics.to_json(value)
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_rollouts_are_one_json_object_a_line(tmp_path):
    config = make(tmp_path)
    write(config, [1])
    lines = (tmp_path / "r/rollouts/step_000001.jsonl").read_bytes().decode().rstrip("\n").split("\n")
    assert [json.loads(line) for line in lines] == [{"step": 1, **ROLLOUT}] * 2


def test_existing_folder_is_refused_resumed_or_moved_never_overwritten(tmp_path):
    config = make(tmp_path)
    write(config, [1, 2])
    before = (tmp_path / "r/metrics.jsonl").read_bytes()
    for attempt in (lambda: metrics.check(config), lambda: metrics.Run.open(config, show=False)):
        with pytest.raises(UserError, match="--resume"):
            attempt()
    with pytest.raises(UserError, match="exclude"):
        metrics.check(config, resume=True, fresh=True)
    assert metrics.check(config, resume=True) == tmp_path / "r"
    write(config, [1], fresh=True)
    write(config, [1], fresh=True)
    assert (tmp_path / "r.1/metrics.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "r.1", "r.2"]


def test_saved_config_reads_back_equal(tmp_path):
    config = make(tmp_path)
    write(config, [])
    assert load(tmp_path / "r/config.yaml") == config


@pytest.mark.parametrize("step, left", [(-1, []), (0, [0]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_resume_cuts_everything_after_the_step(tmp_path, step, left):
    config = make(tmp_path)
    write(config, [0, 1, 2, 3])
    with (tmp_path / "r/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # killed in mid-line
    (tmp_path / "r/rollouts/step_000004.jsonl.tmp").write_text("torn")
    kept = [row for row in rows(config) if row["step"] <= step]
    write(config, [], resume_step=step)
    assert rows(config) == kept
    assert sorted({row["step"] for row in kept}) == left
    assert [path.name for path in sorted((tmp_path / "r/rollouts").iterdir())] == [f"step_{s:06d}.jsonl" for s in left]
    write(config, [5], resume_step=step)
    assert rows(config)[: len(kept)] == kept and [row["step"] for row in rows(config)[len(kept) :]] == [5, 5]


def test_tensorboard_holds_the_rows_and_only_them_after_a_cut(tmp_path):
    from tensorboardX.proto import event_pb2

    config = make(tmp_path)
    write(config, [0, 1, 2, 3])
    write(config, [2], resume_step=1)
    folder = tmp_path / "r/tensorboard"
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b%2F..%2Fc"]  # a name never leaves the folder
    seen = []
    for file in (folder / "a").iterdir():
        data = file.read_bytes()
        while data:  # TFRecord: length, crc, payload, crc
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            seen += [(event.step, value.tag, round(value.simple_value, 6)) for value in event.summary.value]
    assert sorted(item for item in seen if item[1] == "reward") == [
        (0, "reward", 0),
        (1, "reward", 0.1),
        (2, "reward", 0.2),
    ]
    assert {tag for _, tag, _ in seen} == {"reward", "eval/arithmetic/avg_4"}


def test_broken_line_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{oops\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        metrics.read(tmp_path / "m.jsonl")


@pytest.mark.parametrize("name", ["..", "a/b", "", "/tmp/x", "a\\b"])
def test_run_name_stays_in_the_runs_folder(tmp_path, name):
    with pytest.raises(UserError, match="name"):
        metrics.check(make(tmp_path, name=name))


def test_other_hosts_write_nothing(tmp_path):
    write(make(tmp_path), [1], writes=False)
    assert list(tmp_path.iterdir()) == []


def test_progress_shows_steps_rewards_and_time_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "PLAIN_SECONDS", 0.0)
    clock = iter([0.0, *range(100)])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: float(next(clock)))
    with metrics.Run.open(make(tmp_path), total=100) as run:
        run.log({"step": 1, "agent": "a", "reward": 0.25})
        run.log({"step": 1, "agent": "b", "reward": float("nan")})
        run.progress(1, "update b")
        run.progress(2)
    first, second = capsys.readouterr().err.splitlines()
    assert "step 1/100" in first and "a 0.250 b -" in first and "update b" in first
    assert "left" in second


@pytest.mark.parametrize("full", ["rows", "board"])
def test_a_full_disk_is_told_at_the_row_that_meets_it(tmp_path, full):
    config, limits = make(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    row = {"agent": "a", "reward": 0.5} | ({"x" * 60: 1.0} if full == "board" else {"text": "x" * 500})
    try:
        with pytest.raises(OSError, match="File too large"), metrics.Run.open(config, show=False) as run:
            if full == "board":
                run._file = io.StringIO()
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
            for step in range(1, 400):
                run.log({"step": step, **row})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 10 < step < 399
