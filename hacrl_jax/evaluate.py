"""Agents on held-out problems: generate, grade, and go on where an interrupted evaluation stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hacrl_jax import agent as policy
from hacrl_jax import checkpoint, guard, hosts, measures, metrics, models, results, resuming, tokenizer
from hacrl_jax import config as configs
from hacrl_jax.agent import Agent
from hacrl_jax.config import Config, EvalSet
from hacrl_jax.sampler.engine import Engine
from hacrl_jax.sharding import make_mesh
from hacrl_jax.tasks import data
from hacrl_jax.tasks.grader import Grader
from hacrl_jax.tasks.verify import Verdict, extract
from hacrl_jax.types import Problem, UserError

HeldOut = Sequence[tuple[EvalSet, Sequence[Problem]]]
Answers = list[dict[str, Any]]
Say = Callable[[str], None]
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."  # the paper's, as the authors'
BEST_OF = 30  # samples of an AIME set, as in the paper


# ---- in a training run


def all_agents(agents: Sequence[Agent], held_out: HeldOut, grader: Grader, step: int, run: metrics.Run,
               watch: guard.Watch) -> None:  # fmt: skip
    """Evaluate every agent on every set; one metrics row each, all or none of them."""
    rows = []
    for agent in agents:
        row: dict[str, Any] = {"step": step, "agent": agent.name}
        for settings, problems in held_out:
            run.progress(step, f"{agent.name} on {name(settings)}")
            with watch.phase("evaluate", agent.name):
                answers = []
                for group in answer(agent, problems, settings, grader, step):
                    answers.append(group)
                    watch.beat()
            row |= summary(settings, answers)
        rows.append(row)
    for row in rows:
        run.log(row)


def name(settings: EvalSet) -> str:
    """How metrics call a set."""
    return settings.data.name or Path(settings.data.source).stem


def summary(settings: EvalSet, answers: Sequence[Answers]) -> dict[str, float]:
    """The metrics of one set from its graded answers, k for each problem; the error is over problems."""
    correct = measures.avg_at_k(np.asarray([[item["reward"] for item in group] for group in answers]))  # [problems]
    key = f"eval/{name(settings)}"
    return {
        f"{key}/avg@{settings.samples}": correct.mean(),
        f"{key}/avg@{settings.samples}/stderr": results.stderr(correct),
        f"{key}/problems": len(correct),
        f"{key}/stop_rate": np.mean([item["finish"] == "stop" for group in answers for item in group]),
    }


def answer(
    agent: Agent, problems: Sequence[Problem], settings: EvalSet, grader: Grader, step: int
) -> Iterator[Answers]:
    """The graded answers of one agent, problem by problem, k each."""
    size, k = agent.config.rollout.prompts, settings.samples
    for start in range(0, len(problems), size):
        chunk = list(problems[start : start + size])
        rollouts = agent.answer(chunk, settings, step, k)
        text = agent.text(rollouts)
        golds = [problem.gold for problem in chunk for _ in range(k)]
        verdicts = hosts.spread(Verdict, grader.grade, golds, list(text))
        length, stopped = jax.device_get((rollouts.length, rollouts.stopped))
        for b, problem in enumerate(chunk):
            yield [
                {
                    "problem": problem.id, "prompt": problem.messages[-1][1], "gold": problem.gold, "response": text[i],
                    "answer": _boxed(text[i], grader), "reward": float(verdicts[i].correct),
                    "verdict": verdicts[i].reason, "tokens": int(length[i]),
                    "finish": "stop" if stopped[i] else "length", "agent": agent.name, "sample": i - b * k,
                    "set": name(settings), "step": step,
                }
                for i in range(b * k, (b + 1) * k)
            ]  # fmt: skip


def _boxed(response: str, grader: Grader) -> str | None:
    found = extract(response, grader.policy)
    return None if isinstance(found, Verdict) else found


# ---- on its own


def target(path: str, overrides: Sequence[str]) -> tuple[Config, str | None]:
    """The config of what is to be evaluated, and where its checkpoints are (None: models as they were downloaded).

    path: a YAML file, a run folder, or a model (a folder in Hugging Face format or a hub id).
    """
    if Path(path).suffix in (".yaml", ".yml"):
        return configs.load(path, overrides), None
    if (Path(path) / "config.yaml").is_file():
        config = configs.load(Path(path) / "config.yaml", overrides)
        return config, resuming.place(config, Path(path))
    models.resolve(path)  # raises where there is none
    raw = {
        "name": "eval", "agents": [{"name": Path(path).name, "model": path}], "rollout": {"prompts": 64},
        "minibatch": 1, "data": {"instruction": INSTRUCTION},
    }  # fmt: skip
    return configs.override(raw, overrides, where=path), None


def benchmark(config: Config, source: str, *, samples: int = 0, temperature: float | None = None, max_response: int = 0,
              instruction: str | None = None) -> EvalSet:  # fmt: skip
    """A set on a benchmark file (or data set id), asked as the config's training problems are.

    samples 0: as in the paper, 30 for AIME and 1 for others. temperature None: greedy for one sample, 1 for several.
    """
    samples = samples or (BEST_OF if results.BEST in Path(source).stem.lower() else 1)
    asked = config.data.instruction if instruction is None else instruction
    changes = {"source": source, "instruction": asked, "split": "test"}
    kept = config.data.arithmetic if source == "arithmetic" else configs.ArithmeticConfig()
    return EvalSet(
        data=configs.DataConfig(**changes, arithmetic=kept), samples=samples, max_response=max_response,
        temperature=(0.0 if samples == 1 else 1.0) if temperature is None else temperature,
    )  # fmt: skip


def on(config: Config, sets: Sequence[EvalSet]) -> Config:
    """The config with other sets to evaluate on; none keeps its own."""
    return config.model_copy(update={"eval": config.eval.model_copy(update={"sets": tuple(sets)})}) if sets else config


@hosts.together
def evaluate(config: Config, *, checkpoints: str | None = None, step: int | None = None, to: Path | None = None,
             agents: Sequence[str] = (), say: Say = print) -> Answers:  # fmt: skip
    """The graded answers of agents (default: all) on the sets of config.eval.sets.

    checkpoints: where the run's are; its newest step, or `step`, is evaluated. to: a JSONL file that receives the
    answers as they come. A call that finds it half-done goes on at the first problem without all its answers; what it
    was made with is in FILE.settings.json. An answer depends on seed, step, problem and sample, not on interruptions.
    Of several hosts only the first one has answers to return.
    Raises UserError where there is no set, no such agent or checkpoint, or the file was made with other settings.
    """
    if not config.eval.sets:
        raise UserError("eval.sets is empty; name a benchmark with --on FILE, or set eval.sets in the config")
    names = [each.name for each in config.agents]
    if unknown := [each for each in agents if each not in names]:
        raise UserError(f"--agent {unknown[0]}: there are {', '.join(names)}")
    held_out = [(settings, data.problems(settings.data)[0]) for settings in config.eval.sets]
    if len({name(settings) for settings, _ in held_out}) < len(held_out):
        raise UserError("eval.sets: two sets have the same name; give them different data.name")
    at = 0 if checkpoints is None else _step(checkpoints, config, step)
    file = _File(to, _settings(config, at, held_out))
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh), Grader(config.verifier) as grader, guard.memory("evaluate"):
        for k, own in enumerate(names):
            todo = [(settings, file.unanswered(own, settings, problems)) for settings, problems in held_out]
            if (agents and own not in agents) or not any(problems for _, problems in todo):
                continue
            agent = _agent(_fitted(config, k, held_out), k, mesh, checkpoints, at, say)
            for settings, problems in todo:
                say(f"{own} on {name(settings)}: {len(problems)} problems, {settings.samples} answers each")
                for group in answer(agent, problems, settings, grader, at):
                    file.add(group)
    return file.answers


class _File:
    """The answers so far, on the first host: in memory and on disk. All hosts know which problems are done."""

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self.path, self.answers = path if jax.process_index() == 0 else None, []
        if self.path:
            kept = self.path.with_name(self.path.name + ".settings.json")
            if self.path.exists():
                self.answers = _whole(metrics.read(self.path), settings, self.path, kept)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                metrics.write_atomic(kept, json.dumps(settings, indent=1) + "\n")
            metrics.write_atomic(self.path, "".join(metrics.to_json(row) + "\n" for row in self.answers))
        done = [(row["agent"], row["set"], row["problem"]) for row in self.answers if row["sample"] == 0]
        self.done = {tuple(key) for key in hosts.gather("answers", done)[0]}

    def unanswered(self, agent: str, settings: EvalSet, problems: Sequence[Problem]) -> list[Problem]:
        return [problem for problem in problems if (agent, name(settings), problem.id) not in self.done]

    def add(self, group: Answers) -> None:
        self.answers += group if jax.process_index() == 0 else []
        if self.path:
            with self.path.open("a", encoding="utf-8", newline="\n") as file:
                file.write("".join(metrics.to_json(row) + "\n" for row in group))


def _whole(rows: Answers, settings: dict[str, Any], path: Path, kept: Path) -> Answers:
    """The rows of problems that have all their answers. UserError where they were made with other settings."""
    if not kept.is_file():
        raise UserError(f"{path} exists, and {kept.name} that would say how it was made does not; name another file")
    before = json.loads(kept.read_text("utf-8"))
    if changed := [key for key in settings if before.get(key) != settings[key]]:
        raise UserError(f"{path} was made with other settings ({', '.join(changed)}); name another file or remove it")
    groups: dict[tuple[str, str, int], Answers] = {}
    for row in rows:
        groups.setdefault((row["agent"], row["set"], row["problem"]), []).append(row)
    samples = {one["name"]: one["samples"] for one in settings["sets"]}
    return [row for (_, own, _), group in groups.items() if len(group) == samples[own] for row in group]


def _settings(config: Config, step: int, held_out: HeldOut) -> dict[str, Any]:
    """What the answers of an evaluation depend on, as JSON."""
    fields = ("name", "model", "revision", "dtype", "prompt")
    sets = [
        {"name": name(settings), "problems": data.fingerprint(problems)}
        | settings.model_dump(mode="json", exclude={"data", "max_response"})
        | {"max_response": settings.max_response or config.rollout.max_response}
        for settings, problems in held_out
    ]
    made = {
        "agents": [{field: agent.model_dump(mode="json")[field] for field in fields} for agent in config.agents],
        "step": step, "seed": config.seed, "sets": sets, "policy": config.verifier.policy.model_dump(mode="json"),
    }  # fmt: skip
    return json.loads(json.dumps(made))


def _step(checkpoints: str, config: Config, wanted: int | None) -> int:
    with checkpoint.Store(checkpoints, config.checkpoint, write=False) as store:
        steps = store.steps()
    if not steps:
        raise UserError(f"{checkpoints} holds no complete checkpoint")
    if wanted is not None and wanted not in steps:
        raise UserError(f"--step {wanted}: {checkpoints} holds steps {', '.join(map(str, steps))}")
    return steps[-1] if wanted is None else wanted


def _fitted(config: Config, index: int, held_out: HeldOut) -> Config:
    """The config with a sampler just large enough for an agent's prompts and answers, and no reference policy."""
    settings, rollout = config.agents[index], config.rollout
    tok = tokenizer.load(models.resolve(settings.model, settings.revision), settings.prompt)
    longest = max(len(tokenizer.render(tok, problem)) for _, problems in held_out for problem in problems)
    changes = {
        "prompts": min(rollout.prompts, max(len(problems) for _, problems in held_out)),
        "samples": max(each.samples for each, _ in held_out), "max_prompt": longest,
        "max_response": max(each.max_response or rollout.max_response for each, _ in held_out),
    }  # fmt: skip
    sets = tuple(
        each.model_copy(update={"max_response": each.max_response or rollout.max_response}) for each in config.eval.sets
    )
    return config.model_copy(update={
        "rollout": rollout.model_copy(update=changes), "eval": config.eval.model_copy(update={"sets": sets}),
        "objective": config.objective.model_copy(update={"kl_coefficient": 0.0}),
    })  # fmt: skip


def _agent(config: Config, index: int, mesh: Mesh, checkpoints: str | None, step: int, say: Say) -> Agent:
    """An agent that only answers: the sampler's copy of the parameters is all that stays of it."""
    if checkpoints is None:
        return _downloaded(config, index, mesh)
    agent = policy.create(config, index, mesh, config.updates_per_step())
    with checkpoint.Store(checkpoints, config.checkpoint, write=False) as store:
        restored = resuming.load(store, [agent], resuming.first_weights([agent]), say, last=step)
    if restored is None or restored.step != step:
        whole = f"; --step {restored.step} is whole" if restored else ""
        raise UserError(f"the checkpoint of step {step} in {checkpoints} is damaged{whole}")
    return replace(agent, state=None)


def _downloaded(config: Config, index: int, mesh: Mesh) -> Agent:
    settings = config.agents[index]
    folder = models.resolve(settings.model, settings.revision)
    dtype = policy.compute_dtype(settings.dtype)
    graphdef, model, params = models.load(folder, mesh=mesh, dtype=dtype)  # without LoRA: its adapters are zero
    tok = tokenizer.load(folder, settings.prompt)
    engine = Engine(
        graphdef, model, params, eos=tok.eos, vocab_size=tok.vocab_size, config=config.rollout, mesh=mesh, dtype=dtype,
        axes=models.abstract(model)[2],
    )  # fmt: skip
    copy = engine.load_params(params)
    return Agent(settings.name, index, folder, config, model, graphdef, tok, engine, None, mesh, mesh, None, copy, None)
