"""Every end of a run that cannot go on: in bounded time, with its own status and one line."""

import errno
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hacrl_jax import archive, cli, guard
from hacrl_jax.config import GuardConfig
from hacrl_jax.types import UserError


def watching(**settings) -> guard.Watch:
    return guard.Watch(GuardConfig(**settings))


def interrupt(number=signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_generation_at_once_and_an_update_after_the_step(number):
    before = signal.getsignal(number)
    with watching() as watch, pytest.raises(guard.Stop, match=number.name), watch.phase("generate", "a"):
        interrupt(number)
        raise AssertionError("went on")
    with watching() as watch:
        with watch.phase("update", "a"):
            interrupt(number)
        with watch.phase("update", "b"):
            pass
        with pytest.raises(guard.Stop, match=number.name):
            watch.turn()
    with watching() as watch:  # it came where nothing may end: the next phase that may does not start
        interrupt(number)
        with pytest.raises(guard.Stop), watch.phase("verify"):
            raise AssertionError("went on")
    assert signal.getsignal(number) is before


def test_a_watch_that_is_not_entered_changes_nothing():
    before = signal.getsignal(signal.SIGTERM)
    watch = watching()
    with watch.phase("generate", "a"):
        watch.beat()
    watch.turn()
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_must_stop_the_run_is_raised_at_the_next_sign_of_life():
    def failed() -> None:
        raise UserError("the save failed")

    watch = guard.Watch(GuardConfig(), check=failed)
    for sign in (watch.beat, watch.turn, watch.phase("update", "a").__enter__):
        with pytest.raises(UserError, match="the save failed"):
            sign()


def test_a_signal_during_a_check_is_not_taken_for_its_failure():
    done = []

    def check() -> None:
        if watch.what == "generate, a":
            interrupt()
            done.append("checked")

    watch = guard.Watch(GuardConfig(), check=check)
    with watch, pytest.raises(guard.Stop, match="SIGTERM"), watch.phase("generate", "a"):
        watch.beat()
    assert done == ["checked"]


END = """
import os, signal, sys, time
from pathlib import Path
from hacrl_jax import guard
from hacrl_jax.config import GuardConfig
mode, folder = sys.argv[1:]
kill = lambda: os.kill(os.getpid(), signal.SIGTERM)
settings = {"second": {}, "grace": {"grace": 1}, "stuck": {"stuck": 1, "stuck_exit": 3}}[mode]
with guard.Watch(GuardConfig(**settings), Path(folder)) as watch, watch.phase("update", "small"):
    if mode != "stuck":
        kill()
    if mode == "second":
        time.sleep(0.1)
        kill()
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("mode", "status", "said"),
    [
        ("second", 128 + signal.SIGTERM, "second SIGTERM: ended at once"),
        ("grace", guard.STOPPED, "update, small did not end within guard.grace 1 s"),
        ("stuck", guard.STUCK, "no sign of life for 3 s in update, small"),
    ],
)
def test_the_end_comes_in_bounded_time(tmp_path, mode, status, said):
    done = subprocess.run(
        [sys.executable, "-c", END, mode, str(tmp_path)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    if mode == "stuck":
        stacks = (tmp_path / "stacks.txt").read_text()
        assert "update, small" in stacks and "most recent call first" in stacks and 'File "<string>"' in stacks


def test_updates_without_a_finite_loss_are_counted_across_steps(tmp_path):
    watch = guard.Watch(GuardConfig(nonfinite=3), tmp_path)
    batch = lambda m: SimpleNamespace(tokens=jnp.arange(6).reshape(2, 3) + m, valid=jnp.ones((2, 1), bool), other=None)  # noqa: E731
    watch.finite("a", 1, [True, False, True, True], batch)
    watch.finite("b", 1, [False], batch)
    assert watch.skipped == {"a": 2, "b": 0}
    again = guard.Watch(GuardConfig(nonfinite=3), tmp_path, skipped=watch.skipped)  # as a resumed run has it
    with pytest.raises(guard.NotFinite, match="agent a had 3 updates in a row") as raised:
        again.finite("a", 2, [True, False], batch)
    (file,) = (tmp_path / "nonfinite").iterdir()
    arrays, facts = archive.read_arrays(file)
    assert str(file) in str(raised.value) and facts.items() >= {"step": 2, "agent": "a", "update": 0}.items()
    assert np.array_equal(arrays["tokens"], [[0, 1, 2], [3, 4, 5]]) and set(arrays) == {"tokens", "valid"}


def test_a_batch_of_an_agent_with_a_wild_name_stays_in_the_folder(tmp_path):
    watch = guard.Watch(GuardConfig(nonfinite=1), tmp_path / "run")
    with pytest.raises(guard.NotFinite):
        watch.finite("../../x", 1, [True], lambda m: SimpleNamespace(tokens=jnp.zeros(1)))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == ["nonfinite"]


MEMORY = {  # as TPU, GPU and CPU say it
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.1G of 15.75G "
    "hbm. Exceeded hbm capacity by 4.4G.": "memory compiling update of agent a, which needs 20.1G of 15.75G hbm; ",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738368 bytes.": "running update of agent a, which "
    "wanted 32.00 GiB more; ",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.00GiB.": "which wanted 16.00GiB more; ",
    "RESOURCE_EXHAUSTED: something new": "out of memory running update of agent a; ",
}


@pytest.mark.parametrize("message", MEMORY)
def test_out_of_memory_names_what_was_done_and_the_setting_to_change(message):
    watch = watching()
    with pytest.raises(guard.NoMemory) as raised, watch.phase("update", "a"):
        raise jax.errors.JaxRuntimeError(message)
    assert MEMORY[message] in str(raised.value) and "lower agents.a.micro_batch" in str(raised.value)
    assert raised.value.status == guard.NO_MEMORY


def test_other_errors_of_the_device_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError), watching().phase("update", "a"):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")


def test_the_stuck_clock_starts_anew_at_every_sign_of_life(tmp_path):
    with guard.Watch(GuardConfig(stuck=1, stuck_exit=0), tmp_path) as watch:
        for _ in range(4):
            with watch.phase("generate", "a"):
                time.sleep(0.4)
        assert not (tmp_path / "stacks.txt").exists()
        time.sleep(1.6)
        first = (tmp_path / "stacks.txt").read_text()
        time.sleep(0.6)
        assert (tmp_path / "stacks.txt").read_text() == first  # once for each silence


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (guard.Stop("SIGTERM: saved after step 3"), 75, "stopped: SIGTERM: saved after step 3"),
        (guard.NotFinite("agent a"), 77, "error: agent a"),
        (guard.NoMemory("update"), 78, "error: update"),
        (UserError("a mistake"), 2, "error: a mistake"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: the disk is full (No space left on device: "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_command_line_tells_a_scheduler_how_a_run_ended(monkeypatch, capsys, error, status, line):
    def ended(*_, **__) -> None:
        raise error

    monkeypatch.setattr(cli, "app", ended)
    assert cli._run([]) == status
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1
