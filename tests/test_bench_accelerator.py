"""The accelerator's benchmark: its counts, and that it runs where no accelerator is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_accelerator
import bench_update
import jax
import pytest

from hacrl_jax import models
from hacrl_jax.models.published import published


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"])  # head tied to the embedding, and not
def test_operations_are_two_for_each_weight_and_token(name):
    config = published(name)
    _, shapes, _ = models.abstract(config)
    layers = sum(leaf.size for leaf in jax.tree.leaves(shapes) if leaf.ndim == 3)  # stacked: [layers, in, out]
    head = config.vocab_size * config.hidden_size
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert bench_accelerator.forward_flops(config, 3, 5) == 2 * layers * 8 + 2 * head * 5 + attention * 8**2


@pytest.mark.slow
def test_runs_on_cpu(tmp_path):
    shape = {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    bench_update.write(shape, tmp_path)
    small = ["--rows", "4", "--micro-batch", "2", "--length", "64", "--slots", "4", "--size", "256"]
    command = [sys.executable, bench_accelerator.__file__, str(tmp_path), *small]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    model = found[str(tmp_path)]
    assert found["matrix_tflops"] > 0 and found["copy_gb_per_s"] > 0
    assert 0 < model["update"]["mfu"] < 1
    assert model["decode"] and all(row["milliseconds"] > 0 and row["share"] > 0 for row in model["decode"].values())
