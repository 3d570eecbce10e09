"""`evaluate`: what is asked, what is saved, and how a run goes on."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from letters import letter_tokenizer

from kvkeep.evaluate import rows, run
from kvkeep.evaluate.answers import Answer
from kvkeep.evaluate.prompts import Exam, encode
from kvkeep.evaluate.rows import read_rows, read_samples
from kvkeep.evaluate.run import evaluate

TESTS = Path(__file__).parent
TOKENIZER = letter_tokenizer()
# letters are tokens here: short for a text, long for a test
SMALL = {
    "model_name": "tiny",
    "tasks": ["niah_single_1", "vt"],
    "policies": ["streaming", "snapkv"],
    "budgets": ["10%", 64],
    "length": 1000,
    "num_samples": 2,
    "max_new_tokens": 4,
}


def ask(tiny, out: Path, **changes):
    return evaluate(tiny("llama"), TOKENIZER, out=out, **{**SMALL, **changes})


def saved(out: Path) -> list[dict]:
    return read_samples(out / "samples.jsonl")


def measured(record: dict) -> tuple:
    return tuple(record[name] for name in ("key", "score", "output", "kept", "cache_bytes", "full_bytes"))


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> Path:
    """An uninterrupted run of SMALL."""
    out = tmp_path_factory.mktemp("whole")
    ask(tiny, out)
    return out


# what comes out


def test_every_task_meets_every_policy_at_every_budget_and_the_full_cache(whole):
    got = [(r["task"], r["index"], r["policy"], r["budget"]) for r in saved(whole)]
    arms = [("full", "full"), ("streaming", "10%"), ("streaming", "64"), ("snapkv", "10%"), ("snapkv", "64")]
    assert got == [(task, index, *arm) for task in SMALL["tasks"] for index in range(2) for arm in arms]


def test_rows_count_the_samples_and_begin_with_the_full_cache(whole):
    found = read_rows(whole / "rows.jsonl")
    assert [row.n for row in found] == [2] * 10
    assert [row.policy for row in found[::5]] == ["full", "full"]
    assert {(row.model, row.length, row.question, row.split, row.seed) for row in found} == {
        ("tiny", 1000, "after", "test", 0)
    }


def test_what_was_held_is_what_the_budget_allows(whole):
    for record in saved(whole):
        tokens = record["prompt_tokens"]
        held = {"full": tokens, "10%": -(-tokens // 10), "64": 64}[record["budget"]]
        assert record["kept"] == held
        assert record["full_bytes"] == tokens * 3 * 2 * 2 * 16 * 4
        if record["policy"] != "full":
            # one slot waits for the next token; positions and side arrays are counted
            assert held * 768 < record["cache_bytes"] < (held + 2) * 768 * 1.2


def test_scores_are_the_tasks_own_and_average_into_rows(tiny, tmp_path, monkeypatch):
    right = TOKENIZER(" " + ", ".join(Exam(tokenizer=TOKENIZER, **EXAM).sample("niah_single_1", 0).answers))[
        "input_ids"
    ]

    def answers(model, caches, *args, **kwargs):
        # the full cache always says the first sample's answer, the others nothing
        return [Answer(right if cache.budget.unlimited else [], 1.0, 1, 1) for cache in caches]

    monkeypatch.setattr(run, "answer_together", answers)
    found = ask(tiny, tmp_path, tasks=["niah_single_1"])
    assert [row.value for row in found] == [0.5, 0, 0, 0, 0]
    assert found[0].interval == "wilson"


EXAM = {"tasks": ("niah_single_1", "vt", "qa_1"), "num_tokens": 1000, "split": "test", "num_samples": 3}


@pytest.mark.parametrize("chat", (True, False))
@pytest.mark.parametrize("task", EXAM["tasks"])
def test_both_places_of_the_question_give_the_same_tokens(task, chat):
    tokenizer = TOKENIZER if chat else letter_tokenizer(chat_template=None)
    sample = Exam(tokenizer=tokenizer, **EXAM).sample(task, 1)
    inside, after = (encode(tokenizer, sample, place) for place in ("inside", "after"))
    assert torch.equal(torch.cat(inside[:2], 1), torch.cat(after[:2], 1))
    before, behind = (tokenizer.decode(ids[0]) for ids in after[:2])
    assert before.endswith(sample.context + sample.question[: -len(sample.question.lstrip())])
    assert behind.startswith(sample.question.strip()) and behind.endswith(sample.answer_prefix)
    assert tokenizer.decode(inside.follow_up[0]) == sample.answer_prefix
    assert before.startswith("<s>user\n") == chat


@pytest.mark.parametrize("place", ("inside", "after"))
def test_the_oracle_is_shown_what_follows_in_a_right_answer(place):
    sample = Exam(tokenizer=TOKENIZER, **EXAM).sample("niah_single_1", 0)
    prompt = encode(TOKENIZER, sample, place)
    assert TOKENIZER.decode(prompt.future[0]) == TOKENIZER.decode(prompt.follow_up[0]) + f" {sample.answers[0]}"


def test_the_oracle_can_be_asked(tiny, tmp_path):
    found = ask(tiny, tmp_path, tasks=["vt"], policies=["oracle"], num_samples=1)
    assert [row.policy for row in found] == ["full", "oracle", "oracle"]


def test_a_prompt_may_stream_through_the_budget(tiny, tmp_path):
    small = {"tasks": ["niah_single_1"], "num_samples": 1, "policies": ["tova"], "budgets": [64], "length": 500}
    whole, streamed = (ask(tiny, tmp_path / str(chunk), chunk=chunk, **small) for chunk in (None, 64))
    assert [row.extra.get("chunk") for row in (*whole, *streamed)] == [None, None, 64, 64]
    assert [row.kept for row in streamed] == [row.kept for row in whole]
    one, other = (saved(tmp_path / name)[1]["output"] for name in ("None", "64"))
    # what a chunk does not show tova is gone
    assert one != other
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        ask(tiny, tmp_path / "none", chunk=0, **small)
    with pytest.raises(ValueError, match="under other settings"):
        ask(tiny, tmp_path / "64", chunk=32, **small)


def test_the_seed_reaches_policies_that_draw(tiny, tmp_path):
    caches = [run.Arm("random", "64").fresh_cache(tiny("llama"), seed) for seed in (0, 7)]
    assert [cache.policy.seed for cache in caches] == [0, 7]


def test_a_chat_template_that_changes_the_text_is_refused():
    loud = letter_tokenizer(chat_template="{{ messages[0]['content'] | upper }}")
    with pytest.raises(ValueError, match="chat template changes"):
        encode(loud, Exam(tokenizer=loud, **EXAM).sample("vt", 0), "after")


# going on


def test_the_same_call_again_asks_nothing_and_gives_the_same_rows(tiny, whole, monkeypatch):
    before, rows_before = saved(whole), read_rows(whole / "rows.jsonl")
    monkeypatch.setattr(run, "answer_together", lambda *args, **kwargs: pytest.fail("asked again"))
    again = ask(tiny, whole)
    assert saved(whole) == before
    assert [(row.value, row.low, row.n) for row in again] == [(row.value, row.low, row.n) for row in rows_before]


def test_more_samples_or_policies_add_to_what_is_there(tiny, tmp_path):
    ask(tiny, tmp_path, tasks=["vt"], policies=["streaming"], num_samples=1)
    before = saved(tmp_path)
    found = ask(tiny, tmp_path, tasks=["vt"], num_samples=2)
    assert saved(tmp_path)[: len(before)] == before
    assert [row.n for row in found] == [2] * 5


KILLED = """
import os, signal, sys
from pathlib import Path
from conftest import build_tiny
from letters import letter_tokenizer
from kvkeep.evaluate import rows
from kvkeep.evaluate.run import evaluate

write_all, lines = rows._write_all, 0

def die(file, data):
    global lines
    lines += 1
    if lines == 8:
        write_all(file, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write_all(file, data)

rows._write_all = die
evaluate(build_tiny("llama"), letter_tokenizer(), out=Path(sys.argv[1]), **eval(sys.argv[2]))
"""


def test_a_killed_run_goes_on_without_losing_or_repeating_a_sample(tiny, tmp_path, whole):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), repr(SMALL)], cwd=TESTS, env=environment())
    assert done.returncode == -signal.SIGKILL
    assert len((tmp_path / "samples.jsonl").read_bytes().splitlines()) == 8
    with pytest.warns(UserWarning, match="cut short by an interruption"):
        ask(tiny, tmp_path)
    assert sorted(map(measured, saved(tmp_path))) == sorted(map(measured, saved(whole)))
    for got, expected in zip(read_rows(tmp_path / "rows.jsonl"), read_rows(whole / "rows.jsonl"), strict=True):
        assert (got.task, got.policy, got.budget, got.value) == (
            expected.task,
            expected.policy,
            expected.budget,
            expected.value,
        )


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_a_full_disk_stops_the_run_and_loses_nothing(tiny, tmp_path, whole, monkeypatch):
    write_all, lines = rows._write_all, iter(range(100))

    def full(file, data):
        if next(lines) == 7:
            write_all(file, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(rows, "_write_all", full)
        with pytest.raises(OSError, match=r"the disk is full\. The 7 samples before it are safe"):
            ask(tiny, tmp_path)
    ask(tiny, tmp_path)
    assert sorted(map(measured, saved(tmp_path))) == sorted(map(measured, saved(whole)))


def test_progress_counts_prompts_and_ends_with_all_of_them(tiny, tmp_path):
    seen = []
    ask(tiny, tmp_path, policies=["full"], budgets=[], progress=lambda *step: seen.append(step))
    names = ["niah_single_1", "niah_single_1", "vt", "vt", ""]
    assert seen == [(place, 4, name) for place, name in enumerate(names)]


# several models in one folder


def test_another_models_rows_stay(tiny, tmp_path):
    options = {"tasks": ["vt"], "policies": ["streaming"], "budgets": [64], "num_samples": 1}
    first = ask(tiny, tmp_path, **options)
    second = ask(tiny, tmp_path, model_name="other", seed=3, **options)
    assert read_rows(tmp_path / "rows.jsonl") == [*first, *second]
    assert {row.model for row in second} == {"other"}


# refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["niah_singel_1"]}, "unknown task 'niah_singel_1'; did you mean niah_single_1"),
        ({"tasks": []}, "no task given"),
        ({"policies": ["snapkw"]}, "unknown policy 'snapkw'; did you mean snapkv"),
        ({"policies": ["fulll"]}, "did you mean full"),
        ({"split": "tests"}, "unknown split 'tests'; did you mean test"),
        ({"question": "before"}, "unknown place of the question 'before'"),
        ({"budgets": []}, "no budget given for streaming, snapkv"),
        ({"budgets": ["1%", 3]}, "smallest possible is 20"),
        ({"budgets": ["a quarter"]}, "cannot read the budget"),
        ({"budgets": ["2KB"]}, "smallest possible"),
        ({"length": 100}, "num_tokens=100 is too small"),
        ({"length": 0}, "num_tokens must be at least 1"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"templates": Path("missing.json")}, "cannot read templates"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(tiny, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        ask(tiny, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens 4 there, 5 now"),
        ({"seed": 1}, "seed 0 there, 1 now"),
        ({"split": "train"}, "split 'test' there, 'train' now"),
        ({"templates": "own.json"}, "templates None there"),
    ],
)
def test_samples_under_other_settings_are_not_mixed(tiny, tmp_path, whole, changes, message):
    if "templates" in changes:
        (tmp_path / "own.json").write_text((Path(run.__file__).parent / "tasks" / "wording.json").read_text())
        changes = {"templates": tmp_path / "own.json"}
    before = (whole / "samples.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        ask(tiny, whole, **changes)
    assert (whole / "samples.jsonl").read_bytes() == before


def test_other_weights_under_one_name_are_not_mixed(tiny, tmp_path, whole):
    with pytest.raises(ValueError, match=r"weights '.*' there"):
        evaluate(tiny("llama", initializer_range=0.1), TOKENIZER, out=whole, **SMALL)


def test_an_out_that_is_a_file_is_refused(tiny, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="which is a file"):
        ask(tiny, tmp_path / "out")


def test_more_questions_than_the_documents_have_are_refused(tiny, tmp_path):
    paragraphs = [
        {
            "context": f"The mill of {town} is {colour}.",
            "qas": [{"question": f"Which colour has the mill of {town}?", "answers": [{"text": colour}]}],
        }
        for town, colour in (("Ulm", "red"), ("Wien", "green"), ("Linz", "blue"))
    ]
    (tmp_path / "qa").mkdir()
    articles = {"data": [{"title": "mills", "paragraphs": paragraphs}] * 3}
    (tmp_path / "qa" / "squad_paragraphs.json").write_text(json.dumps(articles))
    with pytest.raises(ValueError, match="has 3 questions, 4 were asked for"):
        ask(tiny, tmp_path / "out", tasks=["qa_1"], data=tmp_path, num_samples=4)


def test_a_prompt_beyond_the_models_maximum_is_warned_about(tiny, tmp_path):
    short = tiny("llama", max_position_embeddings=600)
    with pytest.warns(UserWarning, match="longer than the model's maximum of 600"):
        evaluate(short, TOKENIZER, out=tmp_path, **{**SMALL, "tasks": ["vt"], "num_samples": 1, "policies": ["full"]})
