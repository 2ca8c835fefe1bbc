"""Compare hacrl_jax with PyTorch transformers on model folders, and print a table.

    python scripts/check_hf_parity.py [FOLDER ...]

For each folder (none: tiny random models of every supported kind): the largest difference of the float32 logits over
their scale, at positions up to 5,000; greedy continuations of 64 tokens against `generate`; and the bfloat16 error of
each side against PyTorch's float32. Status 1 if any logits differ by 1e-4 of their scale, any continuation differs, or
our bfloat16 error is the larger one. Needs torch; holds one float32 copy of the model at a time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import make_references
import numpy as np

from hacrl_jax.models import decoder, hf
from hacrl_jax.types import UserError

LIMIT = 1e-4


def our_results(folder: Path, ids: int, seed: int = 0) -> dict[str, np.ndarray]:
    """make_references.torch_results, computed here."""
    graphdef, config, params = hf.load(folder)
    tokens, positions, prompt = make_references.inputs(config.vocab_size, seed)

    @partial(jax.jit, static_argnums=1)
    def forward(params: Any, dtype: Any) -> jax.Array:
        return decoder.logits(params, decoder.apply(graphdef, params, tokens, positions, dtype=dtype)[0])

    exact, rough = (np.asarray(forward(params, dtype)) for dtype in (jnp.float32, jnp.bfloat16))
    greedy = greedy_tokens(graphdef, params, prompt, make_references.GREEDY, ids)
    return {"logits": exact, "bfloat16": rough, "greedy": greedy}


def greedy_tokens(graphdef: Any, params: Any, prompt: np.ndarray, count: int, ids: int) -> np.ndarray:
    """[B, count] most probable tokens after prompt [B, P], by prefill and cached decode steps."""
    b, width = prompt.shape

    def choose(params: Any, hidden: jax.Array) -> jax.Array:
        return jnp.argmax(decoder.logits(params, hidden)[:, :ids], axis=-1)

    @jax.jit
    def run(params: Any) -> jax.Array:
        def step(carry: Any, length: jax.Array) -> tuple[Any, jax.Array]:
            token, cache = carry
            lengths = jnp.full(b, length)
            hidden, new = decoder.apply(
                graphdef, params, token[:, None], lengths[:, None], cache=cache, cache_length=lengths
            )
            cache = tuple(jax.lax.dynamic_update_slice_in_dim(part, fresh, length, 2)
                          for part, fresh in zip(cache, new, strict=True))  # fmt: skip
            return (choose(params, hidden[:, 0]), cache), token

        hidden, cache = decoder.apply(graphdef, params, prompt, np.broadcast_to(np.arange(width), prompt.shape))
        cache = tuple(jnp.pad(part, ((0, 0), (0, 0), (0, count), (0, 0))) for part in cache)
        start = (choose(params, hidden[:, -1]), cache)
        return jax.lax.scan(step, start, width + jnp.arange(count))[1]  # [count, B]

    return np.asarray(run(params)).T


def compare(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """logits: largest difference over the scale; greedy: share of equal tokens; bfloat16 and its rival: errors (root
    mean square against PyTorch's float32, over the scale)."""
    exact = theirs["logits"]
    scale = exact.std()
    return {
        "logits": float(np.abs(ours["logits"] - exact).max() / scale),
        "greedy": float(np.mean(ours["greedy"] == theirs["greedy"])),
        "bfloat16": float(np.sqrt(np.mean((ours["bfloat16"] - exact) ** 2)) / scale),
        "rival": float(np.sqrt(np.mean((theirs["bfloat16"] - exact) ** 2)) / scale),
    }


def passed(row: dict[str, float]) -> bool:
    return row["logits"] < LIMIT and row["greedy"] == 1 and row["bfloat16"] <= row["rival"]


def known_ids(folder: Path) -> int:
    """Rows of the vocabulary that the folder's tokenizer uses; all of them where it has none."""
    rows = hf.read_config(folder).vocab_size
    file = folder / "tokenizer.json"
    if not file.is_file():
        return rows
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    used = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    return min(rows, 1 + max([*used, *(token["id"] for token in content.get("added_tokens", []))]))


def main(folders: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        chosen = [(folder, Path(folder), None) for folder in folders]
        for name, config in make_references.MODELS.items() if not folders else ():
            make_references.write_model(name, Path(scratch) / name)
            chosen.append((name, Path(scratch) / name, config["vocab_size"] - make_references.TAIL))
        print(f"{'logits':>9}  {'greedy':>7}  {'bfloat16':>9}  {'PyTorch':>9}        model")
        good = True
        for name, folder, ids in chosen:
            ids = known_ids(folder) if ids is None else ids
            theirs = make_references.torch_results(folder, ids)
            row = compare(our_results(folder, ids), theirs)
            good &= passed(row)
            verdict = "ok    " if passed(row) else "FAILED"
            print(f"{row['logits']:9.1e}  {row['greedy']:7.1%}  {row['bfloat16']:9.2e}  {row['rival']:9.2e}"
                  f"  {verdict}  {name}", flush=True)  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
