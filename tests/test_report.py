"""The table and the page, from the files of synthetic runs."""

import base64
import math
import re
from pathlib import Path

import pytest

from hacrl_jax import metrics, report
from hacrl_jax.config import resolve
from hacrl_jax.types import UserError

MEASURE = "eval/arithmetic/avg@4"


def make(tmp_path: Path, name: str, gain: float, *, evaluate: tuple[int, ...] = (0, 30), **objective) -> Path:
    raw = {
        "name": name,
        "runs": str(tmp_path),
        "agents": [{"name": "small", "model": "x"}, {"name": "[b]<i>$", "model": "y"}],
        "data": {"source": "arithmetic"},
        "rollout": {"prompts": 64, "samples": 2},
        "objective": objective,
    }
    config = resolve(raw)
    with metrics.Run.open(config, show=False) as run:
        for step in range(31):
            for agent in ("small", "[b]<i>$"):
                if step in evaluate:
                    after = {MEASURE: 0.25 + (gain if step else 0), MEASURE + "/stderr": 0.0125}
                    run.log({"step": step, "agent": agent, **after})
                if step:
                    run.log(
                        {"step": step, "agent": agent, "reward": math.sin(step), "kl": math.nan, "time/update": 1.0}
                    )
        run.rollouts(30, [{"agent": "small", "prompt": "<script>", "response": "x", "gold": "1", "reward": None}])
    return metrics.folder(config)


def test_table_sets_runs_side_by_side(tmp_path):
    folders = [make(tmp_path, "one", 0.25), make(tmp_path, "two", 0.125, cross="none")]
    found = report.lines([report.load(folder) for folder in folders])
    shown = [(line.agent, line.run.name, line.run.algorithm, line.before, line.after, line.gain) for line in found]
    assert shown == [
        (agent, name, algorithm, 0.25, 0.25 + gain, gain)
        for agent in ("small", "[b]<i>$")
        for name, algorithm, gain in (("one", "HACPO", 0.25), ("two", "GSPO", 0.125))
    ]
    assert found[0].after_error == 0.0125 and found[0].run.samples() == 30 * 128


def test_page_is_whole_and_escapes_what_models_wrote(tmp_path, capsys):
    target = report.finish([make(tmp_path, "one", 0.25), make(tmp_path, "two", 0.1)])
    page = target.read_text()
    assert target == tmp_path / "one" / "report.html"
    assert "&lt;script&gt;" in page and "<script>" not in page and "http" not in page
    images = re.findall(r"base64,([^\"]+)", page)
    assert len(images) >= 3 and all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
    out = capsys.readouterr().out
    assert "0.250 ± 0.013" in out and "+25.0" in out and "[b]<i>$" in out and str(tmp_path / "two") in out


@pytest.mark.parametrize("evaluate", [(), (0,), (30,)])
def test_missing_evaluations_leave_gaps(tmp_path, evaluate):
    found = report.lines([report.load(make(tmp_path, "r", 0.5, evaluate=evaluate))])
    assert [(line.before is None, line.after is None, line.gain) for line in found] == [
        (0 not in evaluate, 30 not in evaluate, None)
    ] * (2 if evaluate else 0)
    report.finish([tmp_path / "r"], tmp_path / "out" / "page.html")


def test_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        report.load(tmp_path)
