"""Problems solved in answers of the model's own: graded, resumed, and the same as by plain generation."""

import json
from dataclasses import replace

import pytest
import torch
from folders import save_tiny
from letters import letter_tokenizer
from typer.testing import CliRunner

import kvkeep
from kvkeep import KVCache
from kvkeep.cli import app
from kvkeep.corpus.problems import problems_of
from kvkeep.evaluate import solving
from kvkeep.evaluate.prompts import token_ids, user_turn
from kvkeep.evaluate.rows import read_rows, read_samples
from kvkeep.evaluate.solving import Decoding, Problem, is_right, solve

pytest.importorskip("math_verify", reason="grading needs math-verify")

TOKENIZER = letter_tokenizer()
SHORT = Decoding(max_new_tokens=24, instruction="Answer.")
SMALL = {"model_name": "tiny", "policies": ["streaming", "tova"], "budgets": [24], "decoding": SHORT}


def problem(name: str = "1", statement: str = "one and one", answer: str = "2") -> Problem:
    return Problem(source="sums", name=name, statement=statement, answer=answer)


PROBLEMS = [problem(), problem("2", "a longer sum, that of two and two", "4"), problem("3", "six", "7")]


def solved(tiny, out, *, problems=PROBLEMS, **changes):
    return solve(tiny("llama"), TOKENIZER, problems, out=out, **{**SMALL, **changes})


def outputs(out) -> dict[tuple[str, str], str]:
    return {(record["policy"], record["index"]): record["output"] for record in read_samples(out / "samples.jsonl")}


# grading


@pytest.mark.parametrize(
    ("output", "answer", "right"),
    [
        ("3 + 4 is 7, so \\boxed{7}.", "7", True),
        ("She makes $18.00 a day.", "18", True),
        ("first 7, then 8", "7", False),
        ("it is 2000 dollars", "2,000", True),
        ("\\boxed{(3, \\pi/2)}", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
        ("\\boxed{0.5}", "\\frac{1}{2}", True),
        ("I do not know", "7", False),
        ("", "7", False),
    ],
)
def test_the_final_answer_is_what_is_graded(output, answer, right):
    assert is_right(output, answer) is right


# answers


def test_each_arm_answers_in_a_batch_what_it_generates_alone(tiny, tmp_path):
    solved(tiny, tmp_path)
    model, found = tiny("llama"), outputs(tmp_path)
    assert len(found) == 9
    for policy, budget in (("full", None), ("streaming", 24), ("tova", 24)):
        for one in PROBLEMS:
            prompt = token_ids(TOKENIZER, user_turn(TOKENIZER, f"{one.statement}\n\nAnswer."))
            cache = KVCache(model, policy="streaming" if policy == "full" else policy, budget=budget)
            ends = TOKENIZER.eos_token_id
            answer = kvkeep.generate(
                model, prompt, cache=cache, max_new_tokens=24, do_sample=False, eos_token_id=ends, pad_token_id=ends
            )[0, prompt.shape[1] :].tolist()
            text = TOKENIZER.decode(answer, skip_special_tokens=True)
            assert found[policy, f"{one.name}.0"] == text


def test_rows_tell_accuracy_and_its_share_of_the_full_caches(tiny, tmp_path, monkeypatch):
    # the full cache solves two of four, streaming one of them and one that the full cache does not solve
    right = {("full", 0), ("full", 1), ("streaming", 1), ("streaming", 2)}
    problems = [problem(str(number), "x" * (number + 1)) for number in range(4)]
    order = iter([(policy, number) for policy in ("full", "streaming") for number in range(4)])
    monkeypatch.setattr(solving, "is_right", lambda output, answer: next(order) in right)
    rows = solved(tiny, tmp_path, problems=problems, policies=["streaming"])
    full, streaming, share = rows
    assert (full.policy, full.metric, full.value, full.n) == ("full", "accuracy", 0.5, 4)
    assert (streaming.value, share.metric, share.value) == (0.5, "relative_accuracy", 1.0)
    assert share.low < 1 < share.high
    assert streaming.kept == 24 and streaming.extra["tokens"] <= 24 and 0 <= streaming.extra["ended"] <= 1
    assert rows == read_rows(tmp_path / "rows.jsonl")


def test_without_a_right_answer_of_the_full_cache_there_is_no_share(tiny, tmp_path):
    problems = [problem(answer="987654321")]
    assert {row.metric for row in solved(tiny, tmp_path, problems=problems)} == {"accuracy"}


def test_draws_come_again_after_a_stop_and_differ_from_each_other(tiny, tmp_path, monkeypatch):
    drawn = replace(SHORT, temperature=1.0, top_p=0.9, draws=2)
    changes = {"decoding": drawn, "batch": 2, "policies": ["tova"]}
    solved(tiny, tmp_path / "whole", **changes)
    appended = solving._Session.read

    def stops(self, items, arms, place):
        for number, found in enumerate(appended(self, items, arms, place)):
            if place == 2 and number == 1:
                raise KeyboardInterrupt
            yield found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(solving._Session, "read", stops)
        solved(tiny, tmp_path / "parts", **changes)
    before = outputs(tmp_path / "parts")
    assert 0 < len(before) < 12
    state = torch.get_rng_state()
    solved(tiny, tmp_path / "parts", **changes)
    assert torch.equal(state, torch.get_rng_state())
    whole = outputs(tmp_path / "whole")
    assert outputs(tmp_path / "parts") == whole and len(whole) == 12
    assert whole["full", "1.0"] != whole["full", "1.1"]


# data and refusals


def test_problems_of_the_common_files(tmp_path):
    file = tmp_path / "gsm.jsonl"
    lines = [
        {"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
        {"id": "aime_1", "problem": "Find n.", "answer": "204"},
        {"problem": "And this?", "solution": "so it is", "answer": 7},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = problems_of(file)
    assert [(one.statement, one.answer) for one in found] == [
        ("How many?", "4"),
        ("Find n.", "204"),
        ("And this?", "7"),
    ]
    assert [one.name for one in found] == ["00001", "00002", "00003"] and found[0].source == "gsm"
    assert problems_of(file, 2) == found[:2]
    file.write_text(json.dumps({"problem": "Find n."}))
    with pytest.raises(ValueError, match=r"line 1: it needs a problem or .* and an answer; it has problem"):
        problems_of(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problems": []}, "no problems"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"policies": ["oracle"]}, "not written yet"),
        ({"policies": ["tovva"]}, "did you mean tova"),
    ],
)
def test_what_cannot_be_solved_is_refused_before_any_work(tiny, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        solved(tiny, tmp_path, **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "at least 1"),
        ({"draws": 2}, "give a temperature"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p in"),
    ],
)
def test_impossible_decoding_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Decoding(**changes)


def test_the_command_writes_the_rows_that_it_prints(tiny, tmp_path):
    folder = save_tiny(tmp_path / "model")
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"problem": one.statement, "answer": one.answer}) + "\n" for one in PROBLEMS))
    options = ["--model", folder, "--policy", "streaming", "--budget", "24", "--max-new-tokens", "8", "--json"]
    done = CliRunner().invoke(app, ["solve", str(file), *options, "--problems", "2", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert done.stdout == (tmp_path / "out" / "rows.jsonl").read_text()
    assert [row.n for row in read_rows(tmp_path / "out" / "rows.jsonl")] == [2, 2]
