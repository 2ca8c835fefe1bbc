"""Safetensors files, read a slice at a time and written a tensor at a time.

The safetensors package maps whole files into memory and writes whole dicts; a host that holds one slice of each tensor,
and an export that never holds a model, need less. The format is eight bytes of header length, a JSON header, and the
raw little-endian tensors one after the other (https://github.com/huggingface/safetensors, section "Format").
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hacrl_jax.types import UserError

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: name, file, code of its dtype in the header, shape, first byte in the file."""

    name: str
    file: Path
    code: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.code]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, rows: slice, columns: slice | None = None) -> np.ndarray:
        """A copy of rows (axis 0, step 1), and of columns (axis 1) of a matrix; only these bytes are read."""
        start, stop, _ = rows.indices(self.shape[0])
        width = math.prod(self.shape[1:])
        first = self.offset + start * width * self.dtype.itemsize
        shape = (stop - start, *self.shape[1:])
        if columns is None or columns.indices(self.shape[1])[:2] == (0, self.shape[1]):
            return np.fromfile(self.file, self.dtype, (stop - start) * width, offset=first).reshape(shape)
        # The map lives for this slice alone: pages that stay mapped would count as memory of the process.
        return np.array(np.memmap(self.file, self.dtype, "r", first, shape)[:, columns])


def scan(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder with model.safetensors, or shards and their index, in the order of the files.

    Raises UserError for absent, cut or contradictory files and for dtypes other than F32, BF16 and F16.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise UserError(f"{folder}: neither {SINGLE} nor {INDEX} is there; only safetensors weights can be read")
        return header(folder / SINGLE)
    placed = _json(index.read_bytes(), index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise UserError(f"{index}: no weight_map from tensor to file")
    files = sorted(set(placed.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise UserError(f"{folder}: {INDEX} names shards that are not there: {', '.join(absent)}")
    found: dict[str, Stored] = {}
    for file in files:
        # A tensor that the index does not know is kept, to be reported as extra.
        found |= {name: stored for name, stored in header(folder / file).items() if placed.get(name, file) == file}
    lost = [f"{name} ({file})" for name, file in placed.items() if name not in found]
    if lost:
        raise UserError(f"{folder}: tensors that {INDEX} promises are not in their shards: {', '.join(lost)}")
    return found


def header(file: Path) -> dict[str, Stored]:
    """The tensors of one file, by position. Raises UserError as scan does."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= size - 8:
            raise UserError(f"{file}: not a safetensors file, or cut short")
        entries = _json(stream.read(length), file)
    entries.pop("__metadata__", None)
    tensors = []
    for name, entry in entries.items():
        try:
            code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise UserError(f"{file}: the header's entry for {name} is not one of a tensor") from None
        if code not in DTYPES:
            raise UserError(f"{file}: {name} has dtype {code}; supported are {', '.join(DTYPES)}")
        tensors.append(Stored(name, file, code, shape, 8 + length + start))
        if stop - start != tensors[-1].nbytes or 8 + length + stop > size:
            raise UserError(f"{file}: {name} does not fit its {stop - start} bytes, or the file is cut short")
    return {stored.name: stored for stored in sorted(tensors, key=lambda stored: stored.offset)}


def write(folder: Path, tensors: list[tuple[str, str, tuple[int, ...]]], shard_bytes: int,
          value: Callable[[str], np.ndarray | None]) -> None:  # fmt: skip
    """Write (name, dtype code, shape) entries in their order, as one file or as shards with their index.

    value(name) is called once for each, in order, and one tensor is held at a time. On hosts that only take part in
    fetching the values (it returns None there) nothing is written.
    """
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    used = 0
    for entry in tensors:
        nbytes = math.prod(entry[2]) * DTYPES[entry[1]].itemsize
        if shards[-1] and used + nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += nbytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    for file, shard in zip(names, shards, strict=True):
        _write_file(folder / file, shard, value)
    if len(shards) > 1:
        placed = {name: file for file, shard in zip(names, shards, strict=True) for name, *_ in shard}
        total = sum(math.prod(shape) * DTYPES[code].itemsize for _, code, shape in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(file: Path, shard: list[tuple[str, str, tuple[int, ...]]], value: Callable[[str], Any]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    position = 0
    for name, code, shape in shard:
        stop = position + math.prod(shape) * DTYPES[code].itemsize
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, code, shape in shard:
            array = value(name)
            if array.shape != shape or array.dtype != DTYPES[code]:
                raise ValueError(f"{name} is {array.dtype} {array.shape}, not {code} {shape}")
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())


def _json(text: bytes, file: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise UserError(f"{file}: not a JSON object where one is expected")
    return parsed
