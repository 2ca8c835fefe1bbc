"""The process of one custom reward function: a line names a batch file and a file for the scores; a line answers.

The first line says whether the function could be loaded.

Started as ``python -m hacrl_jax.tasks.custom FILE NAME`` by rewards.py. The function is the user's own code.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path


def main(path: str, name: str) -> None:
    """Say ``done`` once the function is there, then to every ``[batch file, scores file]``, or what went wrong."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the function may print
    try:
        function = load(path, name)
    except Exception as error:
        replies.write(_described(error, "cannot be loaded: ") + "\n")
        return
    replies.write("done\n")
    for line in sys.stdin:
        batch, scores = json.loads(line)
        try:
            result = function(json.loads(Path(batch).read_text()))
            # Arrays are welcome; NaN passes json on purpose, the parent names it.
            Path(scores).write_text(json.dumps(result.tolist() if hasattr(result, "tolist") else list(result)))
            replies.write("done\n")
        except Exception as error:
            replies.write(_described(error, "raised ") + "\n")


def load(path: str, name: str) -> object:
    """The function ``name`` of a Python file. Raises whatever importing the file raises, and AttributeError."""
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _described(error: Exception, prefix: str) -> str:
    return f"{prefix}{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
