"""A grading child process: one JSON line in, one JSON line out, until stdin closes.

Started as ``python -m hacrl_jax.tasks.worker MEMORY_MB POLICY_JSON`` by grader.py, so neither JAX nor the parent's main
module is imported here. The child may be killed at any time: it holds no state.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time

WARM_UP = (
    r"\frac{3\sqrt{2}}{4} - 2x^{2}y + \sqrt[3]{5}",
    r"\left(\frac{a_{1}}{2} - C_{2} e^{-2 t}\right) \cos (\omega t + \pi / 4)",
    r"\frac{n(n+1)!}{2 \pi} + \log_{2} \left(5 - \sin^{2} \theta\right)",
    r"\lfloor n / 2 \rfloor + \binom{n}{k} \cdot |x - 1| - \ln 3",
)


def main(memory_mb: int, policy: dict[str, object]) -> None:
    """Answer requests ``{"id", "gold", "answer"}`` with ``{"id", "correct", "reason"}`` lines."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not reach the parent as a reply
    from hacrl_jax.tasks import verify
    from hacrl_jax.tasks.policy import Policy

    for expression in WARM_UP:  # builds the parser's tables before the first deadline
        verify.judge(gold="1", answer=expression)
    _restrict(memory_mb)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    chosen = Policy(**policy)
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            verdict = verify.judge(gold=request["gold"], answer=request["answer"], policy=chosen)
            reply = {"correct": verdict.correct, "reason": verdict.reason}
        except MemoryError:
            reply = {"correct": False, "reason": "memory"}
        replies.write(json.dumps({"id": request["id"], **reply}) + "\n")


def _restrict(memory_mb: int) -> None:
    """Bound the address space, forbid writing files and core dumps, and close the door to sympy's eval.

    Nothing here reaches sympify of a string (verify.py parses LaTeX only, behind an alphabet check); this is the second
    lock on that door.
    """
    from sympy.parsing import sympy_parser

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise ValueError("text from a model is never evaluated")

    sympy_parser.parse_expr = sympy_parser.eval_expr = refuse
    memory = memory_mb * 2**20
    for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _exit_with_parent(parent: int) -> None:
    # A parent that was killed cannot kill its children; one that hangs in arithmetic would run on for ever.
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
