"""Arrays of the params dict from the tensors of checkpoint files, built where they belong, a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from hacrl_jax.models.tensors import Stored
from hacrl_jax.types import Array

PIECE_BYTES = 64 * 2**20  # of an array in host memory at one time

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each axis of the array


def stream(
    files: Sequence[Stored], shape: tuple[int, ...], place: Sharding, dtype: Any, *, stacked: bool, transposed: bool
) -> Array:
    """The array of this shape from one tensor, or (stacked) from one per layer along axis 0; transposed swaps the last
    two axes of the files. Each process reads the slices of its own devices; at most PIECE_BYTES wait on the host."""
    read = partial(_pieces, files, stacked=stacked, transposed=transposed)
    if math.prod(shape) * max(np.dtype(dtype).itemsize, files[0].dtype.itemsize) <= PIECE_BYTES:
        # Small: put together on the host, for the programs below cost more to compile than they save.
        return jax.make_array_from_callback(shape, place, lambda index: _on_host(read, _bounds(index, shape), dtype))
    holders: dict[Bounds, list[jax.Device]] = {}
    for device, index in place.addressable_devices_indices_map(shape).items():
        holders.setdefault(_bounds(index, shape), []).append(device)
    shards = []
    for bounds, devices in holders.items():  # replicas are read once
        buffers = [_alone(device, jnp.zeros, _extent(bounds), dtype) for device in devices]
        for at, piece in read(bounds):
            buffers = [
                _alone(device, _write, buffer, jax.device_put(piece, device), np.asarray(at, np.int32), transposed)
                for buffer, device in zip(buffers, devices, strict=True)
            ]
            jax.block_until_ready(buffers)  # else every piece of the file waits in host memory
        shards += buffers
    return jax.make_array_from_single_device_arrays(shape, place, shards)


def rows_per_piece(stored: Stored) -> int:
    return max(1, PIECE_BYTES // max(1, stored.nbytes // stored.shape[0]))


def _pieces(
    files: Sequence[Stored], bounds: Bounds, *, stacked: bool, transposed: bool
) -> Iterator[tuple[list[int], np.ndarray]]:
    """(where it starts in the shard, the piece as the file holds it) for all pieces of the shard within bounds."""
    inner = bounds[stacked:][::-1] if transposed else bounds[stacked:]  # in the file's order of axes
    columns = slice(*inner[1]) if len(inner) == 2 else None
    (first, last), rest = inner[0], [0] * (len(inner) - 1)
    for layer, stored in enumerate(files):
        for start in range(first, last, rows_per_piece(stored)):
            piece = stored.read(slice(start, min(start + rows_per_piece(stored), last)), columns)
            at = [*rest, start - first] if transposed else [start - first, *rest]
            yield ([layer] if stacked else []) + at, piece


def _on_host(read: Any, bounds: Bounds, dtype: Any) -> np.ndarray:
    shard = np.empty(_extent(bounds), dtype)
    for at, piece in read(bounds):
        piece = piece.T if read.keywords["transposed"] else piece
        piece = piece.reshape((1,) * (shard.ndim - piece.ndim) + piece.shape)
        shard[tuple(slice(start, start + size) for start, size in zip(at, piece.shape, strict=True))] = piece
    return shard


def _alone(device: jax.Device, function: Any, *arguments: Any) -> Array:
    """function on one device, though a mesh of all of them may be set (jax.set_mesh)."""
    with jax.set_mesh(Mesh(np.asarray([device]), ("alone",))), jax.default_device(device):
        return function(*arguments)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write(buffer: Array, piece: Array, start: Array, transposed: bool) -> Array:
    """Convert and transpose on the device: the host never holds a second copy of the piece."""
    piece = (piece.T if transposed else piece).astype(buffer.dtype)
    piece = piece.reshape((1,) * (buffer.ndim - piece.ndim) + piece.shape)
    return jax.lax.dynamic_update_slice(buffer, piece, list(start))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _extent(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)
