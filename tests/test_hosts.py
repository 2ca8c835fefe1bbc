"""Several hosts as several processes on this machine: the same numbers, and a common end when one of them fails."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hacrl_jax import archive, hosts
from hacrl_jax.config import HostsConfig
from hacrl_jax.tasks.verify import Verdict

ROOT = Path(__file__).parent.parent
CHILD = Path(__file__).parent / "hosts_child.py"
LIMIT = 900  # seconds for any run here, on a busy machine


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(devices: int) -> dict[str, str]:
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    flags += f" --xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), "PYTHONPATH": str(ROOT)}


def start(commands: list[list[str]], kill_when: Path | None = None) -> list[tuple[int, str, float]]:
    """Run commands side by side, 8 devices in all; (status, stderr, when it ended) of each.

    kill_when: the last one is killed once this folder exists.
    """
    env = environment(8 // len(commands))
    processes = [
        subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        while kill_when and not kill_when.exists() and processes[-1].poll() is None:
            time.sleep(0.1)
        if kill_when:
            processes[-1].kill()
        results = []
        for process in processes:
            _, errors = process.communicate(timeout=LIMIT)
            results.append((process.returncode, errors, time.monotonic()))
        return results
    finally:
        for process in processes:
            process.kill()


def children(mode: str, folder: Path, count: int = 2, **settings) -> list[tuple[int, str, float]]:
    address = f"127.0.0.1:{port()}"
    named = [
        {"coordinator": address, "count": count, "index": i, **settings} if count > 1 else {} for i in range(count)
    ]
    return start([[sys.executable, str(CHILD), mode, str(folder), json.dumps(each)] for each in named])


def test_one_host_needs_nobody():
    with hosts.joined(HostsConfig()):
        assert hosts.gather("x", {"a": 1}) == [{"a": 1}]
        hosts.agree("x", 1)
        grade = lambda golds, answers: [Verdict(a == b, "equal") for a, b in zip(golds, answers, strict=True)]  # noqa: E731
        assert hosts.spread(Verdict, grade, ["1"], ["1"]) == [Verdict(True, "equal")]


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4"}, {}),
        (
            {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            {"coordinator_address": "host:1", "num_processes": 2, "process_id": 1},
        ),
    ],
)
def test_the_environment_names_the_hosts(monkeypatch, variables, expected):
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hosts._named(HostsConfig()) == expected


@pytest.mark.slow
def test_two_processes_update_like_one_though_one_has_no_valid_row(tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    assert [status for status, *_ in children("gradient", tmp_path / "two")] == [0, 0]
    assert children("gradient", tmp_path / "one", count=1)[0][0] == 0
    two, one = (np.load(tmp_path / name / "result.npz") for name in ("two", "one"))
    assert np.isfinite(one["loss"]) and one["norm"] > 0
    np.testing.assert_allclose(two["norm"], one["norm"], rtol=1e-5)
    for name in one.files:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-5, atol=1e-5 * np.abs(one[name]).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, statuses, cause",
    [
        ("done", [0, 0], ""),
        ("mistake", [2, 2], "host 1 stopped: the data file is not here"),
        ("bug", [1, 1], "host 1 stopped: ZeroDivisionError: a bug"),
        ("differs", [2, 2], "the config: host 0 has {'lr': 2}, host 1 has {'lr': 1}; make them equal"),
        ("slow", [2, 2], "host 1 of 2 did not deliver its part of verdicts within 3 s"),
        ("killed", [None, -9], "stopped sending heartbeats):\n1\n"),
        ("full disk 0", [2, 2], "the checkpoint of step 2 could not be saved"),
        ("full disk 1", [2, 2], "host 1 stopped: the checkpoint of step 2 could not be saved"),
    ],
)
def test_hosts_end_together_and_say_why(tmp_path, mode, statuses, cause):
    begin = time.monotonic()
    results = children(mode, tmp_path, wait=3.0 if mode == "slow" else 600.0, heartbeat=10)
    found = [status for status, *_ in results]
    if mode == "killed":
        assert found[1] == -9 and found[0] not in (0, None)
    else:
        assert found == statuses
    assert cause in results[0][1]
    assert results[1][2] - begin < 120  # the failing program would have run for 60 s after its start


def train(folder: Path, processes: int, *overrides: str, kill_when: Path | None = None) -> list[tuple[int, str, float]]:
    command = [sys.executable, "-m", "hacrl_jax.cli", "train", "configs/quickstart.yaml", f"runs={folder}"]
    small = ["eval.sets=[]", "rollout.prompts=8", "rollout.samples=4", "minibatch=4", "mesh.fsdp=4", "mesh.data=2"]
    small += ["checkpoint.every=2"]
    address = f"127.0.0.1:{port()}"
    named = lambda i: [f"hosts.coordinator={address}", f"hosts.count={processes}", f"hosts.index={i}"]  # noqa: E731
    commands = [[*command, *small, *overrides, *(named(i) if processes > 1 else [])] for i in range(processes)]
    return start(commands, kill_when)


def rows(folder: Path) -> list[dict]:
    timed = lambda key: key.startswith("time/") or key == "tokens_per_second"  # noqa: E731
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not timed(key)} for line in lines]


def ids(folder: Path) -> list[np.ndarray]:
    """What each agent answered in the first step."""
    _, buffer, _ = archive.read(folder / "rollouts" / archive.name(1))
    return [np.asarray(own.response) for own in buffer.rollouts]


@pytest.mark.slow
def test_two_processes_train_lose_one_resume_and_repeat_themselves(tmp_path):
    whole = train(tmp_path, 2, "name=whole", "steps=5")
    assert [status for status, *_ in whole] == [0, 0], whole
    saved = tmp_path / "part" / "checkpoints" / "step_2"
    left, killed = train(tmp_path, 2, "name=part", "steps=5", "hosts.heartbeat=10", kill_when=saved)
    assert killed[0] == -9 and left[0] not in (0, None), left
    assert left[2] - killed[2] < 60, left  # the heartbeat, and what a busy machine adds
    assert re.search(r"no sign of life from host 1: killed|stopped sending heartbeats\):\n1\n", left[1]), left
    resumed = train(tmp_path, 2, "name=part", "steps=5", "--resume")
    assert [status for status, *_ in resumed] == [0, 0], resumed
    alone = train(tmp_path, 1, "name=one", "steps=1")
    assert alone[0][0] == 0, alone

    trained = lambda name: [row for row in rows(tmp_path / name) if "reward" in row]  # noqa: E731
    assert len(trained("whole")) == 10
    assert trained("part") == trained("whole")  # bit for bit: another run, and one that was resumed
    last = "rollouts/step_000005.jsonl"
    assert (tmp_path / "part" / last).read_text() == (tmp_path / "whole" / last).read_text()

    first = "rollouts/step_000001.jsonl"
    assert (tmp_path / "one" / first).read_text() == (tmp_path / "whole" / first).read_text()  # answers and rewards
    for one, two in zip(ids(tmp_path / "one"), ids(tmp_path / "whole"), strict=True):
        np.testing.assert_array_equal(two, one)
    for one, two in zip(trained("one"), trained("whole")[:2], strict=True):
        assert one["reward"] == two["reward"]
        np.testing.assert_allclose(two["grad_norm"], one["grad_norm"], rtol=1e-3)
