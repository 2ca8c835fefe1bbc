"""Heterogeneous-agent collaborative reinforcement learning (HACRL, HACPO; arXiv 2603.02604) in JAX.

    import hacrl_jax
    hacrl_jax.train(hacrl_jax.load("configs/quickstart.yaml", ["steps=20"]))

Names are found when first asked for, so that importing the package costs nothing.
"""

from typing import Any

_HOMES = {"train": "algorithm", "Config": "config", "load": "config", "UserError": "types"}

__all__ = ["Config", "UserError", "load", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
