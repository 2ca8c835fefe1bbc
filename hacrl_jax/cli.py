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

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides of the config, dotted, list indices allowed: steps=20 agents.1.optimizer.lr=1e-6 preset=gspo",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run at its last complete checkpoint.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move an existing run folder aside to NAME.1 and start anew.")]


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

    folder = metrics.check(resolved, resume=resume, fresh=fresh)
    from hacrl_jax.algorithm import train as run

    run(resolved, resume=resume, fresh=fresh)
    report.finish([folder])


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


def main(arguments: list[str] | None = None) -> None:
    """The console script: run a command and exit with its status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        status: Any = app(arguments, standalone_mode=False)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 2
        if (line := _mistake(error)) is None:
            raise
        return _say(line, 130 if line == "interrupted" else 2)
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
    if type(error).__name__ == "Abort":
        return "interrupted"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full ({error.strerror}: {error.filename}); free some space, then continue with --resume"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.strerror}: {error.filename}"
    return None


def _say(line: str, status: int) -> int:
    print(f"error: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
