"""A model's tokenizer behind four contracts: prompt, encode, decode, re-encode (design, section 3).

What the model reads is what transformers would give it, id for id. What it writes becomes text by one rule, used for
verification, for logs and for learners with another tokenizer: no clean-up, special tokens skipped. Text becomes ids
by one rule: no specials added, and control strings such as ``<|im_end|>`` are the characters they are made of. Added
tokens that their tokenizer does not call special (Qwen3's ``<think>``) are ordinary vocabulary both ways.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hacrl_jax.config import PromptConfig
from hacrl_jax.types import Problem, UserError

CUT_CHARACTER = "\ufffd"
"""What a decoder writes for bytes that are no whole character."""

Loss = Literal["", "cut character", "text changed"]


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """One model's tokenizer with the facts the rest of the house needs."""

    hf: PreTrainedTokenizerBase
    prompt: PromptConfig
    vocab_size: int  # ids that exist, added tokens included; embedding rows from here on are never used
    eos: tuple[int, ...]  # every id that ends a response; the first is the one the model is trained on
    pad: int
    bos: int | None  # set when a prompt must start with it, None for models without one
    fingerprint: str  # of the id-to-token map: equal means "same tokenizer"


@dataclass(frozen=True)
class Reencoding:
    """A source's response in a learner's tokens: ids is None where it cannot be had without loss, and why says so."""

    text: str
    ids: list[int] | None
    why: Loss


def load(folder: str | Path, prompt: PromptConfig) -> Tokenizer:
    """Read the tokenizer of a model folder in Hugging Face layout.

    eos is generation_config.json's (config.json's where there is none) united with the tokenizer's own, which comes
    first: it closes the answers the model was trained on.
    Raises UserError when the folder has no fast tokenizer, no end-of-sequence token, or gaps between its ids.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist")
    try:
        hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the broken file makes it stumble over
        raise UserError(f"{folder}: no tokenizer could be read ({_one_line(error)})") from None
    if not hf.is_fast:
        raise UserError(f"{folder}: the tokenizer has no tokenizer.json; convert it to a fast tokenizer")
    vocabulary = hf.get_vocab()
    size, used = max(vocabulary.values()) + 1, len(set(vocabulary.values()))
    if used != size:
        raise UserError(f"{folder}: the tokenizer's ids have gaps: {used} ids up to {size - 1}")
    eos = _eos(folder, hf.eos_token_id, size)
    if not prompt.format.count("{problem}"):
        raise UserError(f"prompt.format {prompt.format!r} has no {{problem}}: say where the problem goes")
    return Tokenizer(
        hf=hf,
        prompt=prompt,
        vocab_size=size,
        eos=eos,
        pad=eos[0] if hf.pad_token_id is None else hf.pad_token_id,
        bos=_bos(hf),
        fingerprint=_fingerprint(vocabulary),
    )


def same(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether ids of one are ids of the other. Templates and EOS may still differ."""
    return a.fingerprint == b.fingerprint


def render(tok: Tokenizer, problem: Problem) -> list[int]:
    """Ids of the full prompt: the chat template with its generation prompt, one BOS where the model has one.

    A model without a template gets prompt.format, with the messages in the place of ``{problem}``.
    Raises UserError when the template refuses the messages.
    """
    messages = [{"role": role, "content": content} for role, content in problem.messages]
    if tok.prompt.system is not None:
        rest = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": tok.prompt.system}, *rest]
    if tok.hf.chat_template is None:
        text = "\n\n".join(message["content"] for message in messages)
        ids = tok.hf(tok.prompt.format.replace("{problem}", text), add_special_tokens=False, verbose=False).input_ids
    else:
        try:
            ids = tok.hf.apply_chat_template(
                messages,
                chat_template=_without_clock(tok.hf.get_chat_template()),
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                **{"date_string": tok.prompt.date_string} | tok.prompt.template_args,
            )
        except TemplateError as error:
            where = f"{problem.source} {problem.id}"
            raise UserError(f"{where}: the chat template refuses its messages: {_one_line(error)}") from None
    if tok.bos is not None and ids[:1] != [tok.bos]:
        ids = [tok.bos, *ids]
    return list(ids)


def decode(tok: Tokenizer, ids: Sequence[int]) -> str:
    """Text of ids, without clean-up, special tokens skipped. Raises ValueError for an id the tokenizer lacks."""
    ids = [int(i) for i in ids]
    if ids and not 0 <= min(ids) <= max(ids) < tok.vocab_size:
        outside = next(i for i in ids if not 0 <= i < tok.vocab_size)
        raise ValueError(f"id {outside} is outside the tokenizer's vocabulary of {tok.vocab_size}")
    # The backend, not the wrapper: Llama's tokenizer_config asks for a clean-up of spaces, which loses characters.
    return tok.hf.backend_tokenizer.decode(ids, skip_special_tokens=True)


def encode(tok: Tokenizer, text: str) -> list[int]:
    """Ids of text: no specials added, control strings as plain characters."""
    return list(tok.hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids)


def translate(source: Tokenizer, learner: Tokenizer, ids: Sequence[int]) -> Reencoding:
    """A response of source, without its EOS, in the tokens of learner.

    It is lossless when the learner's ids decode to the very text that the source's decode to. Text with U+FFFD counts
    as lost: the source stopped inside a character, and its bytes cannot be told from the replacement.
    """
    text = decode(source, ids)
    if CUT_CHARACTER in text:
        return Reencoding(text, None, "cut character")
    encoded = encode(learner, text)
    if decode(learner, encoded) != text:  # a normalizer at work, such as Qwen3's NFC
        return Reencoding(text, None, "text changed")
    return Reencoding(text, encoded, "")


def reencode(source: Tokenizer, learner: Tokenizer, ids: Sequence[int]) -> list[int] | None:
    """The ids of translate: None where the response is not lossless. The ids themselves for one tokenizer."""
    if same(source, learner):
        return list(ids)
    return translate(source, learner, ids).ids


def _without_clock(template: str) -> str:
    """The template with strftime_now, where it calls it, shadowed by the configured date: never the clock."""
    if "strftime_now" not in template:
        return template
    return "{%- macro strftime_now(format) -%}{{ date_string }}{%- endmacro -%}" + template


def _bos(hf: PreTrainedTokenizerBase) -> int | None:
    """The BOS id if the model's prompts start with it: its tokenizer adds it, or its template writes it."""
    if hf.bos_token_id is None:
        return None
    template = hf.chat_template if isinstance(hf.chat_template, str) else str(hf.chat_template or "")
    adds = hf("a").input_ids[:1] == [hf.bos_token_id]
    return hf.bos_token_id if adds or "bos_token" in template or hf.bos_token in template else None


def _eos(folder: Path, own: int | None, size: int) -> tuple[int, ...]:
    found = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            try:
                ids = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise UserError(f"{folder / name}: not a JSON object ({_one_line(error)})") from None
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
            break
    if not found:
        raise UserError(f"{folder}: neither generation_config.json nor the tokenizer names an end-of-sequence token")
    outside = [i for i in found if not isinstance(i, int) or not 0 <= i < size]
    if outside:
        raise UserError(f"{folder}: eos_token_id {outside[0]!r} is not an id of its tokenizer ({size} ids)")
    return tuple(dict.fromkeys(found))


def _fingerprint(vocabulary: dict[str, int]) -> str:
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
