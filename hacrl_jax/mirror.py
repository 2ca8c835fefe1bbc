"""Checkpoints behind any fsspec URL that orbax itself cannot write to: copied as whole folders, step by step.

A step counts when its marker `step_N.json` exists, which is written last and lists every file with its size.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from hacrl_jax.types import UserError


class Mirror:
    """The steps under one URL. For one process: it holds a checkpoint's files on its own disk first."""

    def __init__(self, url: str):
        try:
            import fsspec

            self.files, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"checkpoint.folder {url} cannot be reached: {' '.join(str(error).split())}") from None

    def steps(self) -> list[int]:
        """Complete steps, oldest first."""
        self.files.invalidate_cache()
        if not self.files.isdir(self.root):
            return []
        names = (str(path).rsplit("/", 1)[-1] for path in self.files.ls(self.root, detail=False))
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step_(\d+)\.json", name)))

    def push(self, step: int, folder: Path) -> None:
        """Copy folder/step_N; it counts from the moment this returns."""
        self.drop(step)
        local = folder / f"step_{step}"
        names = sorted(str(file.relative_to(local)) for file in local.rglob("*") if file.is_file())
        for name in names:
            target = f"{self._of(step)}/{name}"
            self.files.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            self.files.put_file(str(local / name), target)
        sizes = {name: (local / name).stat().st_size for name in names}
        self.files.pipe_file(self._of(step) + ".json", json.dumps(sizes).encode())

    def pull(self, step: int, folder: Path) -> None:
        """Copy a complete step to folder/step_N. Raises OSError where a file is missing or of another size."""
        local = folder / f"step_{step}"
        shutil.rmtree(local, ignore_errors=True)
        try:
            sizes: dict[str, Any] = json.loads(self.files.cat_file(self._of(step) + ".json"))
            for name, size in sizes.items():
                (local / name).parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(f"{self._of(step)}/{name}", str(local / name))
                if (local / name).stat().st_size != size:
                    raise OSError(f"{name} is not of {size} bytes")
        except ValueError as error:
            raise OSError(f"its list of files does not open: {error}") from None

    def drop(self, step: int) -> None:
        """Remove a step: first it counts no longer, then its files go."""
        for path in (self._of(step) + ".json", self._of(step)):
            if self.files.exists(path):
                self.files.rm(path, recursive=True)

    def prune(self, keep_last: int, keep_every: int) -> None:
        """Remove all but the newest steps and the multiples of keep_every (0: none)."""
        for step in self.steps()[:-keep_last]:
            if not keep_every or step % keep_every:
                self.drop(step)

    def _of(self, step: int) -> str:
        return f"{self.root.rstrip('/')}/step_{step}"
