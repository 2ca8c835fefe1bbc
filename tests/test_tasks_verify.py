"""The verifier: its cases, the published data sets, the fuzzer, and what must never happen."""

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl_jax.config import DataConfig, PolicyConfig, VerifierConfig
from hacrl_jax.tasks import answers, data, latex, normal
from hacrl_jax.tasks.grader import Grader
from hacrl_jax.tasks.policy import Policy
from hacrl_jax.tasks.verify import ERRORS, Verdict, extract, judge, verify

CASES = [json.loads(line) for line in (Path(__file__).parent / "verification_cases.jsonl").read_text().splitlines()]
DATA_SETS = ("math500", "amc23", "aime24", "gsm8k_test", "minerva_math", "olympiadbench")

HOSTILE = [
    "9^{9^{9^9}}", "(10^7)!", "10^{10^{10}}", "2^{10^{9}}", "9!!!!!!!!", r"\binom{10^9}{10^8}", "(n!)!",
    r"\sum_{k=1}^{10^{12}} k^{k}", r"\prod_{k=1}^{10^9} k", r"\int_0^1 x^{x} dx", r"\lim_{x\to 0}\frac{\sin x}{x}",
    r"\Gamma(10^{8})", "e^{e^{e^{e^e}}}", "x^{x^{x^{x^{x}}}}", "1e999999999", "9.9e99999", r"\tan(10^{9999})",
    r"\log_{2}(2^{2^{40}})", r"\lfloor 10^{9999}\pi\rfloor", "((x^{1000})^{1000})^{1000}", r"\operatorname{eye}(10^5)",
    "(" * 500 + "1" + ")" * 500, r"\frac{" * 300 + "1" + "}{1}" * 300, r"\sqrt{" * 200 + "1" + "}" * 200, "9" * 3000,
    "1" + "+1" * 900, "x" * 1900, "2^" * 400 + "2", r"\begin{matrix}" + "1&" * 900 + r"1\end{matrix}", "1;2;3;" * 200,
    r"\pm" * 300, r"\left(" * 300, r"\mathbf" * 300, r"\frac" * 500, "^" * 900, "_" * 900, "!" * 900, "-" * 900 + "2",
    r"\text{" * 300, r"\cup" * 300, "1=1=1=1=1=1=2", r"\sin" * 100 + "x", r"\int_0^1" * 20 + "6", "," * 20 + "1",
    "__import__('os').system('touch PWNED')", "().__class__.__bases__", "lambda: 0", "exec('1')", "open('/etc/passwd')",
    "1\u0661", "\u202e1", "\x001",
]  # fmt: skip


@pytest.fixture(scope="module")
def grader():
    with Grader(VerifierConfig(max_error_share=1.0)) as opened:
        yield opened


def gold_answers(shared, name):
    return [p.gold for p in data.problems(DataConfig(source=str(shared / "data" / f"{name}.jsonl")))[0]]


@pytest.mark.parametrize("kind", sorted({case["kind"] for case in CASES}))
def test_cases(kind):
    wrong = [
        (case["gold"], case["prediction"], verdict)
        for case in CASES
        if case["kind"] == kind
        for verdict in [verify(gold=case["gold"], prediction=case["prediction"])]
        if verdict.correct != case["correct"]
    ]
    assert not wrong


def test_shared_cases_all_agree(shared, grader):
    rows = [json.loads(line) for line in (shared / "cases" / "answers.jsonl").read_text().splitlines()]
    hung = grader.counts.hung
    verdicts = grader.grade([row["gold"] for row in rows], [row["prediction"] for row in rows])
    assert [verdict.correct for verdict in verdicts] == [row["correct"] for row in rows]
    assert grader.counts.hung == hung
    assert not Path("/tmp/hacrl_pwned").exists()


def test_hostile_answers_are_wrong_and_kill_nobody(grader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = (grader.counts.hung, grader.counts.killed)
    verdicts = grader.grade(["1"] * len(HOSTILE), [f"\\boxed{{{answer}}}" for answer in HOSTILE])
    assert not any(verdict.correct for verdict in verdicts)
    assert not [verdict for verdict in verdicts if verdict.reason in ERRORS]
    assert (grader.counts.hung, grader.counts.killed) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", DATA_SETS)
def test_gold_answers_verify_against_themselves_and_not_against_the_next(shared, grader, name):
    golds = gold_answers(shared, name)
    spelled = [gold.replace("\\frac", "\\dfrac").replace("(", "\\left( ").replace(")", "\\right)") for gold in golds]
    for boxes in (golds, spelled):
        verdicts = grader.grade(golds, [f"Thus $\\boxed{{{box}}}$." for box in boxes])
        refused = [gold for gold, verdict in zip(golds, verdicts, strict=True) if not verdict.correct]
        assert len(refused) <= 0.005 * len(golds) or (boxes is spelled and len(refused) <= 2), refused
    following = golds[1:] + golds[:1]
    verdicts = grader.grade(golds, [f"\\boxed{{{box}}}" for box in following])
    accepted = {pair for pair, v in zip(zip(golds, following, strict=True), verdicts, strict=True) if v.correct}
    assert {(a, b) for a, b in accepted if a != b} <= {("5", "x=5")}
    assert not [verdict for verdict in verdicts if verdict.reason in ERRORS]


PIECES = [
    "{", "}", "(", ")", "[", "]", "^", "_", "{}", "}}", "{{", "^{9}", "^{99}", "!", ",", ";", "\\\\", "&", "=", "|",
    "%", "$", "**", "__", "'", "/0", "10^{", "e^{", "^{x", "😀", "é", "−", "²", "∞", "½", "\\frac", "\\sqrt", "\\pm",
    "\\cup", "\\text{", "\\left(", "\\le", "\\in", "\\log", "\\sin", "\\lfloor", "\\binom", "\\sum_{k=1}^{n}",
    "\\begin{pmatrix}",
]  # fmt: skip


def mutated(text, golds, chance):
    for _ in range(chance.randint(1, 6)):
        i = chance.randint(0, len(text))
        j = chance.randint(i, min(len(text), i + 8))
        text = chance.choice(
            [
                text[:i],
                text[:i] + chance.choice(PIECES) + text[i:],
                text[:i] + text[j:],
                text[:i] + text[i:j] * chance.randint(2, 20) + text[j:],
                text[:i] + chance.choice(PIECES) * chance.randint(1, 30) + text[j:],
                text[:i] + "9" * chance.randint(1, 300) + text[j:],
                text[:i] + chance.choice(golds) + text[j:],
            ]
        )
    return text


@pytest.mark.slow
def test_two_thousand_mutated_answers(shared):
    golds = [gold for name in ("math500", "minerva_math", "olympiadbench") for gold in gold_answers(shared, name)]
    chance = random.Random(7)
    wanted = [chance.choice(golds) for _ in range(2000)]
    found = [f"\\boxed{{{mutated(gold, golds, chance)}}}" for gold in wanted]
    with Grader(VerifierConfig(max_error_share=1.0)) as grader:
        verdicts = grader.grade(wanted, found)
        assert len(verdicts) == 2000
        assert grader.counts.slowest <= grader.deadline + 1.0
        assert grader.counts.errors <= 10
        assert grader.grade(["1"] * 2, ["\\boxed{1}", "\\boxed{2}"]) == [
            Verdict(True, "equal"),
            Verdict(False, "different"),
        ]


@given(st.text(max_size=60), st.sampled_from(["1", "x+1", "(1,2)", "\\text{east}"]))
@settings(max_examples=150, deadline=None)
def test_no_exception_leaves_the_verifier(text, gold):
    assert isinstance(verify(gold=gold, prediction=f"\\boxed{{{text}}}"), Verdict)
    assert isinstance(verify(gold=gold, prediction=text), Verdict)


@given(st.fractions(), st.fractions())
@settings(max_examples=100, deadline=None)
def test_rationals_are_compared_exactly_in_every_spelling(a, b):
    spellings = [f"{a}", f"\\frac{{{a.numerator}}}{{{a.denominator}}}", f"x = {a}", f"{a} \\text{{ cm}}"]
    for spelling in spellings:
        assert judge(gold=f"{a}", answer=spelling).correct
        assert judge(gold=f"{b}", answer=spelling).correct == (a == b)


@given(st.integers(-(10**40), 10**40))
@settings(max_examples=50, deadline=None)
def test_integers_of_any_size(n):
    assert judge(gold=str(n), answer=f"{n:,}").correct
    assert not judge(gold=str(n), answer=str(n + 1)).correct
    assert not judge(gold=str(n), answer=f"{n + 1}.0").correct


@given(st.permutations(["1", "\\frac{1}{2}", "\\sqrt{2}", "x+1", "-3"]))
@settings(max_examples=20, deadline=None)
def test_lists_and_sets_have_no_order_and_tuples_have_one(items):
    ordered = ["1", "\\frac{1}{2}", "\\sqrt{2}", "x+1", "-3"]
    listed, respelled = ",".join(ordered), ", ".join(items).replace("\\frac{1}{2}", "0.5")
    assert judge(gold=listed, answer=respelled).correct
    assert judge(gold=f"\\{{{listed}\\}}", answer=f"\\{{{respelled}\\}}").correct
    assert judge(gold=f"({listed})", answer=f"({respelled})").correct == (items == ordered)
    assert not judge(gold=listed, answer=",".join(items[1:])).correct


@pytest.mark.parametrize(
    ("switch", "gold", "answer", "default", "switched"),
    [
        ({"percent": "value"}, r"28\%", "28", True, False),
        ({"percent": "value"}, r"28\%", "0.28", True, True),
        ({"percent": "number"}, r"28\%", "0.28", True, False),
        ({"units": "ignore"}, r"12 \text{ cm}", r"12 \text{ m}", False, True),
        ({"units": "require"}, r"12 \text{ cm}", "12", True, False),
        ({"rounding": 0}, r"\frac{1}{3}", "0.333333", True, False),
        ({"rounding": 3}, r"\frac{1}{3}", "0.333", False, True),
        ({"tolerance": 0.01}, "1.60", "1.61", False, True),
        ({"tolerance": 0.01}, "160", "161", False, False),
    ],
)
def test_switches(switch, gold, answer, default, switched):
    assert judge(gold=gold, answer=answer).correct == default
    assert judge(gold=gold, answer=answer, policy=Policy(**switch)).correct == switched


def test_several_boxes_by_switch():
    text = r"\boxed{3} and \boxed{4}"
    assert not verify(gold="3,4", prediction=text).correct
    assert verify(gold="4", prediction=text).correct
    assert verify(gold="3,4", prediction=text, policy=Policy(boxes="all")).correct


def test_the_configs_defaults_are_the_policys():
    assert Policy(**PolicyConfig().model_dump()) == Policy()


def test_nothing_reaches_sympys_eval(monkeypatch):
    from sympy.parsing import sympy_parser

    def refuse(*_args, **_kwargs):
        raise AssertionError("text reached sympy's eval")

    monkeypatch.setattr(sympy_parser, "eval_expr", refuse)
    monkeypatch.setattr(sympy_parser, "parse_expr", refuse)
    latex.expression.cache_clear()
    for case in CASES:
        assert verify(gold=case["gold"], prediction=case["prediction"]).correct == case["correct"], case


def test_extraction_is_linear_in_a_long_response():
    text = "\\boxed{" * 20_000 + "1" + "<think></think>" * 5_000
    assert isinstance(extract(text), Verdict)
    assert extract("x" * 2_000_000 + r"\boxed{5}") == "5"


def test_normalizing_twice_changes_nothing():
    for case in (case for case in CASES if "$" not in case["gold"]):
        once = normal.normalize(case["gold"])
        assert normal.normalize(once).replace(" ", "") == once.replace(" ", "")


def test_thousands_are_read_both_ways():
    assert len(answers.readings("123,456")) == 2
    assert len(answers.readings("123, 456")) == 1


def test_the_verifier_does_not_import_jax():
    import subprocess

    code = "import sys; import hacrl_jax.tasks.verify as v; v.judge(gold='x', answer='y'); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
