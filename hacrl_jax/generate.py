"""`hacrl generate`: answers to a JSONL file of prompts, and the loading of a policy that is deployed alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hacrl_jax import config as configs
from hacrl_jax import export, metrics, models, sharding, tokenizer
from hacrl_jax.agent import compute_dtype
from hacrl_jax.config import MeshConfig, PromptConfig, RolloutConfig
from hacrl_jax.sampler.engine import MAX_SLOTS, Engine
from hacrl_jax.sampler.rollout import Schedule, Work
from hacrl_jax.sampler.sampling import sampling
from hacrl_jax.tokenizer import Tokenizer
from hacrl_jax.types import Params, Problem, UserError

Progress = Callable[[int, int], None]  # (samples done, samples in all)


@dataclass
class Policy:
    """One agent, ready to answer: what a model folder or a run's checkpoint holds."""

    name: str
    graphdef: Any
    model: models.DecoderConfig
    axes: Any  # logical axes of params
    params: Params | None
    tokenizer: Tokenizer
    dtype: Any
    mesh: Mesh

    def engine(self, settings: RolloutConfig) -> tuple[Engine, Params]:
        """An engine of these sizes and its copy of the parameters, which takes their place: once only."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.params)
        engine = Engine(
            self.graphdef, self.model, shapes, eos=self.tokenizer.eos, vocab_size=self.tokenizer.vocab_size,
            config=settings, mesh=self.mesh, dtype=self.dtype, axes=self.axes, lanes=1,
        )  # fmt: skip
        copy, self.params = engine.load_params(self.params), None
        return engine, copy


@dataclass(frozen=True)
class Options:
    """How answers are drawn. max_prompt 0 is the longest prompt of the file, slots 0 as many as there are samples."""

    samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_response: int = 1024
    max_prompt: int = 0
    stop: tuple[str, ...] = ()  # strings that end an answer; they are not part of its text
    seed: int = 0
    slots: int = 0
    dtype: configs.Dtype = "auto"


def policy(target: str, *, agent: str | None = None, dtype: configs.Dtype = "auto") -> Policy:
    """Load a model folder or hub id, or an agent of a run folder as its newest checkpoint has it.

    Raises UserError where there is no such model, agent or checkpoint.
    """
    if (Path(target) / "config.yaml").is_file():
        return _of_run(Path(target), agent, dtype)
    if agent is not None:
        raise UserError(f"--agent {agent}: {target} is no run folder (it has no config.yaml)")
    folder = models.resolve(target)
    mesh = sharding.make_mesh(MeshConfig())
    tok = tokenizer.load(folder, PromptConfig())
    with jax.set_mesh(mesh):
        graphdef, model, params = models.load(folder, mesh=mesh, dtype=compute_dtype(dtype))
    return Policy(target, graphdef, model, models.abstract(model)[2], params, tok, compute_dtype(dtype), mesh)


def _of_run(run: Path, name: str | None, dtype: configs.Dtype) -> Policy:
    config = configs.load(run / "config.yaml")
    names = [agent.name for agent in config.agents]
    if name is None and len(names) > 1:
        raise UserError(f"{run} has agents {', '.join(names)}: say which with --agent")
    found = export.trained(run, name or names[0])
    tok = tokenizer.load(found.folder, found.settings.prompt)
    own = compute_dtype(found.settings.dtype if dtype == "auto" else dtype)
    axes = models.abstract(found.model, found.settings.lora)[2]
    return Policy(f"{run}:{name or names[0]}:{found.step}", found.graphdef, found.model, axes, found.params, tok, own,
                  found.mesh)  # fmt: skip


def generate(policy: Policy, prompts: Path, out: Path, options: Options, progress: Progress | None = None) -> int:
    """Answer every row of a JSONL file, ``samples`` times; the answers go to ``out`` as they are finished.

    A row has `prompt` (what the user says) or `messages` (role and content each), and may have an `id`. An answer is
    {row, id, sample, text, finish: stop or length, tokens}. Called again, it continues where it was interrupted: an
    answer depends on seed, row and sample alone. Returns how many answers were added. Raises UserError for rows that
    it cannot read, prompts too long, or an ``out`` that was written with other settings.
    """
    settings = sampling(options.temperature, options.top_p, options.top_k, options.min_p)
    rows = metrics.read(prompts)
    problems = [_problem(row, number, prompts) for number, row in enumerate(rows)]
    ids = [tokenizer.render(policy.tokenizer, problem) for problem in problems]
    done = _done(out, policy.name, options, prompts)
    waiting = deque(n for n in range(len(ids) * options.samples) if divmod(n, options.samples) not in done)
    if not waiting:
        return 0
    longest = max(len(prompt) for prompt in ids)
    if options.max_prompt and longest > options.max_prompt:
        row = next(number for number, prompt in enumerate(ids) if len(prompt) == longest)
        raise UserError(f"{prompts}: row {row + 1} has {longest} prompt tokens; --max-prompt is {options.max_prompt}")
    slots = options.slots or min(len(waiting), MAX_SLOTS)
    config = RolloutConfig(
        prompts=slots,
        samples=1,
        max_prompt=options.max_prompt or longest,
        max_response=options.max_response,
        slots=slots,
    )
    engine, params = policy.engine(config)
    tokens = np.zeros((len(ids), longest), np.int32)
    for line, prompt in zip(tokens, ids, strict=True):
        line[: len(prompt)] = prompt
    work = Work(
        params, settings, jax.random.key(options.seed), tokens, np.asarray([len(prompt) for prompt in ids]),
        np.arange(len(ids)), np.full(len(ids) * options.samples, options.max_response), options.samples,
    )  # fmt: skip
    with out.open("a", encoding="utf-8", newline="\n") as file:
        writer = _Writer(policy.tokenizer, options, rows, file, progress, len(done), len(done) + len(waiting))
        Schedule(engine, work, waiting, watch=writer).run()
    return writer.done - len(done)


@dataclass
class _Writer:
    """Collects the tokens of running samples and writes an answer once it is finished."""

    tokenizer: Tokenizer
    options: Options
    rows: Sequence[dict[str, Any]]
    file: TextIO
    progress: Progress | None
    done: int
    total: int
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def __call__(self, sample: int, new: np.ndarray, finished: bool) -> bool:
        tokens = self.tokens.setdefault(sample, [])
        tokens += new.tolist()
        ended = bool(tokens) and tokens[-1] in self.tokenizer.eos
        text, cut = "", False
        if finished or self.options.stop:
            text = tokenizer.decode(self.tokenizer, tokens[: len(tokens) - ended])
            text, cut = before_stop(text, self.options.stop)
        if finished or cut:
            self._write(sample, text, "stop" if ended or cut else "length")
        return cut

    def _write(self, sample: int, text: str, finish: str) -> None:
        row, number = divmod(sample, self.options.samples)
        given = self.rows[row].get("id", row)
        count = len(self.tokens.pop(sample))
        answer = {"row": row, "id": given, "sample": number, "text": text, "finish": finish, "tokens": count}
        self.file.write(metrics.to_json(answer) + "\n")
        self.file.flush()
        self.done += 1
        if self.progress:
            self.progress(self.done, self.total)


@contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """Answers done, redrawn on stderr where that is a terminal; nothing elsewhere."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """(text up to the first of the stop strings, whether there is one)."""
    at = min((text.find(string) for string in stop if string in text), default=math.inf)
    return (text, False) if at == math.inf else (text[: int(at)], True)


def _problem(row: Any, number: int, source: Path) -> Problem:
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    if not isinstance(messages, list) or not messages or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):  # fmt: skip
        raise UserError(f"{source}: row {number + 1} needs `prompt` (text) or `messages` (role and content each)")
    return Problem(number, tuple((m["role"], m["content"]) for m in messages), "", source.stem)


def _done(out: Path, model: str, options: Options, prompts: Path) -> set[tuple[int, int]]:
    """The (row, sample) that out holds already; its settings are kept beside it, in OUT.settings.json."""
    kept = out.with_name(out.name + ".settings.json")
    asked = json.loads(json.dumps(asdict(options)))
    asked |= {"model": model, "prompts": hashlib.sha256(prompts.read_bytes()).hexdigest()}
    for name in ("slots", "max_prompt"):
        del asked[name]  # they change no answer
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        metrics.write_atomic(kept, json.dumps(asked, indent=1) + "\n")
        return set()
    if not kept.is_file():
        raise UserError(f"{out} exists, and {kept.name} that would say how it was made does not; name another file")
    before = json.loads(kept.read_text("utf-8"))
    changed = [name for name in asked if before.get(name) != asked[name]]
    if changed:
        raise UserError(f"{out} was written with other settings ({', '.join(changed)}); name another file or remove it")
    rows = metrics.read(out)
    metrics.write_atomic(out, "".join(metrics.to_json(row) + "\n" for row in rows))  # without a torn last line
    return {(row["row"], row["sample"]) for row in rows}
