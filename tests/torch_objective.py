"""The objective written plainly in PyTorch, row by row: an independent statement to hold hacrl_jax/hacpo.py against.

Where hacpo.py is vectorised over packed rows and jitted, this loops over samples and leaves gradients to autograd. A
case is a plain dict of lists and floats (see make_case in objective_cases.py); nothing here imports hacrl_jax.

Other trainers' definitions, as read there: `grpo_trl` follows TRL's GRPOTrainer (loss types grpo, bnpo, dr_grpo;
importance_sampling_level token and sequence), `gspo_verl` follows verl's core_algos (sequence ratio straight through a
token ratio, seq-mean-token-mean).
"""

from __future__ import annotations

import math

import torch


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def capability(history: list[list[float]], window: int) -> list[float]:
    last = history[-window:]
    return [max(sum(row[k] for row in last) / len(last), 1e-8) for k in range(len(history[0]))]


def ratio(p: list[float], k: int, j: int) -> float:
    """P_j / P_k, clipped."""
    return min(max(p[j] / p[k], 0.1), 10.0)


def advantages(case: dict, p: list[float]) -> tuple[list[float], list[float]]:
    s, k = case["settings"], case["learner"]
    advantage, baseline = [], []
    for i, prompt in enumerate(case["prompt"]):
        group = [
            r for r in range(len(case["prompt"]))
            if case["prompt"][r] == prompt and case["valid"][r] and (s["cross"] != "none" or case["source"][r] == k)
        ]  # fmt: skip
        if i not in group:
            advantage.append(0.0)
            baseline.append(0.0)
            continue
        rewards = tensor([case["reward"][r] for r in group])
        omega = [1 / ratio(p, k, case["source"][r]) if s["capability_baseline"] else 1.0 for r in group]
        b = float((rewards * tensor(omega)).mean())
        own = [case["reward"][r] for r in group if case["source"][r] == k]
        if s["binary_guard"] and b > 1:
            b = sum(own) / len(own) if own else float(rewards.mean())
        uniform = float(rewards.max() - rewards.min()) <= 1e-6
        if s["uniform_guard"] and uniform:
            b = float(rewards.mean())
        baseline.append(b)
        if len(group) == 1 or (s["uniform_guard"] and uniform):
            advantage.append(0.0)
            continue
        scale = float(rewards.std(unbiased=True)) + s["advantage_eps"] if s["advantage_by_std"] else 1.0
        advantage.append((case["reward"][i] - b) / scale)
    return advantage, baseline


def kl(logprob: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    d = logprob - reference
    k2, k3 = d**2 / 2, torch.exp(-d) - 1 + d
    return {"k1": d, "k2": k2, "k3": k3, "k3_straight_through": k2 - k2.detach() + k3.detach()}[estimator]


def loss(case: dict, logprob: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everything about one minibatch; logprob [N, T] requires grad. Lists are [N]."""
    s, k, m = case["settings"], case["learner"], case["update_index"]
    p = capability(case["history"], case["window"])
    advantage, baseline = advantages(case, p)
    rows = [
        i for i in range(len(case["prompt"]))
        if case["valid"][i] and (s["cross"] != "none" or case["source"][i] == k)
    ]  # fmt: skip
    limit = s["max_abs_log_ratio"]
    total_tokens = sum(case["length"][i] for i in rows)
    objective, ratios, penalties = [tensor(0.0) for _ in case["prompt"]], [1.0] * len(case["prompt"]), []
    for i in rows:
        n, a, j = case["length"][i], advantage[i], case["source"][i]
        new, old = logprob[i, :n], tensor(case["source_token_logprob"][i][:n])
        first = case["exact_first_visit"] and m == 0 and j == k
        source_mean = new.mean().detach() if first else tensor(case["source_logprob"][i])
        w = torch.ones(n, dtype=torch.float64)
        if s["tis_cap"]:
            sampler = tensor(case["sampler_token_logprob"][i][:n])
            w = torch.exp((old - sampler).clamp(-limit, limit)).clamp(max=s["tis_cap"])
        ratio_i = torch.exp((new.mean() - source_mean).clamp(-limit, limit))
        ratios[i] = float(ratio_i.detach())
        low, high = 1 - s["eps_low"], 1 + s["eps_high"]
        if j != k and s["cross"] == "hacpo":
            c = ratio_i
            if s["clip_cross"]:
                c = c.clamp(min(1 - s["delta"] + m * s["delta_step"], 1.0), 1.0)
            o = c * c.detach() ** s["alpha"] * a * w
            o = o * ratio(p, k, j) if s["capability_gradient"] else o
        elif s["ratio"] == "token":
            r = torch.exp((new - (new.detach() if first else old)).clamp(-limit, limit))
            o = torch.minimum(r * a, r.clamp(low, high) * a) * w
        else:
            o = torch.minimum(ratio_i * a, ratio_i.clamp(low, high) * a) * w
        objective[i] = o.mean()
        if j == k and s["kl_coefficient"]:
            reference = tensor(case["reference_token_logprob"][i][:n])
            penalties.append(kl(new, reference, s["kl_estimator"]).mean())
    mean = [objective[i] for i in rows]
    by_length = [objective[i] * case["length"][i] for i in rows]
    value = {
        "sequence_mean": lambda: sum(mean) / len(rows),
        "token_mean": lambda: sum(by_length) / total_tokens,
        "constant": lambda: sum(by_length) / s["aggregation_constant"],
    }[s["aggregation"]]()
    value = -value + s["kl_coefficient"] * sum(penalties, tensor(0.0)) / len(rows)
    return {
        "advantage": tensor(advantage), "baseline": tensor(baseline), "ratio": tensor(ratios),
        "objective": torch.stack(objective), "loss": value,
    }  # fmt: skip


def evaluate(case: dict) -> dict[str, list]:
    """loss, its parts and its gradient with respect to every token log-prob, as plain lists."""
    logprob = tensor(case["token_logprob"]).requires_grad_()
    result = loss(case, logprob)
    if result["loss"].requires_grad:
        result["loss"].backward()
    gradient = torch.zeros_like(logprob) if logprob.grad is None else logprob.grad
    return {key: value.detach().tolist() for key, value in result.items()} | {"gradient": gradient.tolist()}


def grpo_trl(logprob: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor,
             advantage: torch.Tensor, *, level: str, loss_type: str, eps_low: float, eps_high: float, beta: float,
             max_completion_length: int) -> torch.Tensor:  # fmt: skip
    """TRL's GRPO loss: [N, T] log-probs and mask, [N] advantages. The KL is a token's, aggregated like the rest."""
    log_ratio = logprob - old
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    weight = torch.exp(log_ratio)
    clipped = torch.clamp(weight, 1 - eps_low, 1 + eps_high)
    per_token = -torch.min(weight * advantage.unsqueeze(1), clipped * advantage.unsqueeze(1))
    per_token = per_token + beta * (torch.exp(reference - logprob) - (reference - logprob) - 1)
    if loss_type == "grpo":
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if loss_type == "bnpo":
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0)
    if loss_type == "dr_grpo":
        return (per_token * mask).sum() / (per_token.size(0) * max_completion_length)
    raise ValueError(loss_type)


def gspo_verl(logprob: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, advantage: torch.Tensor, *,
              eps_low: float, eps_high: float) -> torch.Tensor:  # fmt: skip
    """verl's GSPO loss: the sequence ratio enters every token with that token's gradient, then seq-mean-token-mean."""
    sequence = ((logprob - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    log_weight = logprob - logprob.detach() + sequence.detach().unsqueeze(-1)
    weight = torch.exp(torch.clamp(log_weight, max=10.0))
    a = advantage.unsqueeze(1)
    per_token = torch.maximum(-a * weight, -a * torch.clamp(weight, 1 - eps_low, 1 + eps_high))
    return ((per_token * mask).sum(-1) / mask.sum(-1)).mean()


def straight_line(new: list[float], old: list[float]) -> float:
    """The sequence ratio of two lists of token log-probs, with nothing but the standard library."""
    return math.exp(sum(new) / len(new) - sum(old) / len(old))
