"""config.json of a checkpoint -> DecoderConfig. What the decoder does not do is refused by its name, never ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hacrl_jax.models.decoder import DecoderConfig
from hacrl_jax.models.rope import RopeScaling
from hacrl_jax.types import UserError

MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
# Fields that ask for something the decoder does not do, unless they have one of these values or are absent.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "chunk_size_feed_forward": (0, None),
    "head_dtype": (None,),
    "quantization_config": (None,),
}
# Fields that say nothing about what the decoder computes.
SILENT = {
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "architectures",
    "auto_map", "bos_token_id", "dtype", "eos_token_id", "finetuning_task", "hidden_act", "id2label",
    "initializer_range", "label2id", "layer_types", "max_window_layers", "model_type", "output_attentions",
    "output_hidden_states", "pad_token_id", "return_dict", "rms_norm_eps", "rope_parameters", "rope_scaling",
    "rope_theta", "head_dim", "sliding_window", "tie_word_embeddings", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(folder: str | Path) -> DecoderConfig:
    """The decoder of a folder in Hugging Face layout.

    Both layouts of the rotary settings are read: rope_theta and rope_scaling at top level, and rope_parameters
    (transformers 5). Raises UserError naming every field that is missing or asks for something unsupported.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json there: not a model in Hugging Face layout")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a JSON object")
    architecture = _architecture(raw, path)
    problems = [f"{name} is missing" for name in SIZES if raw.get(name) is None]
    problems += [
        f"{name} {raw[name]!r} is not a positive integer"
        for name in SIZES
        if raw.get(name) is not None and not _is_size(raw[name])
    ]
    problems += _unsupported(raw)
    scaling, theta = _rope(raw, problems)
    head_dim = _head_dim(raw, architecture, problems)
    for name in ("rms_norm_eps", "tie_word_embeddings"):
        if raw.get(name) is None:
            problems.append(f"{name} is missing")
    if not isinstance(raw.get("tie_word_embeddings", True), bool):
        problems.append(f"tie_word_embeddings {raw['tie_word_embeddings']!r} is not true or false")
    if not problems and raw["num_attention_heads"] % raw["num_key_value_heads"]:
        problems.append("num_key_value_heads does not divide num_attention_heads")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    return DecoderConfig(
        architecture=architecture,
        **{name: raw[name] for name in SIZES},
        head_dim=head_dim,
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(theta),
        rope_scaling=scaling,
        tie_word_embeddings=raw["tie_word_embeddings"],
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _architecture(raw: dict[str, Any], path: Path) -> str:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in MODEL_TYPES:
        shown = ", ".join(map(str, names)) or f"none named (model_type {raw.get('model_type')!r})"
        raise UserError(f"{path}: architecture {shown} is not supported; supported are {', '.join(MODEL_TYPES)}")
    if raw.get("model_type", MODEL_TYPES[names[0]]) != MODEL_TYPES[names[0]]:
        raise UserError(f"{path}: model_type {raw['model_type']!r} is not that of {names[0]}")
    return names[0]


def _unsupported(raw: dict[str, Any]) -> list[str]:
    problems = [
        f"{name} {raw[name]!r} is not supported"
        for name, neutral in NEUTRAL.items()
        if name in raw and not any(raw[name] is value or raw[name] == value for value in neutral)
    ]
    if raw.get("hidden_act") != "silu":
        problems.append(f"hidden_act {raw.get('hidden_act')!r} is not supported (silu is)")
    # Qwen3 states a window it does not use: use_sliding_window decides. Where that is absent, a window is in use.
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is None:
        problems.append(f"sliding_window {raw['sliding_window']!r} is not supported")
    kinds = sorted({str(kind) for kind in raw.get("layer_types") or []} - {"full_attention"})
    if kinds:
        problems.append(f"layer_types {', '.join(kinds)} are not supported")
    known = {*SIZES, *NEUTRAL, *SILENT}
    problems += [
        f"unknown field {name}: {str(value)[:60]} (it may change the model)"
        for name, value in raw.items()
        if name not in known and value is not None and value is not False
    ]
    return problems


def _rope(raw: dict[str, Any], problems: list[str]) -> tuple[RopeScaling | None, float]:
    """(scaling, theta); what is wrong is appended to problems."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        problems.append("rope_parameters and rope_scaling must be objects")
        return None, 0.0
    stated = [part["rope_theta"] for part in (raw, new, old) if part.get("rope_theta") is not None]
    if not stated:
        problems.append("rope_theta is missing (at top level, and in rope_parameters)")
    elif len(set(stated)) > 1:
        problems.append(f"rope_theta is stated with different values: {', '.join(map(str, stated))}")
    elif not _is_number(stated[0]):
        problems.append(f"rope_theta {stated[0]!r} is not a positive number")
    theta = stated[0] if stated and _is_number(stated[0]) else 0.0
    settings = [{name: value for name, value in part.items() if name != "rope_theta"} for part in (new, old) if part]
    for part in settings:
        kind = part.pop("type", None)
        part["rope_type"] = part.get("rope_type", kind)
    if len(settings) == 2 and settings[0] != settings[1]:
        problems.append("rope_parameters and rope_scaling disagree")
    if not settings:
        return None, theta
    return _scaling(settings[0], problems), theta


def _scaling(settings: dict[str, Any], problems: list[str]) -> RopeScaling | None:
    kind = settings.pop("rope_type")
    if settings.get("partial_rotary_factor") in (1, None):
        settings.pop("partial_rotary_factor", None)
    wanted = LLAMA3 if kind == "llama3" else ()
    if kind not in ("default", "llama3"):
        problems.append(f"rope type {kind!r} is not supported (default and llama3 are)")
        return None
    extra = [name for name, value in settings.items() if name not in wanted and value is not None]
    wrong = [name for name in wanted if not _is_number(settings.get(name))]
    if extra:
        problems.append(f"rope settings {', '.join(extra)} are not supported with rope type {kind}")
    if wrong:
        problems.append(f"rope settings {', '.join(wrong)} are missing or not positive numbers")
    if extra or wrong or not wanted:
        return None
    return RopeScaling(**{name: settings[name] for name in LLAMA3})


def _head_dim(raw: dict[str, Any], architecture: str, problems: list[str]) -> int:
    size = raw.get("head_dim")
    if size is None and architecture == "LlamaForCausalLM":
        # The published definition of Llama; Qwen3's is another, so that there the field must be present.
        heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
        if not (_is_size(heads) and _is_size(hidden)) or hidden % heads:
            problems.append("head_dim is missing and num_attention_heads does not divide hidden_size")
            return 0
        return hidden // heads
    if not _is_size(size) or size % 2:
        problems.append("head_dim is missing" if size is None else f"head_dim {size!r} is not a positive even integer")
        return 0
    return size


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
