"""One decoder for Qwen3 and Llama 3.x, driven by its configuration. Flax nnx modules do not leave this folder.

Everywhere else a policy is a static graphdef and one nested dict of arrays, and a forward pass is ``apply``. Layers are
stacked (leading axis L) and scanned, so compile time does not grow with depth. The architecture is that of
modeling_qwen3.py and modeling_llama.py in transformers: pre-norm RMSNorm blocks, grouped-query attention, rotary
positions, gated SiLU.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from hacrl_jax import sharding
from hacrl_jax.config import LoraConfig
from hacrl_jax.models import attention as attend
from hacrl_jax.models.rope import RopeScaling, inverse_frequencies, rotate, rotation
from hacrl_jax.types import Array, Params, UserError

Remat = Literal["none", "dots", "full", "offload"]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder: the fields of config.json that change what it computes."""

    architecture: str  # Qwen3ForCausalLM or LlamaForCausalLM
    vocab_size: int  # V, rows of the embedding: may exceed the tokenizer's ids
    hidden_size: int  # D
    intermediate_size: int
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    num_key_value_heads: int  # K
    head_dim: int  # h, not always D / H
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qk_norm: bool  # Qwen3: RMSNorm over each head of q and k, before the rotation
    max_position_embeddings: int


def _param(shape: tuple[int, ...], *axes: str | None) -> nnx.Param:
    """A declared parameter: its shape and logical axes. Values live in the params dict only."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes)


class Linear(nnx.Module):
    """x @ kernel (+ the low-rank update scaled by alpha / rank), for every layer of the stack."""

    def __init__(self, layers: int, size: tuple[int, int], axes: tuple[str, str], lora: LoraConfig | None):
        self.kernel = _param((layers, *size), "layers", *axes)
        if lora is not None:
            self.scale = lora.alpha / lora.rank
            self.lora_a = _param((layers, size[0], lora.rank), "layers", axes[0], None)
            self.lora_b = _param((layers, lora.rank, size[1]), "layers", None, axes[1])

    def __call__(self, x: Array) -> Array:
        # On a flat x: with [B, T, D] XLA's CPU backend transposes every operand of the backward pass (3 times slower).
        flat = x.reshape(-1, x.shape[-1])
        y = flat @ self.kernel[...].astype(x.dtype)
        if hasattr(self, "lora_a"):
            y += (flat @ self.lora_a[...].astype(x.dtype)) @ self.lora_b[...].astype(x.dtype) * self.scale
        return y.reshape(*x.shape[:-1], -1)


class Layer(nnx.Module):
    """All L blocks. Merged with one layer's slice inside the scan, it is that block."""

    def __init__(self, config: DecoderConfig, lora: LoraConfig | None):
        layers, d, h = config.num_hidden_layers, config.hidden_size, config.head_dim
        q, kv, f = config.num_attention_heads * h, config.num_key_value_heads * h, config.intermediate_size

        def linear(name: str, size: tuple[int, int], axes: tuple[str, str]) -> Linear:
            return Linear(layers, size, axes, lora if lora is not None and name in lora.targets else None)

        self.config = config
        self.input_norm = _param((layers, d), "layers", None)
        self.q_proj = linear("q_proj", (d, q), ("embed", "heads"))
        self.k_proj = linear("k_proj", (d, kv), ("embed", "kv_heads"))
        self.v_proj = linear("v_proj", (d, kv), ("embed", "kv_heads"))
        self.o_proj = linear("o_proj", (q, d), ("heads", "embed"))
        if config.qk_norm:
            self.q_norm = _param((layers, h), "layers", None)
            self.k_norm = _param((layers, h), "layers", None)
        self.post_norm = _param((layers, d), "layers", None)
        self.gate_proj = linear("gate_proj", (d, f), ("embed", "mlp"))
        self.up_proj = linear("up_proj", (d, f), ("embed", "mlp"))
        self.down_proj = linear("down_proj", (f, d), ("mlp", "embed"))

    def __call__(
        self, x: Array, cos: Array, sin: Array, attention: Any, asked: Callable[[Array], Array] | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """x [B, T, D] -> (x, the block's own k and v, each [B, T, K * h]). attention maps q, k, v to q's shape.

        asked takes S of the T tokens, [B, T, ...] -> [B, S, ...]: x is then computed for these alone, [B, S, D].
        """
        eps, h = self.config.rms_norm_eps, self.config.head_dim
        heads = lambda x: x.reshape(*x.shape[:2], -1, h)  # noqa: E731
        y = _rms_norm(x, self.input_norm[...], eps)
        k, v = heads(self.k_proj(y)), heads(self.v_proj(y))
        if asked is not None:
            x, y = asked(x), asked(y)
        q = heads(self.q_proj(y))
        if self.config.qk_norm:
            q, k = _rms_norm(q, self.q_norm[...], eps), _rms_norm(k, self.k_norm[...], eps)
        k = rotate(k, cos, sin)
        if asked is not None:
            cos, sin = asked(cos), asked(sin)
        q = rotate(q, cos, sin)
        x = x + self.o_proj(attention(q, k, v).reshape(*x.shape[:2], -1))
        y = _rms_norm(x, self.post_norm[...], eps)
        x = x + self.down_proj(jax.nn.silu(self.gate_proj(y)) * self.up_proj(y))
        return x, (k.reshape(*k.shape[:2], -1), v.reshape(*v.shape[:2], -1))


class Decoder(nnx.Module):
    def __init__(self, config: DecoderConfig, lora: LoraConfig | None):
        self.config = config
        self.embed = _param((config.vocab_size, config.hidden_size), "vocab", "embed")
        self.layers = Layer(config, lora)
        self.norm = _param((config.hidden_size,), None)
        if not config.tie_word_embeddings:
            self.head = _param((config.vocab_size, config.hidden_size), "vocab", "embed")

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        segment: Array | None,
        cache: tuple[Array, Array] | None,
        length: Array | None,
        dtype: Any,
        remat: Remat,
        implementation: attend.Implementation,
        queries: Array | None,
        shared: tuple[int, int] | None,
        unstacked: tuple[Params, ...] | None,
    ) -> tuple[Array, tuple[Array, Array] | tuple[tuple[Array, Array], ...]]:
        config = self.config
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        angles = partial(rotation, frequencies=frequencies)
        cos, sin = angles(positions) if unstacked is None else _once(angles, positions)
        block, stacked = nnx.split(self.layers)
        asked = None  # which tokens' hidden states the caller wants, of all
        if shared is not None:
            asked = lambda x: x[:, shared[0] :]  # noqa: E731
        elif queries is not None:
            asked = partial(_take, queries=queries)

        def body(x: Array, layer: tuple[Params, Any], asked: Any = None) -> tuple[Array, tuple[Array, Array]]:
            params, layer_cache = layer
            x = checkpoint_name(x, "block_input")
            if shared is not None:
                attention = partial(attend.answers, segment=segment, prompt=shared[0], count=shared[1])
            elif layer_cache is None:
                chosen = None if asked is None else queries
                attention = partial(attend.causal, segment=segment, implementation=implementation, queries=chosen)
            elif implementation == "unrolled":
                attention = partial(attend.unrolled, cache=layer_cache, length=length)
            else:
                attention = partial(attend.cached, cache=layer_cache, length=length, segment=segment)
            x, kv = nnx.merge(block, params)(x, cos, sin, attention, asked)
            return between(x), kv

        # Looked up where each part of the hidden axis lies, then exchanged for whole rows: no device holds the table.
        between = _between if cache is None else _stationary
        x = sharding.constrain(self.embed[...][tokens], "replica", None, "embed")
        x = between(x.astype(dtype))  # [B, T, D]
        if unstacked is None:
            x, kv = jax.lax.scan(_remat(body, remat), x, (nnx.to_pure_dict(stacked), cache))
            x = x if asked is None else asked(x)
        else:
            kv, last = (), len(unstacked) - 1
            for i, layer in enumerate(zip(unstacked, cache or (None,) * len(unstacked), strict=True)):
                x, fresh = body(x, layer, asked if i == last else None)
                kv += (fresh,)
        if cache is None:
            x = sharding.constrain(x, "batch", None, None)
        return _rms_norm(x, self.norm[...], config.rms_norm_eps), kv


def abstract(config: DecoderConfig, lora: LoraConfig | None = None) -> tuple[nnx.GraphDef, Params, Any]:
    """(graphdef, params as float32 ShapeDtypeStructs, the same tree with the logical axes of each parameter).

    The graphdef is static and hashable: pass it to jit as a static argument or close over it. Raises UserError for
    LoRA targets that the decoder does not have.
    """
    unknown = sorted(set(lora.targets) - set(PROJECTIONS)) if lora is not None else []
    if unknown:
        raise UserError(f"lora.targets: no projection {', '.join(unknown)}; there are {', '.join(PROJECTIONS)}")
    graphdef, state = nnx.split(Decoder(config, lora))
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    axes = jax.tree.map(lambda leaf: leaf.axes, state, is_leaf=is_variable)
    return graphdef, nnx.to_pure_dict(state), nnx.to_pure_dict(axes)


@partial(jax.jit, static_argnums=(0, 2))
def init(config: DecoderConfig, key: Array, lora: LoraConfig | None = None) -> Params:
    """Random float32 parameters: normal with deviation 0.02, norms 1, the low-rank update 0 (lora_b)."""
    return initialize(abstract(config, lora)[1], key)


def initialize(params: Params, key: Array) -> Params:
    """Values for a tree of ShapeDtypeStructs, each from the key and its own path: a tree's part gets the same values
    as it would in the whole."""

    def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        if name.endswith("norm"):
            return jnp.ones(shape.shape, shape.dtype)
        if name.endswith("lora_b"):
            return jnp.zeros(shape.shape, shape.dtype)
        if name.endswith("lora_a"):  # the bound of PEFT's kaiming_uniform(sqrt(5))
            bound = shape.shape[1] ** -0.5
            return jax.random.uniform(own, shape.shape, shape.dtype, -bound, bound)
        return 0.02 * jax.random.normal(own, shape.shape, shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, params)


def apply(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens: Array,
    positions: Array,
    *,
    segment: Array | None = None,
    cache: tuple[Array, Array] | tuple[tuple[Array, Array], ...] | None = None,
    cache_length: Array | None = None,
    dtype: Any = jnp.float32,
    remat: Remat = "none",
    attention: attend.Implementation = "xla",
    queries: Array | None = None,
    shared: tuple[int, int] | None = None,
) -> tuple[Array, tuple[Array, Array] | tuple[tuple[Array, Array], ...]]:
    """Hidden states after the final norm, and the keys and values of these tokens.

    tokens, positions [B, T] int32. Without a cache: causal attention among tokens of equal segment ([B, T]; 0 is
    padding; None: each row is one sequence). With cache = (k, v), each [L, B, C, K * h], and cache_length [B]: the
    tokens also attend to the first cache_length entries. The cache is only read; the caller writes the new k, v.
    Parameters are cast to dtype where they are used; norms' statistics, rotations and softmax are float32.

    Returns (hidden [B, T, D] in dtype, (k, v) each [L, B, T, K * h] in dtype); with queries [B, S], without a cache,
    hidden [B, S, D] of these of the T tokens; with shared = (p, g), where a row is a prompt of p tokens and g answers
    to it of equal length, hidden [B, T - p, D] of the answers (segment must be given, attention is "xla"). With
    unstacked params, layers are not scanned, remat is "none", the last layer computes what is returned alone, and the
    cache given and returned is L pairs of [B, C, K * h]. With attention "unrolled" (one new token per row) the keys of
    the cache are [B, K * h, C].
    """
    layers = params["layers"]
    unstacked = layers if isinstance(layers, tuple) else None
    if unstacked is not None:
        params = params | {"layers": unstacked[0]}  # any block's: nnx wants the structure only
    exact = jnp.dtype(dtype) == jnp.float32  # TPUs and GPUs multiply float32 in fewer bits unless told
    with jax.default_matmul_precision("highest") if exact else nullcontext():
        decoder = nnx.merge(graphdef, params)
        return decoder(
            tokens, positions, segment, cache, cache_length, dtype, remat, attention, queries, shared, unstacked
        )  # fmt: skip


def unstack(params: Params) -> Params:
    """params with "layers" as a tuple of L trees: what the sampler reads, and the learner on one CPU.

    A scan copies a layer's parameters and cache out of their stacks before it multiplies, which a decode step, with one
    token per row, does not repay: on CPU it took twice as long as the unrolled one.
    """
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    return params | {"layers": tuple(jax.tree.map(itemgetter(i), params["layers"]) for i in range(count))}


def stack(params: Params) -> Params:
    """unstack undone."""
    return params | {"layers": jax.tree.map(lambda *layers: jnp.stack(layers), *params["layers"])}


def head(params: Params) -> Array:
    """[V, D]: the output matrix, which is the embedding where the two are tied."""
    return params["head"] if "head" in params else params["embed"]


def logits(params: Params, hidden: Array, dtype: Any = None) -> Array:
    """float32 [..., V] from hidden [..., D], multiplied in dtype (default: hidden's), summed in float32."""
    dtype = hidden.dtype if dtype is None else dtype
    precision = "highest" if jnp.dtype(dtype) == jnp.float32 else None
    weights = head(params).astype(dtype)
    return jnp.einsum("...d,vd->...v", hidden.astype(dtype), weights, precision=precision,
                      preferred_element_type=jnp.float32)  # fmt: skip


def trainable(params: Params) -> Any:
    """The tree with True for every leaf that training changes: all, or with LoRA the low-rank ones only."""
    lora = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("lora_a", "lora_b"), params)
    return lora if any(jax.tree.leaves(lora)) else jax.tree.map(lambda _: True, params)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def _take(x: Array, queries: Array) -> Array:
    """[B, T, ...] -> [B, S, ...] by indices [B, S]."""
    return jnp.take_along_axis(x, queries[..., None], axis=1)


def _once(function: Any, positions: Array) -> Any:
    """function(positions), computed once. XLA's CPU backend would compute sines and cosines again in every unrolled
    layer that reads them, for every head; it does not merge what is in a branch with what follows."""

    def apart(positions: Array) -> Any:
        shapes = jax.eval_shape(function, positions)
        blank = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
        # Always the first branch: no position is that low.
        return jax.lax.cond(positions[0, 0] > -(2**30), function, blank, positions)

    return jax.lax.platform_dependent(positions, cpu=apart, default=function)


def _between(x: Array) -> Array:
    """Activations between two blocks, split by rows and tokens: else fsdp's split of the parameters' hidden axis would
    spread to them, and every tensor device would keep all of them for the backward pass."""
    return sharding.constrain(x, "batch", "sequence", None)


def _stationary(x: Array) -> Array:
    """Activations of a decode step, split like the parameters' hidden axis: the few rows travel and the parameters stay
    where they are. Else every device would gather them over fsdp, and keep them as long as a dispatch lasts."""
    return sharding.constrain(x, "replica", None, "embed")


def _remat(body: Any, policy: Remat) -> Any:
    """What the backward pass keeps of a block: all, the products, its input, or its input in host memory."""
    names = jax.checkpoint_policies
    match policy:
        case "none":
            return body
        case "dots":
            keep = names.dots_with_no_batch_dims_saveable
        case "full":
            keep = names.nothing_saveable
        case "offload":
            keep = names.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=["block_input"],
                offload_src="device",
                offload_dst="pinned_host",
            )
    return jax.checkpoint(body, policy=keep, prevent_cse=False)
