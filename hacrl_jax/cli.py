"""`hacrl ...`: a thin shell over the package's functions.

Rooms are imported inside the commands, so that `hacrl --help` does not wait for JAX. A user's mistake (UserError, a
wrong option, a full disk) is one line on stderr and status 2; a traceback means a bug.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hacrl_jax import cli_answers

app = typer.Typer(
    name="hacrl",
    help="Train several language models that learn from each other's verified answers (HACPO, arXiv 2603.02604).\n\n"
    "Start with `hacrl train configs/quickstart.yaml`; every command explains itself with --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
data = typer.Typer(help="Look at data sets.", no_args_is_help=True)
app.add_typer(data, name="data")
app.add_typer(cli_answers.app)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides of the config, dotted, list indices allowed: steps=20 agents.1.optimizer.lr=1e-6 preset=gspo",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line, instead of text.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run at its last complete checkpoint.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move an existing run folder aside to NAME.1 and start anew.")]

INTERRUPTED = 130  # what typer returns after Ctrl-C


@app.command()
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file such as configs/quickstart.yaml.")],
    overrides: Overrides = None,
    resume: Resume = False,
    fresh: Fresh = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
) -> None:
    """Train all agents of CONFIG with HACPO (or another `preset`), with evaluation before and after.

    The run's files go to runs/NAME (`runs` and `name` in the config): config.yaml, metrics.jsonl, rollouts/,
    tensorboard/, checkpoints/, report.html. An existing run folder is refused unless --resume or --fresh is given.
    """
    from hacrl_jax.config import dump, load

    resolved = load(config, overrides or [])
    if dry_run:
        typer.echo(dump(resolved), nl=False)
        return
    from hacrl_jax import metrics, report

    metrics.check(resolved, resume=resume, fresh=fresh)  # before JAX and the models are loaded
    from hacrl_jax.algorithm import train as run

    summary = run(resolved, resume=resume, fresh=fresh)
    if summary.writes:  # of several hosts, the one that has the run's files
        report.finish([summary.folder])


@app.command(name="eval")
def eval_command(
    target: Annotated[str, typer.Argument(help="A run folder, model folder, hub id, YAML file or answers.jsonl.")],
    overrides: Overrides = None,
    on: Annotated[list[str] | None, typer.Option(help="Benchmark: file or data set id. Default: eval.sets.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Answers per problem; 0: 30 on AIME, else 1.")] = 0,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: 0 for 1 answer, 1.0 for several.")] = None,
    max_response: Annotated[int, typer.Option(min=0, help="Tokens of an answer; 0 is the config's.")] = 0,
    instruction: Annotated[str | None, typer.Option(help="Appended to questions. Default: the config's.")] = None,
    agent: Annotated[list[str] | None, typer.Option(help="Only this agent; repeatable.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Checkpoint of a run; default: the newest.")] = None,
    at: Annotated[list[int] | None, typer.Option(min=1, help="k of pass, maj, best besides all answers.")] = None,
    to: Annotated[Path | None, typer.Option(help="Every graded answer, as JSONL; continued where it exists.")] = None,
    against: Annotated[Path | None, typer.Option(help="answers.jsonl to compare with, problem by problem.")] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate agents on benchmarks: avg@k, pass@k, maj@k, best@k with 95% intervals, a table, the agents as a team.

    TARGET is a run (at its newest checkpoint or --step), a model as it is, or a config's models as they are. With
    answers.jsonl of an earlier call nothing is generated. An interrupted call with --to goes on where it stopped.

    hacrl eval runs/mine --on aime24.jsonl --on math500.jsonl --to after.jsonl --against before.jsonl
    """
    from hacrl_jax import metrics, results

    before = results.collect(metrics.read(against)) if against else []
    if target.endswith(".jsonl"):
        answers = metrics.read(target)
    else:
        from hacrl_jax import evaluate

        config, checkpoints = evaluate.target(target, overrides or [])
        asked = {"samples": samples, "temperature": temperature, "max_response": max_response}
        sets = [evaluate.benchmark(config, source, instruction=instruction, **asked) for source in on or []]
        answers = evaluate.evaluate(
            evaluate.on(config, sets), checkpoints=checkpoints, step=step, to=to, agents=agent or [],
            say=lambda line: typer.echo(line, err=True),
        )  # fmt: skip
    for line in results.told(results.collect(answers), before, at or [], as_json):
        typer.echo(line)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(min=1, help="The step whose updates are rebuilt.")] = 1,
    agent: Annotated[list[str] | None, typer.Option(help="Only this agent; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild a step's updates from a run's files, without sampling, and compare them with what the run logged.

    Needs rollouts/*.safetensors from the step after a checkpoint (or from the first) up to this one. Overrides of the
    config show what other settings would have made of the same answers. Ends with status 1 where numbers differ.
    """
    from hacrl_jax.metrics import to_json
    from hacrl_jax.replay import replay as run_replay

    found = run_replay(run, step, agent or [], overrides or [], lambda line: typer.echo(line, err=True))
    for one in found:
        if as_json:
            typer.echo(to_json({"agent": one.agent, "step": step, "exact": one.exact, **vars(one)}))
            continue
        for row in one.updates:
            typer.echo(f"{one.agent}  " + "  ".join(f"{key} {value}" for key, value in row.items()))
        said = "as recorded, to the last bit" if one.exact else f"recorded: {one.recorded}"
        typer.echo(f"{one.agent}  mean loss {one.means['loss']}  grad_norm {one.means['grad_norm']}  {said}")
    raise typer.Exit(0 if overrides or all(one.exact for one in found) else 1)


@app.command()
def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file such as configs/paper/*.yaml.")],
    overrides: Overrides = None,
    topology: Annotated[str, typer.Option(help="v5e, v5p or v6e with a shape, such as v5p:2x2x2.")] = "v5e:4x4",
    analytic: Annotated[bool, typer.Option("--analytic", help="Estimate, even where libtpu could compile.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether a run fits a TPU topology, before anyone rents it.

    Compiles update, score, prefill and decode of every agent for the topology (minutes each, on a CPU machine with
    libtpu: pip install 'hacrl_jax[tpu]'; answers are kept in ~/.cache/hacrl_jax/plan) and prints the bytes per chip of
    every phase of the loop. Without libtpu, an estimate. Status 1 when it does not fit.

    Example: hacrl plan configs/paper/qwen3_4b_and_8b.yaml --topology v5e:4x4 rollout.slots=32
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # the TPU is only described
    from hacrl_jax import plan as room
    from hacrl_jax.config import load
    from hacrl_jax.metrics import to_json

    say = (lambda _: None) if as_json else (lambda line: print(line, file=sys.stderr))
    found = room.plan(load(config, overrides or []), topology, analytic=analytic, say=say)
    typer.echo(to_json(room.record(found)) if as_json else room.table(found))
    raise typer.Exit(0 if found.fits else 1)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    agent: Annotated[str, typer.Option(help="Name of the agent.")],
    to: Annotated[Path, typer.Option(metavar="DIR", help="A folder that does not exist yet.")],
    step: Annotated[int | None, typer.Option(min=1, help="Checkpoint to take; default: the newest.")] = None,
) -> None:
    """Write a trained agent as a Hugging Face folder that transformers, vLLM and others load.

    Tensor names, dtypes and all other files are the model's own; low-rank updates are merged; README.md is a model
    card. The folder appears complete or not at all.

    Example: hacrl export runs/quickstart --agent ada --to ada
    """
    from hacrl_jax.export import export as run_export

    done = run_export(run, agent, to, step=step, say=lambda line: typer.echo(line, err=True))
    typer.echo(f"{done.agent} after step {done.step}: {done.folder}")


@app.command()
def doctor(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file such as configs/quickstart.yaml.")],
    overrides: Overrides = None,
    weights: Annotated[bool, typer.Option(help="Load every model in turn and run it once.")] = True,
    as_json: AsJson = False,
) -> None:
    """Examine a config before the run: models, memory, tokenizers of every pair, prompts, data.

    Says for every pair of agents how much of a text sample survives the exchange and how its length grows. The last
    line is the verdict; status 1 when the run would fail or be pointless.
    """
    from dataclasses import asdict

    from hacrl_jax.config import load
    from hacrl_jax.metrics import to_json

    resolved = load(config, overrides or [])
    from hacrl_jax import doctor as room

    found = room.examine(resolved, weights=weights, say=lambda line: typer.echo(line, err=True))
    typer.echo(to_json(asdict(found) | {"verdict": found.verdict}) if as_json else room.table(found))
    raise typer.Exit(0 if found.healthy else 1)


@app.command(name="report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    to: Annotated[Path | None, typer.Option(help="Where the page goes; default: report.html of the first run.")] = None,
) -> None:
    """Print the table of accuracies before and after, and write report.html with the curves.

    Example: hacrl report runs/quickstart runs/quickstart_gspo
    """
    from hacrl_jax import report

    report.finish(runs, to)


@app.command()
def grade(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Rows with `gold` and `prediction`.")],
    workers: Annotated[int, typer.Option(min=1, help="Grading processes.")] = 2,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds per answer before its process is killed.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Judge every row of a JSONL file by the verifier that training uses.

    Where rows also carry `correct` (true or false), says how many verdicts agree, lists those that do not, and ends
    with status 1 if there are any.
    """
    from hacrl_jax.metrics import read, to_json
    from hacrl_jax.types import UserError

    rows = read(file)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not {"gold", "prediction"} <= row.keys():
            raise UserError(f"{file}: row {number} needs `gold` and `prediction`")
    from hacrl_jax.config import VerifierConfig
    from hacrl_jax.tasks.grader import Grader

    with Grader(VerifierConfig(workers=workers, deadline=deadline, max_error_share=1.0)) as grader:
        verdicts = grader.grade([str(row["gold"]) for row in rows], [str(row["prediction"]) for row in rows])
    counts = grader.counts
    judged = list(enumerate(zip(rows, verdicts, strict=True), start=1))
    labelled = [item for item in judged if "correct" in item[1][0]]
    wrong = [item for item in labelled if item[1][1].correct != bool(item[1][0]["correct"])]
    totals = {
        "rows": len(rows),
        "correct": sum(verdict.correct for verdict in verdicts),
        "agree": len(labelled) - len(wrong),
        "disagree": len(wrong),
        "hung": counts.hung,
        "killed": counts.killed,
        "seconds": round(counts.seconds, 3),
        "slowest": round(counts.slowest, 3),
    }
    if as_json:
        typer.echo(to_json(totals))
    else:
        for number, (row, verdict) in wrong:
            said = f"{verdict.correct} ({verdict.reason}), labelled {row['correct']}"
            typer.echo(
                f"row {number}: {said}: gold {row['gold']!r}, prediction ends in {str(row['prediction'])[-60:]!r}"
            )
        typer.echo("  ".join(f"{key} {value}" for key, value in totals.items()))
    raise typer.Exit(1 if wrong else 0)


@data.command()
def inspect(
    source: Annotated[
        str, typer.Argument(help="`arithmetic`, a JSONL, JSON or Parquet file, a hub id; or a YAML file: all its sets.")
    ],
    split: Annotated[str, typer.Option(help="Split of the source.")] = "train",
    subset: Annotated[str | None, typer.Option(help="Configuration of a hub data set.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Read only the first rows; 0 reads all.")] = 0,
    model: Annotated[list[str] | None, typer.Option(help="Model whose tokenizer measures prompts; repeatable.")] = None,
    config: Annotated[str | None, typer.Option(help="A YAML file whose agents measure prompts.")] = None,
    max_prompt: Annotated[int, typer.Option(min=0, help="Prompts over it are counted; 0: the config's, or 1024.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show how many problems a source gives, what was dropped and why, and how long the prompts are in tokens.

    hacrl data inspect configs/quickstart.yaml
    hacrl data inspect problems.jsonl --config configs/quickstart.yaml --model Qwen/Qwen3-4B-Base
    """
    from hacrl_jax.config import DataConfig, PromptConfig, load
    from hacrl_jax.metrics import to_json
    from hacrl_jax.tasks import data as tasks
    from hacrl_jax.tasks import overview

    whole = source if source.endswith((".yaml", ".yml")) else config
    settings = load(whole) if whole else None
    sources = [DataConfig(source=source, split=split, subset=subset)]
    if whole == source:
        sources = [settings.data, *(each.data for each in settings.eval.sets)]
    read = [(each.name, each.model, each.revision, each.prompt) for each in (settings.agents if settings else ())]
    read += [(name, name, None, PromptConfig()) for name in model or []]
    found = [tasks.inspect(each.model_copy(update={"limit": limit or each.limit})) for each in sources]
    readers = overview.readers(read)
    longest = max_prompt or (settings.rollout.max_prompt if settings else 1024)
    for problems, report in found:
        seen = overview.overview(problems, report, readers, longest)
        for line in [to_json(seen)] if as_json else overview.text(seen):
            typer.echo(line)


def main(arguments: list[str] | None = None) -> None:
    """The console script: run a command and exit with its status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        status: Any = app(arguments, prog_name="hacrl", standalone_mode=False)
    except Exception as error:
        if type(error).__name__ == "Abort":
            return _say("interrupted", INTERRUPTED)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 2
        if (line := _mistake(error)) is None:
            raise
        return _say(line, getattr(error, "status", 2), getattr(error, "word", "error"))
    if status == INTERRUPTED:
        return _say("interrupted", status)
    return status if isinstance(status, int) else 0


def _mistake(error: Exception) -> str | None:
    """One line for what the user can mend; None for a bug."""
    from hacrl_jax.types import UserError

    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if hasattr(error, "format_message"):  # click's usage errors; typer brings its own copy of them since 0.2x
        context = getattr(error, "ctx", None)
        hint = f"; see {context.command_path} --help" if context else ""
        return f"{error.format_message().rstrip('.')}{hint}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = error.filename or "while writing the run's files"
        return f"the disk is full ({error.strerror}: {where}); free some space, then continue with --resume"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.strerror}: {error.filename}"
    return None


def _say(line: str, status: int, word: str = "error") -> int:
    print(f"{word}: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
