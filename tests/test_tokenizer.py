"""The prompt, encode, decode and re-encode contracts, on the embedded agents' tokenizers and on the real ones."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hacrl_jax import tokenizer
from hacrl_jax.config import PromptConfig
from hacrl_jax.types import Problem, UserError

TINY = Path(tokenizer.__file__).parent / "agents"
ADVERSARIAL = {
    "emoji": "🙂 👩‍👩‍👧 🇫🇷 done",
    "composed": "é ü ñ 한 ﬁ",
    "control strings": "the end<|im_end|> and<|eot_id|><|endoftext|><|begin_of_text|><|im_start|>user\n",
    "trailing spaces": "\\boxed{4}   ",
    "leading spaces": "   \\boxed{4}",
    "CRLF": "a\r\nb\r\n\r\nc\rd\n\n",
    "NUL": "a\x00b\x00",
    "clean-up bait": "it 's , ok . do n't ! we 've",
    "thinking": "<think>\n3*4 = 12\n</think>\n\n12",
    "other scripts": "Ответ: 四十二 ٤٢ ४२ 𝟜𝟚",
    "whitespace": "\u00a0\u2003\t \u200b|",
    "empty": "",
}


@pytest.fixture(scope="module")
def qwen(shared):
    return tokenizer.load(shared / "tokenizers" / "qwen3", PromptConfig())


@pytest.fixture(scope="module")
def llama(shared):
    return tokenizer.load(shared / "tokenizers" / "llama3", PromptConfig())


@pytest.fixture(scope="module")
def tiny():
    return {name: tokenizer.load(TINY / name, PromptConfig()) for name in ("tiny-qwen3-a", "tiny-llama")}


def problem(text: str, *before: tuple[str, str]) -> Problem:
    return Problem(id=0, messages=(*before, ("user", text)), gold="", source="test")


def folder_with(tmp_path: Path, source: Path, **changes) -> Path:
    """A copy of a tokenizer with keys of its tokenizer_config changed; None removes one."""
    target = tmp_path / "model"
    target.mkdir()
    shutil.copy(source / "tokenizer.json", target)
    settings = json.loads((source / "tokenizer_config.json").read_text()) | changes
    settings = {key: value for key, value in settings.items() if value is not None}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


# Any text, in small vocabularies: all bytes are there, so nothing can be lost.


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60).filter(lambda text: tokenizer.CUT_CHARACTER not in text))
def test_any_text_survives_the_exchange_between_tiny_tokenizers(tiny, text):
    a, b = tiny["tiny-qwen3-a"], tiny["tiny-llama"]
    ids = tokenizer.encode(a, text)
    assert tokenizer.decode(a, ids) == text
    there = tokenizer.reencode(a, b, ids)
    assert tokenizer.decode(b, there) == text
    assert tokenizer.reencode(b, a, there) == ids


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_text_round_trips_through_the_real_tokenizers(qwen, llama, name):
    text = ADVERSARIAL[name]
    for source, learner in ((qwen, llama), (llama, qwen)):
        ids = tokenizer.encode(source, text)
        assert tokenizer.decode(source, ids) == text
        got = tokenizer.translate(source, learner, ids)
        assert (got.why, got.text) == ("", text)
        assert tokenizer.decode(learner, got.ids) == text
        specials = set(learner.hf.all_special_ids)
        assert not specials & set(got.ids)


@pytest.mark.parametrize("text", ["e\u0301 n\u0303", "\u1100\u1161", "\u212b"])
def test_text_that_the_learner_normalizes_is_lost_and_says_so(qwen, llama, text):
    """Qwen3 composes characters (NFC): a Llama answer with combining marks cannot be told in its tokens."""
    ids = tokenizer.encode(llama, text)
    assert tokenizer.decode(llama, ids) == text
    assert tokenizer.translate(llama, qwen, ids) == tokenizer.Reencoding(text, None, "text changed")
    assert tokenizer.reencode(llama, qwen, ids) is None


def test_a_cut_character_is_lost_in_both_directions(qwen, llama, tiny):
    for source, learner in ((qwen, llama), (llama, qwen), (tiny["tiny-llama"], tiny["tiny-qwen3-a"])):
        ids = tokenizer.encode(source, "answer 🩻")
        assert len(tokenizer.encode(source, "🩻")) > 1
        got = tokenizer.translate(source, learner, ids[:-1])
        assert (got.ids, got.why) == (None, "cut character")
        assert tokenizer.reencode(source, learner, ids) is not None


def test_characters_split_over_tokens_decode_whole(qwen, llama):
    for tok in (qwen, llama):
        ids = tokenizer.encode(tok, "🩻")
        assert tokenizer.CUT_CHARACTER in tokenizer.decode(tok, ids[:1])
        assert tokenizer.decode(tok, ids) == "🩻"


def test_special_tokens_vanish_in_text_and_control_strings_do_not(qwen):
    end = qwen.eos[0]
    assert tokenizer.decode(qwen, [*tokenizer.encode(qwen, "4"), end]) == "4"
    spelled = tokenizer.encode(qwen, "4<|im_end|>")
    assert end not in spelled
    assert tokenizer.decode(qwen, spelled) == "4<|im_end|>"


def test_ids_outside_the_vocabulary_are_an_error(qwen, tiny):
    for tok in (qwen, tiny["tiny-qwen3-a"]):
        for bad in (tok.vocab_size, -1):
            with pytest.raises(ValueError, match="outside the tokenizer's vocabulary"):
                tokenizer.decode(tok, [1, bad])
    with pytest.raises(ValueError, match="vocabulary"):
        tokenizer.reencode(tiny["tiny-qwen3-a"], tiny["tiny-llama"], [tiny["tiny-qwen3-a"].vocab_size])


def test_solutions_go_from_qwen_to_llama_and_back(qwen, llama, shared, capsys):
    """MATH-500 and GSM8K: lossless, or counted with the reason; the lengths' ratio is reported."""
    texts = {
        "MATH-500": [row["solution"] for row in rows(shared / "data" / "math500.jsonl")],
        "GSM8K": [row["answer"] for row in rows(shared / "data" / "gsm8k_test.jsonl")],
    }
    for name, solutions in texts.items():
        lost: dict[str, int] = {}
        there_tokens = back_tokens = same_ids = 0
        for text in solutions:
            ids = tokenizer.encode(qwen, text)
            there = tokenizer.translate(qwen, llama, ids)
            back = there if there.ids is None else tokenizer.translate(llama, qwen, there.ids)
            if back.ids is None:
                lost[back.why] = lost.get(back.why, 0) + 1
                continue
            assert tokenizer.decode(llama, there.ids) == tokenizer.decode(qwen, ids) == tokenizer.decode(qwen, back.ids)
            there_tokens, back_tokens = there_tokens + len(there.ids), back_tokens + len(back.ids)
            same_ids += back.ids == ids
        with capsys.disabled():
            print(f"\n{name}: {len(solutions)} solutions, lost {lost or 'none'}, same ids after the round trip "
                  f"{same_ids}, Llama / Qwen3 tokens {there_tokens / back_tokens:.3f}")  # fmt: skip
        assert not lost
        assert same_ids == len(solutions)
        assert 0.7 < there_tokens / back_tokens < 1.0  # Llama takes three digits at a time


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Prompts.


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_prompts_equal_transformers_own_rendering(shared, name, thinking):
    folder = shared / "tokenizers" / name
    config = PromptConfig(template_args={"enable_thinking": thinking})
    tok, theirs = tokenizer.load(folder, config), AutoTokenizer.from_pretrained(folder)
    questions = [row["problem"] for row in rows(shared / "data" / "math500.jsonl")[:100]]
    questions += [row["question"] for row in rows(shared / "data" / "gsm8k_test.jsonl")[:50]]
    questions += [text for text in ADVERSARIAL.values() if text]
    args = {"enable_thinking": thinking} if name == "qwen3" else {}
    for text in questions:
        for before in ((), (("system", "Put the answer in \\boxed{}."),)):
            item = problem(text, *before)
            messages = [{"role": role, "content": content} for role, content in item.messages]
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **args)
            assert tokenizer.render(tok, item) == expected


def test_bos_once_for_llama_and_never_for_qwen(qwen, llama):
    assert qwen.bos is None
    ids = tokenizer.render(llama, problem("2+2?"))
    assert ids[0] == llama.bos == 128000
    assert ids.count(llama.bos) == 1
    assert tokenizer.encode(llama, "2+2?")[0] != llama.bos


def test_a_template_without_bos_still_starts_with_one(shared, tmp_path):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    folder = folder_with(tmp_path, shared / "tokenizers" / "llama3", chat_template=template)
    ids = tokenizer.render(tokenizer.load(folder, PromptConfig()), problem("2+2?"))
    assert ids[0] == 128000
    assert ids.count(128000) == 1


@pytest.mark.parametrize(("name", "bos"), [("qwen3", []), ("llama3", [128000])])
def test_base_models_get_the_configured_format(shared, tmp_path, name, bos):
    folder = folder_with(tmp_path, shared / "tokenizers" / name, chat_template=None)
    config = PromptConfig(format="Question: {problem}\nAnswer:", system="Be brief.")
    tok = tokenizer.load(folder, config)
    text = "Question: Be brief.\n\nWhat is {x} in \\boxed{4}?\nAnswer:"
    assert tokenizer.render(tok, problem("What is {x} in \\boxed{4}?")) == bos + tokenizer.encode(tok, text)


def test_the_date_comes_from_the_config_and_never_from_the_clock(shared, tmp_path):
    """Both ways in which a template asks: Llama 3.2's, and one that calls strftime_now without looking."""
    llama_32 = (
        "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
        "{%- endif %}{{- 'Today Date: ' + date_string + '\n' + messages[0]['content'] }}"
    )
    careless = "{{ bos_token + 'Today Date: ' + strftime_now('%d %b %Y') + '\n' + messages[0]['content'] }}"
    for i, template in enumerate((llama_32, careless)):
        (tmp_path / str(i)).mkdir()
        folder = folder_with(tmp_path / str(i), shared / "tokenizers" / "llama3", chat_template=template)
        for config, date in ((PromptConfig(), "26 Jul 2024"), (PromptConfig(date_string="1 May 2025"), "1 May 2025")):
            tok = tokenizer.load(folder, config)
            text = tok.hf.decode(tokenizer.render(tok, problem("2+2?")))
            assert text == f"<|begin_of_text|>Today Date: {date}\n2+2?"


def test_the_configured_system_prompt_replaces_the_problem_s(qwen):
    tok = tokenizer.load(qwen.hf.name_or_path, PromptConfig(system="ours"))
    text = tok.hf.decode(tokenizer.render(tok, problem("2+2?", ("system", "theirs"))))
    assert text.startswith("<|im_start|>system\nours<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n")
    assert "theirs" not in text


def test_a_template_that_refuses_is_a_user_error(shared, tmp_path):
    template = "{{ raise_exception('only alternating roles') }}"
    tok = tokenizer.load(folder_with(tmp_path, shared / "tokenizers" / "qwen3", chat_template=template), PromptConfig())
    with pytest.raises(UserError, match="only alternating roles"):
        tokenizer.render(tok, problem("2+2?"))


# What load finds out.


def test_vocabulary_eos_and_pad(qwen, llama):
    assert (qwen.vocab_size, llama.vocab_size) == (151669, 128256)
    assert (qwen.eos, llama.eos) == ((151645,), (128009,))
    assert (qwen.pad, llama.pad) == (151643, 128009)


@pytest.mark.parametrize(("file", "given", "expected"), [
    ("generation_config.json", [151645, 151643], (151645, 151643)),
    ("generation_config.json", 151643, (151645, 151643)),
    ("config.json", 151643, (151645, 151643)),
])  # fmt: skip
def test_eos_unites_generation_config_and_tokenizer(shared, tmp_path, file, given, expected):
    folder = folder_with(tmp_path, shared / "tokenizers" / "qwen3")
    extra = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} if file == "config.json" else {}
    (folder / file).write_text(json.dumps(extra | {"eos_token_id": given}))
    assert tokenizer.load(folder, PromptConfig()).eos == expected


def test_same_tokenizer_means_the_same_map_whatever_template_and_eos(qwen, llama, shared, tmp_path):
    other = folder_with(
        tmp_path, shared / "tokenizers" / "qwen3", chat_template="{{ messages }}", eos_token="<|endoftext|>"
    )
    other = tokenizer.load(other, PromptConfig())
    assert other.eos == (151643,)
    assert tokenizer.same(qwen, other)
    assert not tokenizer.same(qwen, llama)


def test_bad_folders_are_user_errors(shared, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        tokenizer.load(tmp_path / "nothing", PromptConfig())
    with pytest.raises(UserError, match="no tokenizer could be read"):
        tokenizer.load(tmp_path, PromptConfig())
    folder = folder_with(tmp_path, shared / "tokenizers" / "llama3", eos_token=None)
    with pytest.raises(UserError, match="end-of-sequence"):
        tokenizer.load(folder, PromptConfig())
    (folder / "generation_config.json").write_text('{"eos_token_id": 128300}')
    with pytest.raises(UserError, match=r"eos_token_id 128300 is not an id"):
        tokenizer.load(folder, PromptConfig())
    (folder / "generation_config.json").write_text('{"eos_token_id": 128009}')
    with pytest.raises(UserError, match=r"no \{problem\}"):
        tokenizer.load(folder, PromptConfig(format="Question: "))
