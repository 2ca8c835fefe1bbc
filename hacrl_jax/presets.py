"""Named sets of settings: algorithms, ablations, and what the paper and its authors' code do (docs/objective.md)."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # What the paper's text states and what its authors' code does; where they are silent, our defaults hold
    # (docs/objective.md has the table).
    "paper": {"objective": {"capability": "mean_reward", "capability_window": 5, "order": "own_first"}},
    "authors": {
        "objective": {
            "capability": "positive_rate", "capability_window": 5, "binary_guard": True, "uniform_guard": True,
            "eos": "excluded", "order": "own_first", "kl_coefficient": 0.001, "kl_estimator": "k3",
            "cross_too_long": "truncate", "source_logprob": "recomputed",
        }
    },
    # Algorithms: settings of the same functions. Without partners' samples the others' rollouts are not exchanged.
    "grpo": {  # token ratios in the style of DAPO: wider above, token mean, no KL
        "objective": {
            "cross": "none", "ratio": "token", "eps_low": 0.2, "eps_high": 0.28, "aggregation": "token_mean",
            "kl_coefficient": 0.0,
        }
    },
    "dr_grpo": {  # arXiv 2503.20783: no division by std or by length
        "objective": {
            "cross": "none", "ratio": "token", "eps_low": 0.2, "eps_high": 0.2, "aggregation": "constant",
            "advantage_by_std": False, "kl_coefficient": 0.0,
        }
    },
    # No clip range: a baseline keeps the one that its config chose for these agents (default: GSPO's 3e-4 and 4e-4).
    "gspo": {"objective": {"cross": "none", "ratio": "sequence"}},
    "gspo_x2": {  # as many samples as two agents share, and twice the updates
        "minibatch": 32, "rollout": {"samples": 16}, "objective": {"cross": "none", "ratio": "sequence"},
    },
    "naive": {"objective": {"cross": "naive", "capability_baseline": False, "capability_gradient": False}},
    "hacpo": {"objective": {"cross": "hacpo", "capability_baseline": True, "capability_gradient": True}},
    # Ablations: HACPO without one of its parts.
    "hacpo_no_capability_baseline": {"objective": {"cross": "hacpo", "capability_baseline": False}},
    "hacpo_no_capability_gradient": {"objective": {"cross": "hacpo", "capability_gradient": False}},
    "hacpo_alpha_0": {"objective": {"cross": "hacpo", "alpha": 0.0}},
    "hacpo_alpha_1": {"objective": {"cross": "hacpo", "alpha": 1.0}},
    "hacpo_alpha_2": {"objective": {"cross": "hacpo", "alpha": 2.0}},
    "hacpo_alpha_3": {"objective": {"cross": "hacpo", "alpha": 3.0}},
    "hacpo_no_clip": {"objective": {"cross": "hacpo", "clip_cross": False}},
    "hacpo_no_stepwise": {"objective": {"cross": "hacpo", "delta_step": 0.0}},
}  # fmt: skip
