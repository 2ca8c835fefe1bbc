"""Grading processes that hang, die or grow cost one answer; too many errors stop the run."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hacrl_jax.config import VerifierConfig
from hacrl_jax.tasks import grader as module
from hacrl_jax.tasks.grader import Grader
from hacrl_jax.types import UserError

LENIENT = {"max_error_share": 1.0}


def boxed(values):
    return [f"\\boxed{{{value}}}" for value in values]


def processes(grader):
    return [worker.process.pid for worker in grader._workers]


def test_verdicts_keep_the_order_of_the_answers():
    numbers = [str(i) for i in range(300)]
    with Grader(VerifierConfig()) as grader:
        verdicts = grader.grade(numbers, boxed([i if i % 3 else i + 1 for i in range(300)]))
        assert [verdict.correct for verdict in verdicts] == [bool(i % 3) for i in range(300)]
        assert grader.counts.graded == 300
        assert grader.grade([], []) == []
    assert grader._workers == []


def test_a_worker_killed_while_idle_costs_nothing():
    with Grader(VerifierConfig(workers=1)) as grader:
        grader.grade(["1"], boxed([1]))
        os.kill(processes(grader)[0], signal.SIGKILL)
        time.sleep(0.1)
        assert [v.correct for v in grader.grade(["1", "2"], boxed([1, 3]))] == [True, False]
        assert grader.counts.errors <= 1  # the parent may have written to the dead pipe before it closed


def test_a_worker_killed_in_mid_run_costs_one_answer():
    golds = [str(i) for i in range(3000)]
    with Grader(VerifierConfig(workers=2, **LENIENT)) as grader:
        grader.grade(["1", "2"], boxed([1, 2]))
        victim = processes(grader)[0]
        threading.Timer(0.02, os.kill, (victim, signal.SIGKILL)).start()
        verdicts = grader.grade(golds, boxed(f"{i}.0" for i in range(3000)))
        assert sum(not verdict.correct for verdict in verdicts) <= 1
        assert {verdict.reason for verdict in verdicts} <= {"equal", "died"}
        assert victim not in processes(grader)
        assert all(verdict.correct for verdict in grader.grade(["1", "2"], boxed([1, 2])))


def test_a_hung_worker_is_replaced_at_the_deadline():
    with Grader(VerifierConfig(workers=1, deadline=1.0, **LENIENT)) as grader:
        grader.grade(["1"], boxed([1]))
        grader._recent.clear()  # a loaded machine may have raised the deadline
        os.kill(processes(grader)[0], signal.SIGSTOP)
        begin = time.monotonic()
        verdicts = grader.grade(["x+1"], boxed(["1+x"]))
        assert [verdict.reason for verdict in verdicts] == ["timeout"]
        assert not verdicts[0].correct
        assert time.monotonic() - begin < 1.0 + 1.0
        assert (grader.counts.hung, grader.counts.errors) == (1, 1)
        assert grader.grade(["x+1"], boxed(["1+x"]))[0].correct


def test_too_many_errors_stop_the_run_with_the_reason():
    with Grader(VerifierConfig(workers=1, deadline=0.5, max_error_share=0.2)) as grader:
        grader.grade(["1"], boxed([1]))
        grader._recent.clear()
        os.kill(processes(grader)[0], signal.SIGSTOP)
        with pytest.raises(UserError, match=r"1 of 2 answers.*1 timeout.*max_error_share") as raised:
            grader.grade(["x+1", "1"], boxed(["1+x", ""]))
        assert "\n" not in str(raised.value)


def test_memory_is_bounded(tmp_path):
    code = (
        "from hacrl_jax.tasks import worker\nimport resource\nworker._restrict(1024)\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[0] == 1024 * 2**20)\n"
        "try:\n    bytearray(2 * 2**30)\nexcept MemoryError:\n    print('refused')\n"
        "try:\n    open('file', 'wb', buffering=0).write(b'x' * 10)\nexcept OSError:\n    print('no files')\n"
    )
    path = os.pathsep.join([str(Path(module.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.stdout.split("\n")[:3] == ["True", "refused", "no files"], done.stderr


def test_a_worker_that_cannot_start_is_said_so(monkeypatch):
    monkeypatch.setattr(module, "STARTUP_SECONDS", 60.0)
    with (
        Grader(VerifierConfig(workers=1, memory_mb=1)) as grader,
        pytest.raises(UserError, match=r"failed to start 3 times.*memory_mb"),
    ):
        grader.grade(["x"], boxed(["y"]))


def test_workers_do_not_import_jax_or_the_main_module():
    with Grader(VerifierConfig(workers=1)) as grader:
        grader.grade(["1"], boxed([1]))
        maps = Path(f"/proc/{processes(grader)[0]}/maps").read_text()
    assert "jaxlib" not in maps


def test_workers_end_with_their_parent():
    code = (
        "import os\nfrom hacrl_jax.config import VerifierConfig\nfrom hacrl_jax.tasks.grader import Grader\n"
        "g = Grader(VerifierConfig(workers=1))\ng.grade(['1'], ['\\\\boxed{1}'])\n"
        "print(g._workers[0].process.pid, flush=True)\nos._exit(9)\n"
    )
    path = os.pathsep.join([str(Path(module.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    child = int(done.stdout)
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return  # ended, and nobody is there to collect it
        time.sleep(0.1)
    pytest.fail("the worker outlived its parent")


def test_the_deadline_follows_a_slow_machine():
    with Grader(VerifierConfig(deadline=0.5)) as grader:
        assert grader.deadline == 0.5
        grader._recent.extend([0.2] * 9)
        assert grader.deadline == pytest.approx(module.MEDIANS * 0.2)


def test_golds_and_predictions_must_match():
    with Grader(VerifierConfig()) as grader, pytest.raises(UserError, match="2 gold answers for 1"):
        grader.grade(["1", "2"], ["\\boxed{1}"])


@pytest.mark.slow
def test_throughput_of_ordinary_answers():
    golds = [f"\\frac{{{i}}}{{{i % 7 + 2}}}" if i % 2 else f"{i}\\sqrt{{{i % 5 + 2}}}" for i in range(2000)]
    with Grader(VerifierConfig(workers=2)) as grader:
        grader.grade(golds[:50], boxed(golds[:50]))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        grader.grade(golds, boxed([f"{i}\\sqrt{{{i % 4 + 2}}}" for i in range(2000)]))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # counts when the workers have ended
    seconds = (after.ru_utime - before.ru_utime) / 2
    assert 2000 / seconds >= 200  # by processor time: the machine may be busy with something else
