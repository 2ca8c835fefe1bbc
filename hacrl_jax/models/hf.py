"""Checkpoints in Hugging Face layout, in and out.

Loading goes tensor by tensor from the file into arrays that already lie where they belong: a host reads the slices of
its own devices and holds one piece at a time; conversion to the parameter dtype and the transposition of the kernels
happen on the device. Saving is the way back, one tensor at a time, into a folder that appears when it is complete.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from hacrl_jax import sharding
from hacrl_jax.config import LoraConfig
from hacrl_jax.models import streaming, tensors
from hacrl_jax.models.decoder import DecoderConfig, abstract, initialize
from hacrl_jax.models.hf_config import read_config
from hacrl_jax.models.tensors import Stored
from hacrl_jax.types import Array, Params, UserError

__all__ = ["commit", "load", "names", "read_config", "resolve", "save"]

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*", "USE_POLICY*")
LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}
Place = tuple[tuple[str, ...], int | None]  # path in the params dict, and the layer where the array is stacked


def names(config: DecoderConfig) -> dict[str, tuple[Place, tuple[int, ...]]]:
    """Tensor name -> (its place in the params dict, its shape in the file). Kernels are transposed in the file."""
    _, shapes, _ = abstract(config)
    found: dict[str, Place] = {"model.embed_tokens.weight": (("embed",), None)}
    for layer in range(config.num_hidden_layers):
        for own, theirs in LAYER_NAMES.items():
            if own in shapes["layers"]:
                kernel = ("kernel",) if isinstance(shapes["layers"][own], dict) else ()
                found[f"model.layers.{layer}.{theirs}.weight"] = (("layers", own, *kernel), layer)
    found["model.norm.weight"] = (("norm",), None)
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (("head",), None)
    return {name: (place, _file_shape(_at(shapes, place[0]).shape, place)) for name, place in found.items()}


def resolve(model: str, revision: str | None = None) -> Path:
    """A local folder for a path or a hub id; a hub id is downloaded, or taken from the cache (HF_HUB_OFFLINE=1).

    Raises UserError where there is neither.
    """
    if Path(model).expanduser().is_dir():
        if revision is not None:
            raise UserError(f"model {model} is a local folder: revision {revision} applies to hub ids only")
        return Path(model).expanduser()
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise UserError(f"model {model} is neither a folder that exists nor a hub id such as Qwen/Qwen3-1.7B-Base")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(DOWNLOADED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"model {model}: no such folder, and the hub gave no snapshot of it: {reason}") from None


def commit(folder: str | Path) -> str | None:
    """The commit of a snapshot in the hub's cache, to pin it as the revision; None for other folders."""
    folder = Path(folder)
    return folder.name if folder.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", folder.name) else None


def load(
    folder: str | Path,
    *,
    mesh: Mesh | None = None,
    lora: LoraConfig | None = None,
    dtype: Any = jnp.float32,
    key: Array | None = None,
) -> tuple[nnx.GraphDef, DecoderConfig, Params]:
    """Read a checkpoint into device arrays of dtype, laid out on the mesh (None: on the first device).

    The low-rank arrays of lora start from key (default: jax.random.key(0)) with a zero product. Raises UserError that
    lists missing, extra and mis-shaped tensors.
    """
    folder = Path(folder)
    config = read_config(folder)
    graphdef, shapes, axes = abstract(config, lora)
    stored = tensors.scan(folder)
    _compare(folder, config, stored)
    files: dict[tuple[str, ...], list[Stored]] = {}
    for name, ((path, _), _) in names(config).items():  # layers in order
        files.setdefault(path, []).append(stored[name])
    key = jax.random.key(0) if key is None else key

    def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> Array:
        own = tuple(part.key for part in path)
        place = _place(mesh, _at(axes, own), shape.shape)
        if own in files:
            return streaming.stream(
                files[own], shape.shape, place, jnp.dtype(dtype),
                stacked=own[0] == "layers", transposed=own[-1] == "kernel",
            )  # fmt: skip
        alone: Any = shape  # a low-rank array: the same value as in a tree that init makes
        for part in reversed(own):
            alone = {part: alone}
        value = _at(initialize(alone, key), own)
        return jax.device_put(value.astype(dtype), place)

    return graphdef, config, jax.tree_util.tree_map_with_path(leaf, shapes)


def save(
    folder: str | Path,
    params: Params,
    config: DecoderConfig,
    source_folder: str | Path,
    *,
    lora: LoraConfig | None = None,
    shard_bytes: int = 5 * 10**9,
    model_card: str | None = None,
) -> None:
    """Write params as the checkpoint that source_folder is: its tensor names, dtypes and order, and its other files
    byte for byte; README.md is model_card where one is given. Low-rank updates are merged into their kernels.

    Every process of a multi-host run calls this; the first writes. folder appears complete or not at all. Raises
    UserError when it exists and is not empty.
    """
    folder, source_folder = Path(folder), Path(source_folder)
    stored = tensors.scan(source_folder)
    _compare(source_folder, config, stored)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists: export to another folder, or remove it first")
    places = names(config)
    if config.tie_word_embeddings and "lm_head.weight" in stored:  # a copy that the source keeps
        places["lm_head.weight"] = places["model.embed_tokens.weight"]
    entries = [(one.name, one.code, one.shape) for one in stored.values()]
    value = lambda name: _tensor(params, places[name][0], stored[name], lora)  # noqa: E731
    if jax.process_index() != 0:
        for name, *_ in entries:
            value(name)  # its slices are gathered from all hosts
        multihost_utils.sync_global_devices("hf.save")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial_folder = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        partial_folder.chmod(0o755)
        _copy_side_files(source_folder, partial_folder)
        if model_card is not None:
            (partial_folder / "README.md").write_text(model_card, encoding="utf-8")
        tensors.write(partial_folder, entries, shard_bytes, value)
        os.replace(partial_folder, folder)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("hf.save")


def _compare(folder: Path, config: DecoderConfig, stored: dict[str, Stored]) -> None:
    """Raise UserError that lists every tensor that is missing, extra or of another shape."""
    expected = {name: shape for name, (_, shape) in names(config).items()}
    problems = []
    if missing := [name for name in expected if name not in stored]:
        problems.append(f"missing tensors: {', '.join(missing)}")
    extra = [name for name in stored if name not in expected]
    if config.tie_word_embeddings and "lm_head.weight" in extra and not missing:
        extra.remove("lm_head.weight")
        if not _equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"]):
            problems.append("lm_head.weight differs from the embedding though tie_word_embeddings is true")
    if extra:
        problems.append(f"extra tensors: {', '.join(extra)}")
    if shaped := [
        f"{name} is {list(stored[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]:
        problems.append(f"mis-shaped tensors: {', '.join(shaped)}")
    if problems:
        raise UserError(f"{folder}: the weights do not fit config.json: {'; '.join(problems)}")


def _equal(a: Stored, b: Stored) -> bool:
    if a.shape != b.shape or a.code != b.code:
        return False
    rows = streaming.rows_per_piece(a)
    pieces = (slice(start, start + rows) for start in range(0, a.shape[0], rows))
    return all(a.read(piece).tobytes() == b.read(piece).tobytes() for piece in pieces)


def _place(mesh: Mesh | None, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return sharding.sharding(mesh, *axes, shape=shape)


def _tensor(params: Params, place: Place, stored: Stored, lora: LoraConfig | None) -> np.ndarray:
    """A tensor as the file holds it, on the host; rounded there, for devices may flush the smallest numbers to zero."""
    path, layer = place
    value = _at(params, path)
    low = _at(params, path[:-1]) if path[-1] == "kernel" else {}
    value = value if layer is None else _layer(value, layer)
    if "lora_a" in low:
        if lora is None:
            raise ValueError("params hold low-rank updates: save needs their LoraConfig to merge them")
        value = _merged(value, _layer(low["lora_a"], layer), _layer(low["lora_b"], layer), lora.alpha / lora.rank)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = multihost_utils.process_allgather(value, tiled=True)
    host = np.asarray(value)
    with np.errstate(over="ignore"):  # looked for below
        host = (host.T if path[-1] == "kernel" else host).astype(stored.dtype)
    if stored.code == "F16" and not np.isfinite(host).all():
        raise UserError(f"{stored.name} left the range of float16, its dtype in {stored.file}: it cannot be exported")
    return host


@jax.jit
def _layer(stack: Array, layer: int) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)


@jax.jit
def _merged(kernel: Array, a: Array, b: Array, scale: float) -> Array:
    return kernel + jnp.matmul(a, b, precision="highest") * scale


def _copy_side_files(source: Path, target: Path) -> None:
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source)
        hidden = any(part.startswith(".") for part in name.parts)
        if file.is_file() and not hidden and file.suffix not in WEIGHTS and not file.name.endswith(".index.json"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / name)


def _file_shape(shape: tuple[int, ...], place: Place) -> tuple[int, ...]:
    path, layer = place
    shape = shape if layer is None else shape[1:]
    return shape[::-1] if path[-1] == "kernel" else shape


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree
