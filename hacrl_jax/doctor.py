"""`hacrl doctor`: what would go wrong with a config's models, tokenizers and data, asked before the run.

A fault stops the run or makes it pointless, a warning is for the user to weigh. A model that does not load is a fault
of its agent, and the others are still examined.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jinja2 import TemplateError

from hacrl_jax import evaluate, models, pairing, sharding, tokenizer
from hacrl_jax.agent import compute_dtype
from hacrl_jax.config import Config, MeshConfig
from hacrl_jax.models import DecoderConfig
from hacrl_jax.pairing import Pair
from hacrl_jax.sampler.engine import MAX_SLOTS
from hacrl_jax.tasks import data
from hacrl_jax.tokenizer import Tokenizer
from hacrl_jax.types import Problem, UserError

TRAINING = "training"  # how the training data are called here, beside the evaluation sets with their own names
SOUND = "load, logits finite"
LOSSY = 0.05  # share of lost texts from which a pair gets a warning
Say = Callable[[str], None]
Prompts = dict[str, list[list[int]]]  # data set -> ids of each of its prompts


@dataclass
class Agent:
    """What was found about one agent. Fields stay None where it did not come so far."""

    name: str
    model: str
    architecture: str | None = None
    parameters: int | None = None
    trained: int | None = None  # of the parameters, low-rank ones included
    weights: str = "not read"
    bytes: dict[str, int] = field(default_factory=dict)  # on all devices together
    ids: int | None = None  # that the tokenizer has
    rows: int | None = None  # of the embedding
    template: str | None = None
    bos: str | None = None
    eos: tuple[str, ...] = ()
    over: dict[str, int] = field(default_factory=dict)  # data set -> prompts over the limit
    longest: dict[str, int] = field(default_factory=dict)  # data set -> tokens of the longest prompt


@dataclass
class Report:
    agents: list[Agent] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    problems: dict[str, int] = field(default_factory=dict)  # data set -> usable problems
    sample: str = ""  # what the exchanged texts are
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not self.faults

    @property
    def verdict(self) -> str:
        count = lambda items, word: f"{len(items)} {word}{'' if len(items) == 1 else 's'}"  # noqa: E731
        also = f", {count(self.warnings, 'warning')}" if self.warnings else ""
        return ("ready to train" if self.healthy else f"not ready: {count(self.faults, 'fault')}") + also


def examine(config: Config, *, weights: bool = True, say: Say = lambda _: None) -> Report:
    """Examine a config. weights: load each model in turn and run it once; else only its config and tokenizer."""
    report = Report()
    sets = _problems(config, report)
    tokenizers: dict[str, Tokenizer] = {}
    prompts: list[Prompts] = []
    mesh = _mesh(config, report) if weights else None
    for index, settings in enumerate(config.agents):
        say(f"examining {settings.name}: {settings.model}")
        found = Agent(settings.name, settings.model)
        report.agents.append(found)
        try:
            folder = _shape(config, index, found, report)
            tok = tokenizer.load(folder, settings.prompt)
            prompts.append({name: [tokenizer.render(tok, p) for p in problems] for name, problems in sets.items()})
            _tokens(found, tok, prompts[-1], config.rollout.max_prompt, report)
            tokenizers[settings.name] = tok
            if mesh is not None:
                found.weights = "do not load"
                first = next((ids for rendered in prompts[-1].values() for ids in rendered), list(tok.eos))
                found.weights = _run(folder, config, index, mesh, first)
                if found.weights != SOUND:
                    report.faults.append(f"{found.name}: its weights {found.weights}: they are broken")
        except UserError as error:
            report.faults.append(f"{settings.name}: {error}")
    _memory(config, report)
    _limits(config, prompts, report)
    if config.objective.cross != "none" and len(tokenizers) > 1:
        texts, report.sample = pairing.sample(config.data, sets.get(TRAINING, []))
        for source, learner in permutations(tokenizers, 2):
            say(f"exchanging {len(texts)} texts from {source} to {learner}")
            ends = tokenizers[source], tokenizers[learner]
            report.pairs.append(pairing.pair(source, learner, *ends, texts, config.rollout.max_response))
            _weigh(report.pairs[-1], report)
    return report


def table(report: Report) -> str:
    """The report as lines for a terminal; the verdict is the last."""
    lines = [line for agent in report.agents for line in _agent_lines(agent)]
    for one in report.pairs:
        line = f"{one.source} -> {one.learner}  "
        if one.same:
            lines.append(line + "same tokenizer: ids go over as they are")
            continue
        lost = ", ".join(f"{reason}: {count}" for reason, count in one.lost.items())
        share = f"{one.lossless} of {one.texts} {report.sample} come back whole" + (f" ({lost})" if lost else "")
        lines.append(f"{line}{share}, {one.inflation:.3f} tokens for each, {one.over} outgrow max_response")
    lines += [f"data  {name}: {count} problems" for name, count in report.problems.items()]
    lines += [f"warning: {line}" for line in report.warnings] + [f"fault: {line}" for line in report.faults]
    return "\n".join([*lines, f"verdict: {report.verdict}"])


def _agent_lines(agent: Agent) -> list[str]:
    lines = [f"{agent.name}  {agent.model}  weights {agent.weights}"]
    if agent.parameters is not None:
        lines.append(f"  {agent.architecture}, {agent.parameters:,} parameters, {agent.trained:,} trained")
        lines.append("  bytes: " + ", ".join(f"{kind} {_size(size)}" for kind, size in agent.bytes.items()))
    if agent.ids is not None:
        ends = f"eos {' '.join(agent.eos)}, bos {agent.bos or 'none'}"
        lines.append(f"  {agent.ids:,} ids in {agent.rows:,} rows, {ends}, {agent.template}")
    for name, longest in agent.longest.items():
        lines.append(f"  {name}: longest prompt {longest} tokens, {agent.over[name]} over the limit")
    return lines


def _shape(config: Config, index: int, found: Agent, report: Report) -> Path:
    """Fill in what config.json tells; the model's folder."""
    settings, rollout = config.agents[index], config.rollout
    folder = models.resolve(settings.model, settings.revision)
    model = models.read_config(folder)
    _, shapes, _ = models.abstract(model, settings.lora)
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(shapes)]
    trained = sum(size for size, yes in zip(sizes, jax.tree.leaves(models.trainable(shapes)), strict=True) if yes)
    found.architecture, found.rows, found.trained = model.architecture, model.vocab_size, trained
    found.parameters = sum(sizes) - (trained if settings.lora else 0)
    found.bytes = bytes_of(config, index, model, sum(sizes), trained)
    if rollout.max_prompt + rollout.max_response > model.max_position_embeddings:
        report.faults.append(
            f"{found.name}: rollout.max_prompt {rollout.max_prompt} + max_response {rollout.max_response} exceeds its "
            f"{model.max_position_embeddings} positions; lower one of them"
        )
    return folder


def _tokens(found: Agent, tok: Tokenizer, prompts: Prompts, limit: int, report: Report) -> None:
    """Fill in what the tokenizer and the rendered prompts tell."""
    name = tok.hf.convert_ids_to_tokens
    found.ids, found.bos, found.eos = tok.vocab_size, None if tok.bos is None else name(tok.bos), tuple(name(tok.eos))
    found.template = "no chat template: prompt.format" if tok.hf.chat_template is None else "chat template"
    if tok.vocab_size > found.rows:
        report.faults.append(f"{found.name}: its tokenizer has {tok.vocab_size} ids, its embedding {found.rows} rows")
    for kind, rendered in prompts.items():
        found.longest[kind] = max(map(len, rendered), default=0)
        found.over[kind] = sum(len(ids) > limit for ids in rendered)
    first = next((ids for rendered in prompts.values() for ids in rendered), None)
    faults, warnings = prompt_findings(tok, first)
    report.faults += [f"{found.name}: {line}" for line in faults]
    report.warnings += [f"{found.name}: {line}" for line in warnings]


def prompt_findings(tok: Tokenizer, ids: Sequence[int] | None) -> tuple[list[str], list[str]]:
    """(faults, warnings) of a rendered prompt and of the template: BOS once, no EOS at the end, answers that end."""
    faults, warnings = [], []
    count = 1 if ids is None or tok.bos is None else list(ids).count(tok.bos)
    if count != 1:
        faults.append(f"a prompt has {count} BOS tokens, not one: look at prompt.format and the template")
    if ids and ids[-1] in tok.eos:
        warnings.append("a prompt ends with an end-of-sequence token: the model is asked to go on after its end")
    closing = closing_token(tok)
    if closing is not None and closing not in tok.eos:
        name, ends = tok.hf.convert_ids_to_tokens, " ".join(tok.hf.convert_ids_to_tokens(list(tok.eos)))
        warnings.append(
            f"its template closes an answer with {name(closing)!r}, which ends none here (eos: {ends}); "
            "add it to eos_token_id in generation_config.json if the model writes it"
        )
    return faults, warnings


def closing_token(tok: Tokenizer) -> int | None:
    """The id that the chat template writes after an assistant's message; None without a template."""
    if tok.hf.chat_template is None:
        return None
    mark = "ANSWER-ENDS-HERE"
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": mark}]
    arguments = {"date_string": tok.prompt.date_string} | tok.prompt.template_args
    try:
        text = tok.hf.apply_chat_template(turns, tokenize=False, **arguments)
    except TemplateError:
        return None
    ids = tok.hf(text.rpartition(mark)[2], add_special_tokens=False).input_ids
    return ids[0] if ids else None


def bytes_of(config: Config, index: int, model: DecoderConfig, size: int, trained: int) -> dict[str, int]:
    """Bytes of an agent's arrays on all devices together; size, trained: counts of parameters. No activations."""
    settings, rollout = config.agents[index], config.rollout
    width = compute_dtype(settings.dtype).itemsize
    cached = width if rollout.cache_dtype == "auto" else jnp.dtype(rollout.cache_dtype).itemsize
    slots = rollout.slots or min(rollout.prompts * rollout.samples, MAX_SLOTS)
    entries = slots * (rollout.max_prompt + rollout.max_response) * 2 * model.num_hidden_layers
    return {
        "parameters": 4 * size, "moments": 8 * trained, "gradients": 4 * trained, "sampler copy": width * size,
        "reference": width * trained if config.objective.kl_coefficient else 0,
        "cache": entries * model.num_key_value_heads * model.head_dim * cached,
    }  # fmt: skip


def _mesh(config: Config, report: Report) -> Mesh:
    """The run's mesh, or one that can be made here: the run may be meant for another machine."""
    try:
        mesh = sharding.make_mesh(config.mesh)
    except UserError as error:
        report.warnings.append(f"{error}; weights were laid out otherwise to load them")
        return sharding.make_mesh(MeshConfig())
    try:
        sharding.check_agents(config, mesh)
    except UserError as error:
        report.warnings.append(f"not on this machine: {error}")
    return mesh


def _run(folder: Path, config: Config, index: int, mesh: Mesh, ids: Sequence[int]) -> str:
    """Load the weights and give the model a prompt: SOUND, or what is wrong with the logits."""
    settings = config.agents[index]
    with jax.set_mesh(mesh):
        graphdef, _, params = models.load(folder, mesh=mesh, lora=settings.lora)

        @jax.jit
        def last(params: Any, tokens: Any) -> Any:
            place = jnp.arange(tokens.shape[1])[None]
            hidden, _ = models.apply(graphdef, params, tokens, place, dtype=compute_dtype(settings.dtype))
            return models.logits(params, hidden[:, -1])

        finite = jnp.isfinite(last(params, jnp.asarray([ids]))).all()
        return SOUND if bool(finite) else "load, but give logits that are not finite"


def _problems(config: Config, report: Report) -> dict[str, list[Problem]]:
    """The training problems, and those of every evaluation set by its name in metrics."""
    sources = {TRAINING: config.data} | {evaluate.name(one): one.data for one in config.eval.sets}
    sets = {}
    for name, settings in sources.items():
        try:
            sets[name], read = data.problems(settings)
        except UserError as error:
            report.faults.append(f"{name}: {error}")
            continue
        report.problems[name] = len(sets[name])
        for reason, rows in read.dropped.items():
            report.warnings.append(f"{name}: {len(rows)} rows dropped, {reason}")
    return sets


def _limits(config: Config, prompts: list[Prompts], report: Report) -> None:
    """Prompts that are too long: left out of training, and an obstacle in evaluation."""
    limit, wanted = config.rollout.max_prompt, config.rollout.prompts
    for agent in report.agents:
        for name, count in agent.over.items():
            line = f"{agent.name}: {count} prompts of {name} exceed rollout.max_prompt {limit}"
            if count and name == TRAINING:
                report.warnings.append(f"{line}: left out for all agents")
            elif count:
                report.faults.append(f"{line}: raise it")
    if TRAINING in report.problems:
        columns = [found[TRAINING] for found in prompts]
        kept = sum(all(len(ids) <= limit for ids in row) for row in zip(*columns, strict=True))
        if columns and kept < wanted:
            report.faults.append(f"training: all agents can read {kept} problems, and rollout.prompts is {wanted}")


def _memory(config: Config, report: Report) -> None:
    """Compare what stays, and the largest of what comes and goes, with what this machine has."""
    if not all(agent.bytes for agent in report.agents):
        return
    passing = ("gradients", "cache")
    stays = sum(size for agent in report.agents for kind, size in agent.bytes.items() if kind not in passing)
    needed = stays + max(agent.bytes[kind] for agent in report.agents for kind in passing)
    stats = jax.local_devices()[0].memory_stats() or {}
    has = stats.get("bytes_limit", 0) * jax.device_count() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > has:
        line = f"memory: {_size(needed)} for all agents without activations, this machine has {_size(has)}"
        (report.warnings if jax.default_backend() == "cpu" else report.faults).append(f"{line} (see hacrl plan)")


def _weigh(one: Pair, report: Report) -> None:
    where = f"{one.source} -> {one.learner}"
    if one.texts and not one.lossless:
        report.faults.append(f"{where}: no text survives the exchange: {one.learner} would learn nothing")
    elif one.texts - one.lossless > LOSSY * one.texts:
        report.warnings.append(f"{where}: {one.texts - one.lossless} of {one.texts} texts do not come back whole")
    if one.over:
        report.warnings.append(f"{where}: {one.over} of {one.texts} texts outgrow rollout.max_response in its tokens")
    report.warnings += [f"{where}: {line}" for line in one.collisions]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
