"""Data of every kind becomes prompts with what follows them, and what is no data is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import letter_tokenizer

from kvkeep.corpus import Reading, harvest
from kvkeep.corpus.reading import split_of
from kvkeep.evaluate.prompts import encode
from kvkeep.evaluate.tasks import SPLITS, TASKS, generate
from kvkeep.recorder import Item

TOKENIZER = letter_tokenizer()
BARE = letter_tokenizer(chat_template=None)


def reading(**settings: Any) -> Reading:
    return Reading(**{"tokenizer": TOKENIZER, "num_tokens": 700, "num_prompts": 5, "future_tokens": 12, **settings})


def decoded(item: Item) -> str:
    return TOKENIZER.decode(item.token_ids[0])


def futures(item: Item) -> list[str]:
    return [TOKENIZER.decode(branch.given[0]) for branch in item.branches]


def lines(path: Path, *records: Any) -> str:
    """The name of a file of records."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def in_train(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a field nobody reads, chosen so that it falls into the training split."""
    for salt in range(1000):
        if split_of(json.dumps({**record, "salt": salt})) == "train":
            return {**record, "salt": salt}
    raise AssertionError


@pytest.mark.parametrize("place", ["inside", "after"])
def test_tasks_are_the_generators_prompts_in_turns(place):
    found = harvest(f"tasks:niah_single_1,niah_multivalue/{place}", reading(num_tokens=1200))
    assert [(item.source, item.name) for item in found.items] == [
        (f"{task}/{place}", f"{number:05d}") for number in range(3) for task in ("niah_single_1", "niah_multivalue")
    ][:5]
    sample = generate("niah_multivalue", num_tokens=1200, count_tokens=len, split="train", index=1)
    prompt = encode(TOKENIZER, sample, place)
    assert torch.equal(found.items[3].token_ids, prompt.compressed)
    [branch] = found.items[3].branches
    assert torch.equal(branch.given, prompt.follow_up) and branch.num_new == min(12, sample.max_new_tokens)


def test_tasks_go_by_name_by_beginning_or_all():
    def sources(names: str) -> list[str]:
        prompts = reading(num_prompts=len(TASKS), num_tokens=3000)
        return [item.source for item in harvest(f"tasks:{names}/inside", prompts).items]

    assert sources("all") == [f"{task}/inside" for task in TASKS]
    assert set(sources("qa")) == {"qa_1/inside", "qa_2/inside"}
    assert set(sources("niah_multikey,niah_multikey_1")) == {f"niah_multikey_{number}/inside" for number in (1, 2, 3)}
    assert set(sources("vt")) == {"vt/inside"}


def test_splits_share_no_prompt(tmp_path):
    file = lines(tmp_path / "many.jsonl", *[{"prompt": f"{number} " * 20, "answer": "yes"} for number in range(100)])
    (tmp_path / "book.txt").write_text(" ".join(map(str, range(60_000))))
    for data in ("tasks:niah_single_1/inside", file, f"text:{tmp_path / 'book.txt'}"):
        keys = {split: {item.key for item in harvest(data, reading(split=split)).items} for split in SPLITS}
        prompts = [
            tuple(item.token_ids[0].tolist()) for split in SPLITS for item in harvest(data, reading(split=split)).items
        ]
        assert len(set(prompts)) == len(prompts) and all(keys.values()), data


def test_about_eight_of_ten_pieces_are_for_training():
    splits = [split_of(f"piece {number}") for number in range(1000)]
    assert [splits.count(split) for split in SPLITS] == pytest.approx([800, 100, 100], abs=40)


def test_text_is_cut_in_pieces_that_go_on(tmp_path):
    text = " ".join(f"word{number}" for number in range(5000))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "book.txt").write_text(text)
    found = harvest(f"text:{tmp_path}", reading(num_prompts=4)).items
    assert len({item.name for item in found}) == 4
    for item in found:
        [future] = futures(item)
        whole = decoded(item).removeprefix("<s>") + future
        assert item.source == "text/book" and item.num_tokens == 700 and len(future) == 12
        # it begins at a word, and the future follows
        assert f" {whole}" in f" {text}"


def test_a_short_text_is_three_quarters_prompt(tmp_path):
    (tmp_path / "note.txt").write_text("A short note of exactly sixty-four characters, with its full stop.")
    for split in SPLITS:
        if split_of((tmp_path / "note.txt").read_text()) == split:
            [item] = harvest(f"text:{tmp_path / 'note.txt'}", reading(split=split)).items
            assert item.num_tokens == 49 and futures(item)[0] == "th its full "


def test_a_prompt_is_a_user_turn_and_its_answers_are_futures(tmp_path):
    record = in_train(
        {"prompt": "Where does the river run, and why?", "futures": ["To the sea.", "Downhill, as they do."]}
    )
    [item] = harvest(lines(tmp_path / "asked.jsonl", record), reading()).items
    assert decoded(item).endswith("Where does the river run, and why?</s>\n<s>assistant\n")
    assert futures(item) == ["To the sea.", "Downhill, as"]
    assert [branch.num_new for branch in item.branches] == [0, 0] and item.source == "prompts/asked"


@pytest.mark.parametrize(("asked", "answered"), [("question", "answer"), ("input", "output"), ("prompt", "response")])
def test_other_names_of_prompt_and_answer_are_read(tmp_path, asked, answered):
    record = in_train({asked: "Where does the river run?", answered: "To the sea."})
    [item] = harvest(lines(tmp_path / "asked.jsonl", record), reading()).items
    assert "river run?" in decoded(item) and futures(item) == ["To the sea."]


def test_a_prompt_without_an_answer_is_answered_by_the_model(tmp_path):
    [item] = harvest(lines(tmp_path / "a.jsonl", in_train({"prompt": "Where does the river run?"})), reading()).items
    assert [(branch.given.shape[1], branch.num_new) for branch in item.branches] == [(0, 12)]


def test_questions_follow_a_document_that_ends_before_them(tmp_path):
    record = in_train({"prompt": "A long document about rivers.", "questions": ["Which?", "How long?"]})
    [item] = harvest(lines(tmp_path / "a.jsonl", record), reading()).items
    assert decoded(item).endswith("A long document about rivers.")
    tail = "</s>\n<s>assistant\n"
    assert futures(item) == [f"\n\nWhich?{tail}", f"\n\nHow long?{tail}"]
    assert [branch.num_new for branch in item.branches] == [12, 12]


@pytest.mark.parametrize(("kind", "count"), [("greedy", 1), ("4", 4)])
def test_the_models_own_futures_take_the_place_of_what_data_say(tmp_path, kind, count):
    record = in_train({"prompt": "Where does the river run, and why?", "answer": "To the sea."})
    settings = reading(futures=kind)
    [item] = harvest(lines(tmp_path / "a.jsonl", record), settings).items
    assert [(branch.given.shape[1], branch.num_new) for branch in item.branches] == [(0, 12)] * count
    assert settings.sampled == (0 if kind == "greedy" else 4)


MESSAGES = [
    {"role": "user", "content": "Tell me about rivers, please."},
    {"role": "assistant", "content": "They run downhill, into the sea or into another river."},
    {"role": "user", "content": "All of them?"},
]
REPLY = {"role": "assistant", "text": MESSAGES[1]["content"], "replies": [{"role": "prompter", "text": "All of them?"}]}
TREE = {"text": MESSAGES[0]["content"], "role": "prompter", "replies": [{"role": "assistant", "text": "No."}, REPLY]}


@pytest.mark.parametrize("record", [{"messages": MESSAGES}, {"prompt": TREE}], ids=["messages", "tree"])
def test_conversations_and_the_longest_path_of_a_tree_are_cut_somewhere(tmp_path, record):
    whole = TOKENIZER.apply_chat_template(MESSAGES, tokenize=False)
    file = lines(tmp_path / "chat.jsonl", in_train(record))
    cuts = set()
    for seed in range(40):
        [item] = harvest(file, reading(seed=seed, future_tokens=700)).items
        assert decoded(item) + futures(item)[0] == whole and item.source == "chat/chat"
        cuts.add(item.num_tokens)
    # drawn from 21 tokens to all but the last
    assert 21 <= min(cuts) < 60 and len(whole) - 60 < max(cuts) < len(whole) and len(cuts) > 20


def test_a_prompt_and_its_answer_are_a_conversation_when_asked_for(tmp_path):
    record = in_train({"question": MESSAGES[0]["content"], "response": MESSAGES[1]["content"]})
    file = lines(tmp_path / "a.jsonl", record)
    [item] = harvest(f"chat:{file}", reading(future_tokens=700)).items
    assert decoded(item) + futures(item)[0] == TOKENIZER.apply_chat_template(MESSAGES[:2], tokenize=False)


def test_a_text_in_a_line_is_cut_too_and_a_long_one_is_no_longer_than_asked(tmp_path):
    record = in_train({"text": "rivers and seas " * 100})
    for seed in range(10):
        [item] = harvest(lines(tmp_path / "t.jsonl", record), reading(num_tokens=90, seed=seed)).items
        assert 21 <= item.num_tokens <= 90 and item.source == "text/t" and len(futures(item)[0]) == 12


def test_a_model_without_a_chat_template_gets_the_bare_text(tmp_path):
    record = in_train({"messages": MESSAGES})
    [item] = harvest(lines(tmp_path / "c.jsonl", record), reading(tokenizer=BARE, future_tokens=700)).items
    assert decoded(item) + futures(item)[0] == "\n\n".join(turn["content"] for turn in MESSAGES)
    asked = in_train({"prompt": "Where does the river run?", "answer": "To the sea."})
    [item] = harvest(lines(tmp_path / "p.jsonl", asked), reading(tokenizer=BARE)).items
    assert decoded(item) == "Where does the river run?"


def test_prompts_of_no_use_are_passed_over_and_counted(tmp_path):
    records = [in_train({"prompt": text, "answer": "yes"}) for text in ("river" * 20, "river" * 200)]
    # bare, so that the turn adds nothing: as long as what is protected, and one more
    records += [in_train({"prompt": "x" * length, "answer": "yes"}) for length in (20, 21)]
    records += [in_train({"prompt": "river" * 20, "answer": ""})]
    found = harvest(lines(tmp_path / "mixed.jsonl", *records), reading(tokenizer=BARE))
    assert [item.num_tokens for item in found.items] == [100, 21]
    assert (found.too_short, found.too_long) == (2, 1)
    assert found.note.endswith("mixed.jsonl: 2 prompts; 2 were too short and 1 was too long")


def test_data_without_one_usable_prompt_are_refused(tmp_path):
    short = lines(tmp_path / "short.jsonl", in_train({"prompt": "short", "answer": "yes"}))
    with pytest.raises(ValueError, match=r"0 prompts; 1 was too short; a prompt needs 21 to"):
        harvest(short, reading(tokenizer=BARE))
    only = lines(tmp_path / "only.jsonl", in_train({"prompt": "river" * 20, "answer": "yes"}))
    with pytest.raises(ValueError, match="no prompts in the split 'test'"):
        harvest(only, reading(split="test"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", r"empty\.jsonl is empty"),
        ("broken.jsonl", '{"prompt": "x"\n', r"broken\.jsonl: line 1: Expecting"),
        ("list.jsonl", "[1]\n", r"line 1: expected a JSON object, found list"),
        (
            "other.jsonl",
            '{"content": "x"}\n',
            r"line 1: it has no messages, text or prompt or question or input, only content",
        ),
        ("bare.jsonl", "{}\n", r"only nothing"),
        ("roles.jsonl", '{"messages": [{"content": "x"}]}\n', r"a message needs a role and a content of text"),
        ("answer.jsonl", '{"prompt": "x", "answer": 3}\n', r"must be a text or a list of texts, got 3"),
        ("empty.txt", " \n", r"empty\.txt has no text"),
    ],
)
def test_unusable_files_are_named_with_the_line(tmp_path, name, content, message, monkeypatch):
    # every line counts
    monkeypatch.setattr("kvkeep.corpus.lines.split_of", lambda _: "train")
    (tmp_path / name).write_text(content)
    data = str(tmp_path / name) if name.endswith("jsonl") else f"text:{tmp_path / name}"
    with pytest.raises(ValueError, match=message):
        harvest(data, reading())


def test_a_template_that_refuses_a_conversation_names_its_line(tmp_path):
    strict = letter_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"c\.jsonl: line 1: roles must alternate"):
        harvest(lines(tmp_path / "c.jsonl", in_train({"messages": MESSAGES})), reading(tokenizer=strict))


def test_files_that_are_missing_or_no_text_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        harvest(str(tmp_path / "none.jsonl"), reading())
    with pytest.raises(ValueError, match=r"no text in \.txt files"):
        harvest(f"text:{tmp_path}", reading())
    (tmp_path / "scan.txt").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"scan\.txt is not UTF-8 text \(byte 3\)"):
        harvest(f"text:{tmp_path}", reading())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("chats", "cannot tell what data 'chats' is"),
        ("tasks:", "cannot tell"),
        ("tasks:vt", "must end in /inside or /after"),
        ("tasks:vt/before", "must end in /inside or /after"),
        ("tasks:vtt/inside", "unknown task 'vtt'; did you mean vt"),
        ("tasks:vt,/inside", "unknown task ''"),
    ],
)
def test_data_of_no_known_kind_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        harvest(data, reading())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "dev"}, "split 'dev' is not known"),
        ({"num_prompts": 0}, "must be at least 1, got 0"),
        ({"future_tokens": 0}, "must be at least 1"),
        ({"num_tokens": 20}, "a prompt of 20 tokens is protected as a whole; give a length of 21"),
        ({"futures": "0"}, "futures are data, greedy or how many"),
        ({"futures": "some"}, "got 'some'"),
    ],
)
def test_a_reading_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        reading(**settings)
