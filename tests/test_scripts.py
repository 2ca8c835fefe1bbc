"""The shell scripts on machines that lack something: one clear line each, status 2, nothing half-made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("python3", "python", "python3.13", "python3.12", "python3.11")

pytestmark = pytest.mark.skipif(os.name != "posix" or shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def machine(tmp_path):
    """A checkout of its own, and a folder of fake programs in front of PATH."""
    checkout, bin = tmp_path / "checkout", tmp_path / "bin"
    bin.mkdir()
    shutil.copytree(ROOT / "scripts", checkout / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)

    def fake(name: str, body: str) -> None:
        (bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin / name).chmod(0o755)

    def run(script: str, *arguments: str, **extra: str) -> subprocess.CompletedProcess:
        names = ("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHON")
        env = {key: value for key, value in os.environ.items() if key not in names}
        env |= {"PATH": f"{bin}:{env['PATH']}", **extra}
        command = ["bash", str(checkout / "scripts" / script), *arguments]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    return fake, run, checkout


def refused(done: subprocess.CompletedProcess, *said: str) -> None:
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(part in done.stderr for part in said), done.stderr


def python(body: str) -> str:
    """A fake Python that does `body` first and is the real one for the rest."""
    return f'{body}\nexec "{sys.executable}" "$@"'


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_python_too_old(machine, script):
    fake, run, checkout = machine
    for name in NAMES:
        fake(name, 'case "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac')
    refused(run(script), "3.11 or newer", "3.9")
    assert not (checkout / ".venv").exists()


def test_no_python_at_all(machine):
    fake, run, _ = machine
    for name in NAMES:
        fake(name, "exit 127")
    refused(run("quickstart.sh"), "3.11 or newer", "none")


def test_python_named_by_the_user_is_too_old(machine):
    fake, run, _ = machine
    fake("mine", 'case "$2" in *print*) echo 3.10 ;; *) exit 1 ;; esac')
    refused(run("quickstart.sh", PYTHON="mine"), "PYTHON=mine", "3.10")


def test_missing_venv_module(machine):
    fake, run, checkout = machine
    fake("python3", python('case "$2" in *ensurepip*) exit 1 ;; esac'))
    refused(run("quickstart.sh"), "no venv module", "apt install")
    assert not (checkout / ".venv").exists()


def test_full_disk_is_seen_before_the_installation(machine):
    fake, run, checkout = machine
    fake("df", "echo 'Filesystem 1048576-blocks Used Available'; echo 'x 1000 990 10'")
    refused(run("test.sh"), "the disk is full", "10 MB", "3000 MB")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    "log, said",
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: No matching distribution found for jax", "No matching distribution"),
    ],
)
def test_failed_installation_says_why(machine, tmp_path, log, said):
    fake, run, _ = machine
    (tmp_path / "env" / "bin").mkdir(parents=True)
    fails = f'*"pip install"*) echo begin; echo "{log}"; exit 1 ;;'
    tells = f'*"import sys; print(sys.prefix)"*) echo "{tmp_path}/env"; exit ;;'
    install = f'case "$*" in {fails} {tells} esac'
    fake("../env/bin/python", python(install))
    refused(run("test.sh", VIRTUAL_ENV=str(tmp_path / "env")), said)


def test_arguments_are_checked_before_anything_is_made(machine):
    _, run, checkout = machine
    refused(run("quickstart.sh", "--nonsense"), "--nonsense", "--help")
    refused(run("quickstart.sh", "--resume", "--fresh"), "exclude")
    refused(run("quickstart.sh", "--config"), "--config needs a file")
    assert not (checkout / ".venv").exists()
    done = run("quickstart.sh", "--help")
    assert done.returncode == 0 and "--resume" in done.stdout and "--fresh" in done.stdout


def installed(machine, tmp_path):
    """The environment of this very test, stamped as installed, so that the script goes on to the runs."""
    fake, run, checkout = machine
    shutil.copytree(ROOT / "hacrl_jax", checkout / "hacrl_jax", ignore=shutil.ignore_patterns("__pycache__", "agents"))
    env = tmp_path / "env"
    (env / "bin").mkdir(parents=True)
    fake("../env/bin/python", python(f'case "$2" in "import sys; print(sys.prefix)") echo "{env}"; exit ;; esac'))
    state = subprocess.run(
        "cksum <pyproject.toml", shell=True, cwd=checkout, capture_output=True, text=True, check=True
    )
    (env / ".hacrl_jax_installed").write_text(f"{checkout.resolve()} {state.stdout}")
    (checkout / "c.yaml").write_text("name: q\nagents: [{name: a, model: nowhere}]\ndata: {source: arithmetic}\n")
    return lambda *arguments: run("quickstart.sh", "--config", "c.yaml", *arguments, VIRTUAL_ENV=str(env))


def test_a_second_call_never_overwrites_silently(machine, tmp_path):
    run, checkout = installed(machine, tmp_path), machine[2]
    (checkout / "runs" / "q_gspo").mkdir(parents=True)
    (checkout / "runs" / "q_gspo" / "metrics.jsonl").write_text("mine")
    refused(run(), "--resume", "--fresh")
    assert (checkout / "runs" / "q_gspo" / "metrics.jsonl").read_text() == "mine"


def test_a_mistake_in_the_overrides_stops_the_quickstart(machine, tmp_path):
    run, checkout = installed(machine, tmp_path), machine[2]
    refused(run("stpes=3"), "did you mean steps?")
    assert not (checkout / "runs").exists()
