"""`hacrl generate` and `hacrl serve`: trained agents at work. Part of cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None)

Target = Annotated[str, typer.Argument(metavar="FOLDER", help="A model folder, a run folder (runs/NAME), or a hub id.")]
Agent = Annotated[str | None, typer.Option(help="Which agent of a run folder.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that have this much probability; 1 is off.")]
TopK = Annotated[int, typer.Option(min=0, help="Keep the likeliest k tokens; 0 is off.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest; 0 is off.")]
MaxResponse = Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")]
Stop = Annotated[list[str] | None, typer.Option(help="A string that ends an answer; repeatable.")]
Seed = Annotated[int, typer.Option(min=0, help="An answer depends on seed, row and sample alone.")]


@app.command()
def generate(
    folder: Target,
    prompts: Annotated[Path, typer.Argument(metavar="PROMPTS.jsonl", help="Rows with `prompt` or `messages`.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers are appended as they are finished.")],
    agent: Agent = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each row.")] = 1,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    max_response: MaxResponse = 1024,
    max_prompt: Annotated[int, typer.Option(min=0, help="Refuse longer prompts; 0 takes all.")] = 0,
    stop: Stop = None,
    seed: Seed = 0,
    slots: Annotated[int, typer.Option(min=0, help="Answers in flight; 0 is up to 256.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Answer every row of a JSONL file. Interrupted, the same command continues where it stopped.

    Example: hacrl generate runs/quickstart questions.jsonl answers.jsonl --agent a --samples 4
    """
    from hacrl_jax import generate as room

    options = room.Options(
        samples, temperature, top_p, top_k, min_p, max_response, max_prompt, tuple(stop or ()), seed, slots,
        _dtype(dtype),
    )  # fmt: skip
    with room.progress_bar(out.name) as progress:
        added = room.generate(room.policy(folder, agent=agent, dtype=options.dtype), prompts, out, options, progress)
    typer.echo(f"{added} answers added to {out}")


@app.command()
def serve(
    folder: Target,
    agent: Agent = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 9000,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    slots: Annotated[int, typer.Option(min=1, help="Answers in flight.")] = 16,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    max_prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt at most.")] = 1024,
    max_response: MaxResponse = 1024,
    stop: Stop = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Serve an agent over gRPC with google-jetstream's orchestrator (pip install 'hacrl_jax[jetstream]').

    Clients speak jetstream.core.proto: text_content is what the user says, token_content is a whole prompt.
    """
    from hacrl_jax import serving

    settings = serving.Settings(
        slots, max_prompt, max_response, temperature, top_p, top_k, min_p, tuple(stop or ()), seed, host, port
    )
    from hacrl_jax.generate import policy

    server = serving.start(policy(folder, agent=agent, dtype=_dtype(dtype)), settings)
    typer.echo(f"serving {folder} on {host}:{server.port}; Ctrl-C stops")
    server.wait_for_termination()


def _dtype(name: str) -> str:
    from hacrl_jax.types import UserError

    if name not in ("auto", "float32", "bfloat16"):
        raise UserError(f"--dtype {name}: there are auto, float32 and bfloat16")
    return name
