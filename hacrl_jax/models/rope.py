"""Rotary position embedding, plain and with Llama 3.x scaling (transformers: modeling_rope_utils.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from hacrl_jax.types import Array


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.x: long wavelengths are stretched by factor, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """[h / 2] float32, rounded where transformers rounds: an error of one unit here is 3e-4 rad at position 5,000."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # numpy's own float32 power is off by a unit in a tenth of the entries; PyTorch's is rounded right in nearly all.
    power = np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / power
    if scaling is None:
        return plain
    # PyTorch divides a number by a tensor as reciprocal times number, rounding twice.
    wavelength = np.float32(1) / plain * np.float32(2 * math.pi)
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    stretched = plain / np.float32(scaling.factor)
    periods = np.float32(1) / wavelength * np.float32(scaling.original_max_position_embeddings)
    smooth = periods - np.float32(scaling.low_freq_factor)
    smooth = smooth / np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
    between = (np.float32(1) - smooth) * plain / np.float32(scaling.factor) + smooth * plain
    return np.where(wavelength > longest, stretched, np.where(wavelength < shortest, plain, between))


def rotation(positions: Array, frequencies: np.ndarray) -> tuple[Array, Array]:
    """(cos, sin) of every angle, float32 [B, T, h / 2], from positions [B, T]."""
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the two halves of the last axis of x [B, T, H, h] against each other, in float32."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
