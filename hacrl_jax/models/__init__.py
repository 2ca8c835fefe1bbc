"""One decoder for Qwen3 and Llama 3.x, and its way in from and out to Hugging Face folders."""

from hacrl_jax.models.decoder import DecoderConfig, abstract, apply, head, init, logits, stack, trainable, unstack
from hacrl_jax.models.hf import load, resolve, save
from hacrl_jax.models.hf_config import read_config

__all__ = [
    "DecoderConfig", "abstract", "apply", "head", "init",
    "load", "logits", "read_config", "resolve", "save", "stack", "trainable", "unstack",
]  # fmt: skip
