"""The command line: help everywhere, every mistake of a user one line and status 2, nothing half-written."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hacrl_jax import cli, config

TEXT = "name: t\nagents:\n- {name: a, model: x}\n- {name: b, model: y}\ndata: {source: arithmetic}\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(TEXT)
    return tmp_path


@pytest.fixture
def hacrl(capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(list(arguments))
        return (caught.value.code, *capsys.readouterr())

    return call


def commands(group, path=()):
    """Every command path of the app, itself included."""
    import typer

    found = [path]
    for name, command in getattr(typer.main.get_command(group) if not path else group, "commands", {}).items():
        found += commands(command, (*path, name))
    return found


@pytest.mark.parametrize("path", commands(cli.app), ids=" ".join)
def test_help_everywhere(hacrl, path):
    status, out, _ = hacrl(*path, "--help")
    assert status == 0 and out.startswith("Usage: hacrl")
    body = [line.strip() for line in out.splitlines() if line.strip()]
    assert len(body) >= 4 and len(body[1]) > 10, "a command needs a docstring"


def test_help_is_fast():
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "hacrl_jax.cli", "--help"], capture_output=True, check=False)
    assert done.returncode == 0 and time.monotonic() - begin < 10  # about 0.2 s on an idle machine; JAX alone takes 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["train"], "Missing argument"),
        (["train", "none.yaml"], "none.yaml does not exist"),
        (["train", "c.yaml", "stpes=3"], "did you mean steps?"),
        (["train", "c.yaml", "steps=x"], "integer"),
        (["train", "c.yaml", "steps"], "key=value"),
        (["train", "c.yaml", "minibatch=48"], "minibatch 48"),
        (["train", "c.yaml", "name=../t"], "name"),
        (["train", "c.yaml", "--resume", "--fresh"], "exclude"),
        (["train", "c.yaml", "--nothing"], "No such option"),
        (["train", "c.yaml", "agents.0.model=nowhere/at/all"], "nowhere/at/all"),
        (["trian", "c.yaml"], "train"),
        (["report", "nowhere"], "not a run folder"),
        (["grade", "none.jsonl"], "does not exist"),
        (["grade", "bad.jsonl"], "row 2"),
        (["data", "inspect", "none.jsonl"], "none.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(here, hacrl, arguments, said):
    (here / "bad.jsonl").write_text('{"gold": "1", "prediction": "1"}\n{"gold": "1"}\n')
    status, out, err = hacrl(*arguments)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
    assert sorted(path.name for path in here.iterdir()) == ["bad.jsonl", "c.yaml"]


def test_an_existing_run_folder_is_refused_untouched(here, hacrl):
    (here / "runs" / "t").mkdir(parents=True)
    (here / "runs" / "t" / "metrics.jsonl").write_text("mine")
    status, _, err = hacrl("train", "c.yaml")
    assert status == 2 and "--resume" in err and "--fresh" in err and err.count("\n") == 1
    assert (here / "runs" / "t" / "metrics.jsonl").read_text() == "mine"


def test_dry_run_prints_the_resolved_config_and_stops(here, hacrl):
    status, out, err = hacrl("train", "c.yaml", "agents.1.optimizer.lr=1e-5", "preset=gspo", "--dry-run")
    assert status == 0 and err == ""
    raw = yaml.safe_load(out)
    assert raw["agents"][1]["optimizer"]["lr"] == 1e-5 and raw["objective"]["cross"] == "none"
    assert config.resolve(raw) == config.load("c.yaml", ["agents.1.optimizer.lr=1e-5", "preset=gspo"])
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "error, status", [(OSError(28, "No space left on device", "f"), 2), (KeyboardInterrupt(), 130)]
)
def test_full_disk_and_interrupt_are_one_line(here, hacrl, monkeypatch, error, status):
    def fail(*_):
        raise error

    monkeypatch.setattr(config, "load", fail)
    code, _, err = hacrl("train", "c.yaml")
    assert code == status and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("writes", [True, False])
def test_of_several_hosts_only_the_one_with_the_files_reports(here, hacrl, monkeypatch, writes):
    # A host without the files has nothing to read; on a shared disk two of them replaced one temporary file.
    from hacrl_jax import algorithm, report

    reported = []
    monkeypatch.setattr(algorithm, "train", lambda *_, **__: algorithm.Summary(Path("runs/t"), 1, writes))
    monkeypatch.setattr(report, "finish", reported.append)
    assert hacrl("train", "c.yaml")[0] == 0
    assert reported == ([[Path("runs/t")]] if writes else [])


def test_a_bug_keeps_its_traceback(here, monkeypatch):
    monkeypatch.setattr(config, "load", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "c.yaml"])


def test_grade_reports_and_says_so_by_its_status(here, hacrl):
    rows = [("3", "so \\boxed{3}", True), ("3", "\\boxed{4}", False), ("3", "3", False)]
    lines = [json.dumps({"gold": gold, "prediction": text, "correct": right}) for gold, text, right in rows]
    (here / "g.jsonl").write_text("\n".join(lines) + "\n")
    status, out, _ = hacrl("grade", "g.jsonl", "--json")
    found = json.loads(out)
    assert status == 0 and (found["rows"], found["agree"], found["disagree"], found["hung"]) == (3, 3, 0, 0)
    (here / "g.jsonl").write_text(lines[0].replace("true", "false") + "\n")
    status, out, _ = hacrl("grade", "g.jsonl")
    assert status == 1 and "row 1" in out and "disagree 1" in out


def test_inspect_tells_what_was_dropped(here, hacrl):
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": ""}, {"answer": "3"}]
    (here / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, _ = hacrl("data", "inspect", "d.jsonl")
    assert status == 0 and "3 rows, 1 problems" in out and out.count("dropped, ") == 2 and "1+1?" in out
