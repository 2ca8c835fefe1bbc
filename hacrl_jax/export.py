"""`hacrl export`: an agent of a run as a folder that transformers, vLLM and others load like one from the hub.

Names, dtypes and side files are those of the model the run started from; weights are those of a checkpoint, low-rank
updates merged; README.md says what was trained with whom, for how long, and how it was evaluated.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import yaml
from jax.sharding import Mesh

from hacrl_jax import checkpoint, metrics, models, report, resuming, sharding
from hacrl_jax import config as configs
from hacrl_jax.config import AgentConfig, Config, MeshConfig
from hacrl_jax.types import Params, UserError

SHARD_BYTES = 5 * 10**9
TRAINABLE = "trainable/"  # what the names of trained arrays in a checkpoint start with; moments are the rest


@dataclass(frozen=True)
class Exported:
    """What export wrote: the agent as it was after a step."""

    agent: str
    step: int
    folder: Path


@dataclass(frozen=True)
class Trained:
    """An agent as it was after a step. folder is the model it began as: its tokenizer files are there."""

    settings: AgentConfig
    folder: Path
    graphdef: Any
    model: models.DecoderConfig
    params: Params
    mesh: Mesh
    step: int


def export(
    run: str | Path, agent: str, to: str | Path, *, step: int | None = None, shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = lambda _: None,
) -> Exported:  # fmt: skip
    """Write an agent of a run folder to the folder `to`, as the newest complete checkpoint (or that of `step`) has it.

    `to` appears complete or not at all. Works on any number of devices, whatever the run had. Raises UserError where
    there is no such run, agent or checkpoint, where `to` exists, or where the model is not the one the run began with.
    """
    run, to = Path(run), Path(to)
    config, settings = _settings(run, agent)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} already exists: export to another folder, or remove it first")
    found = trained(run, agent, step=step, say=say)
    card = model_card(config, run, agent, found.step, found.folder)
    with _clean(to):
        models.save(to, found.params, found.model, found.folder, lora=settings.lora, shard_bytes=shard_bytes,
                    model_card=card)  # fmt: skip
    return Exported(agent, found.step, to)


def trained(
    run: str | Path, agent: str, *, step: int | None = None, say: Callable[[str], None] = lambda _: None
) -> Trained:
    """An agent's weights as the newest complete checkpoint of a run (or that of `step`) has them, on all devices.

    Raises UserError where there is no such run, agent or checkpoint, or the model is not the one the run began with.
    """
    run = Path(run)
    config, settings = _settings(run, agent)
    mesh = sharding.make_mesh(MeshConfig())
    with checkpoint.Store(resuming.place(config, run), config.checkpoint, write=False) as store:
        record = _record(store, run, step)
        if agent not in record["agents"]:
            raise UserError(f"the checkpoints in {store.folder} were saved without agent {agent}")
        with jax.set_mesh(mesh):
            folder = models.resolve(settings.model, settings.revision)
            graphdef, model, params = models.load(folder, mesh=mesh, lora=settings.lora)
            if checkpoint.fingerprint(params) != record["initial"][agent]:
                raise UserError(f"{folder} holds other weights than those from which {agent} was trained in {run}")
            params, found = _restore(store, agent, params, record, step, say)
    return Trained(settings, folder, graphdef, model, params, mesh, found)


def model_card(config: Config, run: Path, agent: str, step: int, source: Path) -> str:
    """README.md of an exported agent: front matter for the hub, then partners, steps, data, evaluation."""
    settings = _agent(config, run, agent)
    rows = metrics.read(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    done = report.Finished(run, config.model_dump(mode="json"), [row for row in rows if row["step"] <= step])
    lora = "" if settings.lora is None else f", by low-rank updates (rank {settings.lora.rank}) that are merged here"
    lines = [
        f"# {agent}",
        "",
        f"{_origin(settings)}, trained by hacrl_jax with {done.algorithm} (arXiv 2603.02604){lora}. Run: `{run.name}`.",
        "",
        "| | |",
        "|---|---|",
        f"| steps | {step} |",
        f"| updates | {step * config.updates_per_step()} |",
        f"| own answers | {step * config.rollout.prompts * config.rollout.samples} |",
        f"| data | {config.data.name or Path(config.data.source).name} ({config.data.split}) |",
        f"| learning rate | {settings.optimizer.lr:g} ({settings.optimizer.schedule}) |",
        f"| seed | {config.seed} |",
        "",
        *_partners(config, settings),
        *_evaluation(done, agent),
    ]
    head = yaml.safe_dump(_front_matter(settings, source), sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n".join(lines)


def _settings(run: Path, agent: str) -> tuple[Config, AgentConfig]:
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not a run folder: it has no config.yaml")
    config = configs.load(run / "config.yaml")
    return config, _agent(config, run, agent)


def _agent(config: Config, run: Path, name: str) -> AgentConfig:
    known = {agent.name: agent for agent in config.agents}
    if name not in known:
        raise UserError(f"--agent {name}: {run} has {', '.join(known)}")
    return known[name]


def _record(store: checkpoint.Store, run: Path, step: int | None) -> dict[str, Any]:
    """The record of a step, or of the newest whose record opens; UserError where there is none."""
    steps = store.steps()
    if not steps:
        raise UserError(f"{run} holds no complete checkpoint")
    if step is not None and step not in steps:
        raise UserError(f"--step {step}: {run} has checkpoints of steps {', '.join(map(str, steps))}")
    tried = reversed(steps) if step is None else [step]
    record = next((record for one in tried if (record := store.record(one))), None)
    if record is None:
        raise UserError(f"the checkpoint of {'every step' if step is None else f'step {step}'} in {run} is damaged")
    return record


def _restore(store: checkpoint.Store, agent: str, params: Params, record: dict[str, Any], step: int | None,
             say: Callable[[str], None]) -> tuple[Params, int]:  # fmt: skip
    """params with the trained arrays of the newest whole step (or of `step`) in their places, and that step."""
    first = checkpoint.flatten(params)
    trained = {name for name, yes in checkpoint.flatten(models.trainable(params)).items() if yes}
    saved = record["agents"][agent]["arrays"]
    if trained != {name.removeprefix(TRAINABLE) for name in saved if name.startswith(TRAINABLE)}:
        raise UserError(f"the checkpoints in {store.folder} do not fit agent {agent}: was its `lora` changed?")
    everywhere = sharding.replicated(next(iter(first.values())).sharding.mesh)
    like = {}
    for name, (*shape, dtype) in saved.items():  # moments lie as the arrays do in whose names theirs end
        places = (x.sharding for key, x in first.items() if name.endswith(f"/{key}") and list(x.shape) == shape)
        like[name] = jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=next(places, everywhere))
    kept = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) if name in trained else x for name, x in first.items()}
    shape_of = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for name in trained:
        first[name].delete()  # room for the restored ones
    restored = store.restore({agent: like}, say, last=step)
    if restored is None or (step is not None and restored.step != step):
        raise UserError(f"the checkpoint of step {step} in {store.folder} is damaged")
    new = {name: restored.agents[agent][TRAINABLE + name] for name in trained}
    return checkpoint.unflatten(shape_of, kept | new), restored.step


def _origin(settings: AgentConfig) -> str:
    if Path(settings.model).expanduser().is_dir():
        return f"`{Path(settings.model).name}`"
    revision = f" at {settings.revision}" if settings.revision else ""
    return f"[{settings.model}](https://huggingface.co/{settings.model}){revision}"


def _partners(config: Config, settings: AgentConfig) -> list[str]:
    others = [other for other in config.agents if other.name != settings.name]
    if not others or config.objective.cross == "none":
        return ["It was trained on its own answers only.", ""]
    named = [f"- {other.name}: {_origin(other)}" for other in others]
    return ["It also learned from the verified answers of its partners:", "", *named, ""]


def _evaluation(done: report.Finished, agent: str) -> list[str]:
    """A table of accuracies before training and at the last evaluation up to the exported step."""
    rows = []
    for line in report.lines([done]):
        if line.agent == agent:
            steps, _ = done.series(agent, line.measure)
            before, after = _figure(line.before, line.before_error), _figure(line.after, line.after_error)
            last = steps[-1] if line.after is not None else ""
            rows.append(f"| {line.measure.removeprefix('eval/')} | {before} | {after} | {last} |")
    if not rows:
        return ["It was not evaluated up to this step.", ""]
    about = "Accuracy with its standard error over problems, judged by the verifier that training used."
    return ["| evaluation | before | after | after step |", "|---|---|---|---|", *rows, "", about, ""]


def _figure(value: float | None, error: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _front_matter(settings: AgentConfig, source: Path) -> dict[str, Any]:
    """What the hub reads. The license is the base model's, as its own card states it."""
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if not Path(settings.model).expanduser().is_dir():
        found["base_model"] = settings.model
    card = source / "README.md"
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2) if card.is_file() else []
    if len(parts) == 3 and not parts[0].strip():
        try:
            theirs = yaml.safe_load(parts[1])
        except yaml.YAMLError:
            theirs = None
        if isinstance(theirs, dict):
            found |= {key: value for key, value in theirs.items() if str(key).startswith("license")}
    return found | {"tags": ["hacrl_jax", "reinforcement-learning"]}


@contextmanager
def _clean(to: Path) -> Iterator[None]:
    """Leave nothing half-written beside `to`: not when told to end, and not what an export that was killed left.

    Exports into one parent hold a lock on it, shared, so what is there while none holds it belongs to nobody.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(to.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in to.parent.glob(f".{to.name}.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        fcntl.flock(handle, fcntl.LOCK_SH)
    except OSError:  # another export is at work, or a file system without locks
        pass
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _stop) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
        os.close(handle)


def _stop(number: int, _: Any) -> None:
    raise SystemExit(128 + number)
