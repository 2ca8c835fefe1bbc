"""What came out of one run or several: a table for the terminal, and report.html with the curves.

Everything is read from config.yaml, metrics.jsonl and rollouts/ of the run folders; the page is one file that needs
no network. Several runs stand side by side when they are given together (HACPO against GSPO at the same rollouts).
"""

from __future__ import annotations

import base64
import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hacrl_jax import metrics
from hacrl_jax.types import UserError

ERROR = "/stderr"  # eval/SET/avg@4/stderr is the standard error of eval/SET/avg@4
PHASES = ("generate", "verify", "exchange", "score", "update")
CURVES = (
    ("reward", "Mean reward of the batch"),
    ("capability", "Capability (window mean)"),
    ("ratio/own/mean", "Sequence ratio, own samples"),
    ("ratio/cross/mean", "Sequence ratio, other agents' samples"),
    ("clip/own/low", "Own samples clipped below"),
    ("clip/cross/low", "Other agents' samples clipped below"),
    ("kl", "KL to the initial policy"),
    ("entropy", "Entropy (nats per token)"),
    ("grad_norm", "Gradient norm"),
    ("response_length", "Response length (tokens)"),
    ("stop_rate", "Responses that ended by themselves"),
    ("groups_without_signal", "Groups without signal"),
    ("tokens_per_second", "Tokens per second"),
)


@dataclass(frozen=True)
class Finished:
    """A run as its files tell it."""

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def agents(self) -> list[str]:
        return [agent["name"] for agent in self.config["agents"]]

    @property
    def algorithm(self) -> str:
        objective = self.config["objective"]
        own = "GRPO" if objective["ratio"] == "token" else "GSPO"
        alone = objective["cross"] == "none" or len(self.agents) == 1
        return own if alone else {"hacpo": "HACPO", "naive": f"naive sharing, {own}"}[objective["cross"]]

    def series(self, agent: str, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one key of one agent, gaps left out."""
        pairs = [(row["step"], row[key]) for row in self.rows if row.get("agent") == agent and row.get(key) is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def measures(self) -> list[str]:
        keys = dict.fromkeys(key for row in self.rows for key in row if key.startswith("eval/"))
        return [key for key in keys if not key.endswith(ERROR) and "@" in key]

    def samples(self) -> int:
        """Own samples per agent over the whole run so far."""
        steps = max((row["step"] for row in self.rows), default=0)
        return steps * self.config["rollout"]["prompts"] * self.config["rollout"]["samples"]


@dataclass(frozen=True)
class Line:
    """One line of the table: an evaluation of one agent before and after; None where it was not measured."""

    agent: str
    measure: str
    run: Finished
    before: float | None
    after: float | None
    before_error: float | None
    after_error: float | None

    @property
    def gain(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


def load(folder: str | Path) -> Finished:
    """Read a run folder. Raises UserError where it is none."""
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.yaml")
    return Finished(
        folder, yaml.safe_load((folder / "config.yaml").read_text("utf-8")), metrics.read(folder / "metrics.jsonl")
    )


def lines(runs: list[Finished]) -> list[Line]:
    """Before (step 0) and after (the last evaluation) of every agent, measure and run, runs next to each other."""
    found = []
    for agent in dict.fromkeys(agent for run in runs for agent in run.agents):
        for measure in dict.fromkeys(measure for run in runs for measure in run.measures()):
            for run in runs:
                steps, values = run.series(agent, measure)
                if not steps:
                    continue
                errors = dict(zip(*run.series(agent, measure + ERROR), strict=True))
                before = values[0] if steps[0] == 0 else None
                after = values[-1] if steps[-1] > 0 else None
                found.append(Line(agent, measure, run, before, after, errors.get(0), errors.get(steps[-1])))
    return found


def finish(folders: list[str | Path], to: str | Path | None = None) -> Path:
    """Print the table, write the page, say where the files are; the page's path."""
    from rich.console import Console

    runs = [load(folder) for folder in folders]
    console = Console()
    if console.width < 100 and not console.is_terminal:
        console = Console(width=120)  # a log file has no width of its own
    found = lines(runs)
    console.print(_rich_table(found) if found else "no evaluation yet")
    target = write(runs, to or runs[0].folder / "report.html")
    for run in runs:
        console.print(f"files of {run.name}: {run.folder}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"curves: {target}", markup=False, highlight=False, soft_wrap=True)
    return target


def write(runs: list[Finished], to: str | Path) -> Path:
    """Write the page; returns its path."""
    to = Path(to)
    parts = [f"<h1>{html.escape(' and '.join(run.name for run in runs))}</h1>", _html_table(lines(runs))]
    parts += ["<h2>Curves</h2>", *_figures(runs), "<h2>Where the time goes</h2>", _image(_time_figure(runs))]
    for run in runs:
        parts += [f"<h2>Answers of {html.escape(run.name)}</h2>", _answers(run)]
    for run in runs:
        text = html.escape(yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True))
        parts.append(f"<details><summary>Config of {html.escape(run.name)}</summary><pre>{text}</pre></details>")
    to.parent.mkdir(parents=True, exist_ok=True)
    metrics.write_atomic(to, _PAGE.replace("BODY", "\n".join(parts)))
    return to


def _cells(line: Line) -> tuple[str, ...]:
    def number(value: float | None, error: float | None) -> str:
        return "-" if value is None else f"{value:.3f}" + ("" if error is None else f" ± {error:.3f}")

    return (
        line.agent,
        line.measure.removeprefix("eval/"),
        line.run.name,
        line.run.algorithm,
        number(line.before, line.before_error),
        number(line.after, line.after_error),
        "-" if line.gain is None else f"{100 * line.gain:+.1f}",
    )


_HEAD = ("agent", "measure", "run", "algorithm", "before", "after", "points")


def _rich_table(found: list[Line]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    counts = {line.run.name: f"{line.run.samples():,}" for line in found}
    caption = "own samples per agent: " + ", ".join(f"{name} {count}" for name, count in counts.items())
    table = Table(title="Held-out accuracy before and after training", caption=caption, box=SIMPLE)
    for title in _HEAD:
        table.add_column(title, justify="right" if title in _HEAD[4:] else "left", overflow="fold")
    for index, line in enumerate(found):
        last = found[index + 1 : index + 2] and found[index + 1].agent != line.agent
        table.add_row(*map(Text, _cells(line)), end_section=bool(last))
    return table


def _html_table(found: list[Line]) -> str:
    head = "".join(f"<th>{title}</th>" for title in _HEAD)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(line)) + "</tr>" for line in found
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _figures(runs: list[Finished]) -> list[str]:
    keys = [*((measure, measure) for run in runs for measure in run.measures()), *CURVES]
    images = []
    for key, title in dict(keys).items():
        figure, axes = _axes(title)
        drawn = False
        for run_index, run in enumerate(runs):
            for index, agent in enumerate(run.agents):
                steps, values = run.series(agent, key)
                if steps:
                    label = (f"{agent} ({run.name})" if len(runs) > 1 else agent).replace("$", r"\$")
                    _curve(
                        axes, steps, values, label, color=f"C{index % 10}", style=("-", "--", ":", "-.")[run_index % 4]
                    )
                    drawn = True
        if drawn:
            axes.legend(fontsize=7)
            images.append(_image(figure))
    return images


def _curve(axes: Any, steps: list[int], values: list[float], label: str, *, color: str, style: str) -> None:
    if len(steps) < 10:
        axes.plot(steps, values, style, color=color, marker=".", label=label)
        return
    # Raw values pale, a running mean over a twentieth of the run on top.
    width = max(3, len(values) // 20)
    smooth = [sum(part) / len(part) for part in (values[max(0, i - width + 1) : i + 1] for i in range(len(values)))]
    axes.plot(steps, values, style, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, style, color=color, label=label)


def _time_figure(runs: list[Finished]) -> Any:
    figure, axes = _axes("Seconds per step, mean", "")
    bars = [(run, agent) for run in runs for agent in run.agents]
    left = [0.0] * len(bars)
    for phase in PHASES:
        widths = []
        for run, agent in bars:
            values = run.series(agent, f"time/{phase}")[1]
            widths.append(sum(values) / len(values) if values else 0.0)
        axes.barh(range(len(bars)), widths, left=left, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [f"{agent} ({run.name})" for run, agent in bars], fontsize=7)
    axes.legend(fontsize=7)
    return figure


def _axes(title: str, xlabel: str = "step") -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=(5.2, 3.1), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    return figure, axes


def _image(figure: Any) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'


def _answers(run: Finished, count: int = 3) -> str:
    """The first answers of each agent in the last step on disk."""
    files = sorted((run.folder / "rollouts").glob("step_*.jsonl"))
    if not files:
        return "<p>none on disk</p>"
    shown: dict[str, list[str]] = {}
    for row in metrics.read(files[-1]):
        texts = shown.setdefault(str(row["agent"]), [])
        if len(texts) < count:
            cells = (row["agent"], row["prompt"], row["response"], row["gold"], row["reward"])
            texts.append("".join(f"<td><pre>{html.escape(str(cell))}</pre></td>" for cell in cells))
    body = "".join(f"<tr>{text}</tr>" for texts in shown.values() for text in texts)
    head = "".join(f"<th>{key}</th>" for key in metrics.ROLLOUT_KEYS)
    return f"<p>From {files[-1].name}.</p><table><tr>{head}</tr>{body}</table>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>hacrl report</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
td, th { border: 1px solid #ccc; padding: .25em .6em; text-align: left }
td pre { margin: 0; white-space: pre-wrap; max-height: 12em; overflow: auto } img { max-width: 100% }
</style></head><body>
BODY
</body></html>
"""
