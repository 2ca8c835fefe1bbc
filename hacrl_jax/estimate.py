"""Temporaries of an agent's programs by arithmetic, where no TPU compiler is at hand: a guess for plan.py.

The largest arrays that are alive at once, as XLA is known to keep them; what it fuses or copies beyond is left out.
"""

from __future__ import annotations

import math
from typing import Any

from hacrl_jax.config import Config
from hacrl_jax.models import DecoderConfig
from hacrl_jax.topology import Compiled


def programs(config: Config, index: int, model: DecoderConfig, mesh: Any) -> dict[str, Compiled]:
    """update, score, prefill and decode of an agent on one chip of the mesh, bfloat16."""
    settings, rollout = config.agents[index], config.rollout
    batch, tensor, chips = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"], math.prod(mesh.shape.values())
    rows = settings.micro_batch or config.minibatch * rollout.samples
    width = rollout.max_prompt + rollout.max_response
    layers, d = model.num_hidden_layers, model.hidden_size
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    layer = d * (2 * q + 2 * kv + 3 * model.intermediate_size)  # parameters
    vocabulary = model.vocab_size / tensor

    def block(tokens: float, row: int, splash: bool) -> float:
        """One layer's activations and gathered weights; the plain attention also has its weights in float32."""
        inside = tokens * (4 * d + (3 * q + 4 * kv + 3 * model.intermediate_size) / tensor) * 2
        attention = 0 if splash else tokens * row * model.num_attention_heads / tensor * 6
        return inside + attention + layer / tensor * 2

    def head(tokens: float) -> float:
        return tokens * (min(settings.logprob_chunk, vocabulary) * 8 + d * 4) + vocabulary * d * 6

    tokens = math.ceil(rows / batch) * width
    splash = settings.attention == "splash"
    one, top = block(tokens, width, splash), head(tokens)
    kept = {"none": 1.0, "auto": 0.5, "dots": 0.5, "full": 0.0, "offload": 0.0}[settings.remat] * one
    inputs = 0 if settings.remat == "offload" else tokens * d * 2
    trained = layers * layer + model.vocab_size * d * (1 if model.tie_word_embeddings else 2)
    if settings.lora:
        trained = layers * settings.lora.rank * (6 * d + 2 * q + 2 * kv + 3 * model.intermediate_size)
    gradients = trained * 4 / chips * 2  # the sum, and the micro-batch that is added to it
    prompts = max(1, min(4096 // rollout.max_prompt, rollout.prompts))
    prefill = math.ceil(prompts / batch) * rollout.max_prompt
    slots = math.ceil((rollout.slots or 256) / batch)
    temporaries = {
        "update": gradients + layers * (inputs + kept) + max(2 * one, top + vocabulary * d * 4),
        "score": tokens * d * 2 + max(one, top),
        "prefill": block(prefill, rollout.max_prompt, False) + layers * prefill * 2 * kv / tensor * 2,
        "decode": slots * (vocabulary * 12 + width * model.num_attention_heads / tensor * 8) + 2 * layer / tensor * 2,
    }  # fmt: skip
    return {name: Compiled(0, 0, 0, int(size), 0, 0, {}, 0.0) for name, size in temporaries.items()}
