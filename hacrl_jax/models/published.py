"""Shapes of published models: a run can be planned before their weights (or the right to load them) are at hand.

From the models' config.json on the hub. What lies on disk wins over this table.
"""

from __future__ import annotations

from dataclasses import replace

from hacrl_jax.models.decoder import DecoderConfig
from hacrl_jax.models.rope import RopeScaling

_QWEN3 = DecoderConfig(
    architecture="Qwen3ForCausalLM", vocab_size=151_936, hidden_size=2560, intermediate_size=9728,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6,
    rope_theta=1e6, rope_scaling=None, tie_word_embeddings=True, qk_norm=True, max_position_embeddings=40_960,
)  # fmt: skip
_QWEN3_0_6B = replace(
    _QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16
)  # fmt: skip
_QWEN3_1_7B = replace(_QWEN3_0_6B, hidden_size=2048, intermediate_size=6144)
_QWEN3_8B = replace(_QWEN3, hidden_size=4096, intermediate_size=12_288, tie_word_embeddings=False)
_LLAMA3_1B = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=128_256, hidden_size=2048, intermediate_size=8192,
    num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5,
    rope_theta=5e5, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192), tie_word_embeddings=True, qk_norm=False,
    max_position_embeddings=131_072,
)  # fmt: skip
_LLAMA3_3B = replace(_LLAMA3_1B, hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, head_dim=128)


def _base(config: DecoderConfig) -> DecoderConfig:
    return replace(config, max_position_embeddings=32_768)


_TABLE = {
    "Qwen/Qwen3-0.6B": _QWEN3_0_6B,
    "Qwen/Qwen3-0.6B-Base": _base(_QWEN3_0_6B),
    "Qwen/Qwen3-1.7B": _QWEN3_1_7B,
    "Qwen/Qwen3-1.7B-Base": _base(_QWEN3_1_7B),
    "Qwen/Qwen3-4B": _QWEN3,
    "Qwen/Qwen3-4B-Base": _base(_QWEN3),
    "Qwen/Qwen3-4B-Instruct-2507": replace(_QWEN3, rope_theta=5e6, max_position_embeddings=262_144),
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "Qwen/Qwen3-8B-Base": _base(_QWEN3_8B),
    "meta-llama/Llama-3.2-1B": _LLAMA3_1B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA3_1B,
    "meta-llama/Llama-3.2-3B": _LLAMA3_3B,
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA3_3B,
}


def published(model: str) -> DecoderConfig | None:
    """The shape of a model on the hub; None for one that is not in the table."""
    return _TABLE.get(model)
