"""`hacrl generate`: answers to a file of prompts, interrupted and continued, cut at stop strings."""

import json
from pathlib import Path

import pytest

import hacrl_jax
from hacrl_jax import generate
from hacrl_jax.generate import Options, before_stop
from hacrl_jax.types import UserError

AGENT = Path(hacrl_jax.__file__).parent / "agents" / "tiny-llama"
OPTIONS = Options(samples=2, max_response=30, slots=3, seed=4)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("generate") / "prompts.jsonl"
    rows = [{"prompt": f"{a} + {a + 7} = ?", "id": f"q{a}"} for a in range(4)]
    rows.append({"messages": [{"role": "user", "content": "9 * 8 = ?"}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def run(prompts, out, options=OPTIONS):
    added = generate.generate(generate.policy(str(AGENT)), prompts, out, options)
    return added, [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def test_interrupted_and_continued(prompts, tmp_path):
    added, rows = run(prompts, tmp_path / "whole.jsonl")
    assert added == len(rows) == 10
    assert {(row["row"], row["sample"]) for row in rows} == {(r, s) for r in range(5) for s in range(2)}
    assert {row["id"] for row in rows} == {"q0", "q1", "q2", "q3", 4}
    assert all(row["finish"] == ("stop" if row["tokens"] < 30 else row["finish"]) and row["text"] for row in rows)
    torn = tmp_path / "torn.jsonl"
    lines = (tmp_path / "whole.jsonl").read_text("utf-8").splitlines()
    (tmp_path / "torn.jsonl.settings.json").write_text((tmp_path / "whole.jsonl.settings.json").read_text())
    torn.write_text("\n".join(lines[:4]) + "\n" + lines[4][:20], "utf-8")
    added, again = run(prompts, torn)
    assert added == 6
    by_place = {(row["row"], row["sample"]): row for row in rows}
    assert {(row["row"], row["sample"]): row for row in again} == by_place
    assert run(prompts, torn)[0] == 0
    with pytest.raises(UserError, match="other settings"):
        run(prompts, torn, Options(samples=2, max_response=30, slots=3, seed=5))


def test_stop_strings_end_answers(prompts, tmp_path):
    rows = run(prompts, tmp_path / "whole.jsonl")[1]
    text = rows[0]["text"]
    stop = text[2:5]
    cut = run(prompts, tmp_path / "cut.jsonl", Options(samples=2, max_response=30, slots=3, seed=4, stop=(stop,)))[1]
    whole = {(row["row"], row["sample"]): row for row in rows}
    for row in cut:
        full = whole[row["row"], row["sample"]]
        assert row["text"] == before_stop(full["text"], (stop,))[0]
        assert row["finish"] == ("stop" if stop in full["text"] else full["finish"])


def test_before_stop():
    assert before_stop("abcdef", ("cd", "b")) == ("a", True)
    assert before_stop("abcdef", ("x",)) == ("abcdef", False)


@pytest.mark.parametrize("row", [{}, {"prompt": 3}, {"messages": []}, {"messages": [{"role": "user"}]}, 7])
def test_rows_that_cannot_be_read_are_told(row, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"prompt": "1"}) + "\n" + json.dumps(row) + "\n", "utf-8")
    with pytest.raises(UserError, match="row 2 needs"):
        run(path, tmp_path / "out.jsonl")


def test_prompts_that_are_too_long_are_told(prompts, tmp_path):
    with pytest.raises(UserError, match="--max-prompt is 2"):
        run(prompts, tmp_path / "out.jsonl", Options(max_prompt=2))


def test_agents_of_folders_and_runs():
    with pytest.raises(UserError, match="no run folder"):
        generate.policy(str(AGENT), agent="a")
