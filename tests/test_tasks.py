"""The thirteen task structures: what they hold, how long they are, and what the splits never share."""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.evaluate.tasks import SPLITS, TASKS, Fact, Sample, chapter, demo_document, generate, score, seed_of
from kvkeep.evaluate.tasks.demo import plant
from kvkeep.evaluate.tasks.draw import Draw
from kvkeep.evaluate.tasks.recipe import Recipe, Setting
from kvkeep.evaluate.tasks.wording import OWN, Wording
from kvkeep.evaluate.tasks.words import FrequentCodes

NAMES = list(TASKS)
NEEDLES = [name for name in NAMES if name.startswith("niah")]
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
DATA = os.environ.get("KVKEEP_DATA")
# whom or what a document about a town, a person or a company is about
SUBJECT = re.compile(r"(?:The company )?(.*?)(?: is a small town|, \w+ by trade| makes )")
with_data = pytest.mark.skipif(DATA is None, reason="KVKEEP_DATA does not point to the evaluation data")


def count(text: str) -> int:
    """About what a tokenizer counts."""
    return len(text.split()) * 4 // 3


def make(task: str, num_tokens: int = 600, **options: object) -> Sample:
    return generate(task, num_tokens=num_tokens, count_tokens=count, **options)  # type: ignore[arg-type]


def text_of(sample: Sample) -> str:
    return sample.prompt + sample.answer_prefix


def recipe(task: str, index: int) -> Recipe:
    """The task without its length."""
    seed = seed_of("test", task, index)
    return TASKS[task](Setting(split="test", index=index, seed=seed, num_tokens=1000, wording=Wording.read(None)))


tasks = st.sampled_from(NAMES)
splits = st.sampled_from(SPLITS)
indices = st.integers(0, 10_000)


# length


# a little less than the longest sentence or document, and an entry on each side of the scale for words
LARGEST_UNIT = {"qa_1": 120, "qa_2": 120, "cwe": 12, "fwe": 8}


@settings(max_examples=40, deadline=None)
@given(task=tasks, split=splits, index=indices, num_tokens=st.integers(600, 2000))
def test_a_prompt_fills_its_length_without_exceeding_it(task: str, split: str, index: int, num_tokens: int) -> None:
    sample = make(task, num_tokens, split=split, index=index)
    assert sample.num_tokens == count(text_of(sample))
    assert num_tokens - LARGEST_UNIT.get(task, 81) <= sample.num_tokens <= num_tokens


@pytest.mark.parametrize("task", ["niah_single_2", "cwe"])
def test_lengths_beyond_the_bundled_text_are_filled_too(task: str) -> None:
    # common words come in steps here: all of them once more for each round through the word list
    assert 120_000 * 0.95 <= make(task, 120_000).num_tokens <= 120_000


@pytest.mark.parametrize("task", NAMES)
def test_a_length_that_is_too_small_names_the_smallest_that_works(task: str) -> None:
    with pytest.raises(ValueError, match=rf"{task}.*num_tokens=3.*at least \d+") as caught:
        make(task, 3)
    smallest = int(str(caught.value).rsplit(" ", 1)[1])
    assert make(task, smallest).num_tokens == smallest
    with pytest.raises(ValueError, match=f"at least {smallest}"):
        make(task, smallest - 1)


def test_a_counter_that_does_not_grow_is_refused() -> None:
    with pytest.raises(ValueError, match="every piece must count"):
        generate("niah_single_1", num_tokens=100, count_tokens=lambda text: 7)


@pytest.mark.parametrize("task", NAMES)
def test_filling_a_length_counts_few_texts(task: str) -> None:
    counter = Mock(side_effect=count)
    generate(task, num_tokens=4096, count_tokens=counter)
    assert counter.call_count <= 25


@pytest.mark.parametrize("task", NAMES)
def test_four_thousand_tokens_take_less_than_a_second(task: str) -> None:
    make(task, 500)
    began = time.process_time()
    make(task, 4096)
    assert time.process_time() - began < 1


# seeds and splits


@settings(max_examples=20, deadline=None)
@given(task=tasks, split=splits, index=indices)
def test_the_same_sample_comes_out_again(task: str, split: str, index: int) -> None:
    assert make(task, split=split, index=index) == make(task, split=split, index=index)


def test_different_samples_have_different_seeds() -> None:
    samples = list(product(SPLITS, NAMES, range(50)))
    assert len({seed_of(*sample) for sample in samples}) == len(samples)


@pytest.mark.parametrize(
    "kind",
    [
        lambda draw: draw.number(5),
        lambda draw: draw.number(7),
        lambda draw: draw.uuid(),
        lambda draw: draw.code(3),
        lambda draw: draw.code(3, upper=True),
        lambda draw: draw.random.choice(draw.own(range(100))),
    ],
    ids=["short number", "number", "uuid", "code", "name", "word"],
)
def test_even_with_one_seed_splits_draw_different_things(kind: Callable[[Draw], str]) -> None:
    train, validation, test = ({kind(Draw(split, seed)) for seed in range(300)} for split in SPLITS)
    assert not (train & validation or train & test or validation & test)


@given(digits=st.integers(2, 12), split=splits, seed=indices)
def test_numbers_have_their_digits(digits: int, split: str, seed: int) -> None:
    assert re.fullmatch(rf"[1-9]\d{{{digits - 1}}}", Draw(split, seed).number(digits))


@settings(max_examples=25, deadline=None)
@given(task=tasks, one=indices, other=indices, pair=st.sampled_from([(0, 1), (0, 2), (1, 2)]))
def test_splits_share_no_answer_whatever_the_index(task: str, one: int, other: int, pair: tuple[int, int]) -> None:
    first, second = (make(task, split=SPLITS[at], index=index) for at, index in zip(pair, (one, other), strict=True))
    if task.startswith("qa"):
        # years come up anywhere; the question names what only one split has
        assert first.question != second.question
    else:
        assert not set(first.answers) & set(second.answers)


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multiquery"])
def test_splits_read_different_prose(task: str) -> None:
    def sentences(split: str) -> set[str]:
        texts = [make(task, 3000, split=split, index=index).context for index in range(4)]
        return {part for text in texts for part in re.split(r"(?<=[.!?]) ", text) if len(part) > 60}

    train, validation, test = (sentences(split) for split in SPLITS)
    # all have the instruction
    assert max(len(train & validation), len(train & test), len(validation & test)) <= 1
    assert min(len(train), len(validation), len(test)) > 50


def test_keys_of_needles_belong_to_one_split() -> None:
    def adjectives(split: str) -> set[str]:
        contexts = [make("niah_multikey_2", split=split, index=index).context for index in range(8)]
        return {key for context in contexts for key in re.findall(r"entry for (\w+)-", context)}

    train, validation, test = (adjectives(split) for split in SPLITS)
    assert not (train & validation or train & test or validation & test)


# what each task holds


@settings(max_examples=25, deadline=None)
@given(task=st.sampled_from(NEEDLES), index=indices)
def test_every_needle_answer_stands_once_in_the_context_and_not_in_the_question(task: str, index: int) -> None:
    sample = make(task, index=index)
    assert [sample.context.count(answer) for answer in sample.answers] == [1] * len(sample.answers)
    assert not any(answer in sample.question + sample.answer_prefix for answer in sample.answers)
    assert all(re.search(rf"the entry for \S+ is {answer}\.", sample.context) for answer in sample.answers)


@pytest.mark.parametrize(
    ("task", "answers", "needles", "pattern"),
    [
        ("niah_single_1", 1, 1, r"\d{7}"),
        ("niah_single_2", 1, 1, r"\d{7}"),
        ("niah_single_3", 1, 1, UUID.pattern),
        ("niah_multikey_1", 1, 4, r"\d{7}"),
        ("niah_multikey_2", 1, None, r"\d{7}"),
        ("niah_multikey_3", 1, None, UUID.pattern),
        ("niah_multivalue", 4, 4, r"\d{7}"),
        ("niah_multiquery", 4, 4, r"\d{7}"),
    ],
)
def test_needle_tasks_have_the_counts_of_their_structure(
    task: str, answers: int, needles: int | None, pattern: str
) -> None:
    sample = make(task)
    found = re.findall(r"the entry for (\S+) is", sample.context)
    assert len(sample.answers) == answers
    assert all(re.fullmatch(pattern, answer) for answer in sample.answers)
    assert len(found) > 15 if needles is None else len(found) == needles
    assert len(set(found)) == {"niah_multivalue": 1}.get(task, len(set(found)))
    asked = {key for key in found if key in sample.question}
    assert len(asked) == (4 if task == "niah_multiquery" else 1)


@pytest.mark.parametrize("index", range(6))
def test_no_other_line_has_the_key_that_is_asked_for(index: int) -> None:
    draft = recipe("niah_multikey_2", index).build(2000)
    key = re.search(r"entered for (\S+)", draft.question).group(1)  # type: ignore[union-attr]
    assert draft.context.count(f"for {key} is") == 1


def test_one_answer_is_asked_for_in_the_singular() -> None:
    assert "What is the ledger number entered" in make("niah_single_1").question
    assert "What are all the ledger numbers entered" in make("niah_multivalue").question


def test_needles_are_spread_over_the_whole_text() -> None:
    samples = [make("niah_single_1", 600, index=index) for index in range(100)]
    depths = sorted(sample.context.index(sample.answers[0]) / len(sample.context) for sample in samples)
    assert depths[4] < 0.3 and 0.4 < depths[50] < 0.75 and depths[-4] > 0.9


@settings(max_examples=20, deadline=None)
@given(index=indices, num_tokens=st.sampled_from([600, 1500]))
def test_tracked_variables_are_those_that_reach_the_value(index: int, num_tokens: int) -> None:
    sample = make("vt", num_tokens, index=index)
    value = re.search(r"\d{5}", sample.question).group()  # type: ignore[union-attr]
    holds: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", sample.context):
        holds[name] = holds.get(source, source)
    assert {name for name, held in holds.items() if held == value} == set(sample.answers)
    assert len(sample.answers) == 5


@pytest.mark.parametrize(("num_tokens", "often", "seldom"), [(1000, 6, 1), (2000, 6, 1), (4096, 30, 3)])
def test_common_words_are_the_ten_that_come_up_most(num_tokens: int, often: int, seldom: int) -> None:
    sample = make("cwe", num_tokens)
    # the list of the task follows that of the example
    entries = re.findall(r"(\d+)\. (\S+)", sample.context)
    start = max(at for at, (number, _) in enumerate(entries) if number == "1")
    counts = Counter(word for _, word in entries[start:])
    assert {word for word, times in counts.items() if times == often} == set(sample.answers)
    assert {times for word, times in counts.items() if word not in sample.answers} == {seldom}


@settings(max_examples=20, deadline=None)
@given(index=indices, more=st.one_of(st.integers(0, 60), st.integers(0, 1000)))
def test_frequent_codes_are_the_three_that_come_up_most_besides_dots(index: int, more: int) -> None:
    draft = recipe("fwe", index).build(FrequentCodes.smallest + more)
    ranked = Counter(draft.context.partition("\n\n")[2].split()).most_common(5)
    assert ranked[0][0] == "..."
    assert [word for word, _ in ranked[1:4]] == list(draft.answers)
    assert ranked[3][1] > ranked[4][1]


@settings(max_examples=15, deadline=None)
@given(task=st.sampled_from(["qa_1", "qa_2"]), split=splits, index=indices)
def test_a_question_over_documents_is_answered_by_them(task: str, split: str, index: int) -> None:
    sample = make(task, split=split, index=index)
    documents = re.split(r"Document \d+:\n", sample.context)[1:]
    assert len(documents) > 5
    assert any(sample.answers[0] in document for document in documents)
    assert sample.answers[0] not in sample.question


def test_a_two_hop_question_names_one_document_and_that_names_the_one_with_the_answer() -> None:
    for index in range(30):
        sample = make("qa_2", index=index)
        question = sample.question.partition("Question: ")[2]
        names = set(re.findall(r"[A-Z]\w+", question)[1:]) - {"Museum", "Sons"}
        documents = re.split(r"\n*Document \d+:\n", sample.context)[1:]
        (first,) = (text for text in documents if names and all(name in text for name in names))
        assert sample.answers[0] not in first
        subjects = [SUBJECT.match(text) for text in documents if sample.answers[0] in text]
        assert any(subject and subject.group(1) in first for subject in subjects)


@pytest.mark.parametrize("task", NAMES)
def test_the_context_makes_sense_without_the_question(task: str) -> None:
    sample = make(task)
    assert sample.prompt == sample.context + sample.question
    assert sample.question.startswith("\n")
    # the instruction is the context's first paragraph
    assert 10 < len(sample.context.partition("\n\n")[0].split()) < 60
    assert sample.max_new_tokens >= max(16, count(" ".join(sample.answers)))


@pytest.mark.parametrize("task", ["vt", "cwe"])
def test_an_answered_example_comes_first_where_there_is_room(task: str) -> None:
    short, long = make(task, 1000), make(task, 1100)
    assert "Answer:" not in short.context
    assert long.context.count("Answer:") == 1
    assert not any(answer in long.context.partition("Answer:")[0] for answer in long.answers) or task == "cwe"


# score


def test_score_is_the_share_of_answers_found_in_any_case() -> None:
    sample = make("niah_multivalue")
    one, two, *_ = sample.answers
    assert score(sample, f"{one}, then {two}") == 0.5
    assert score(sample, " ".join(sample.answers)) == 1
    assert score(sample, "none") == 0
    codes = make("fwe")
    assert score(codes, " ".join(codes.answers).upper()) == 1


def test_for_questions_over_documents_one_answer_is_enough() -> None:
    sample = Sample(**{**vars(make("qa_1")), "answers": ("Ada Belgrave", "Belgrave")})
    assert score(sample, "it was belgrave") == 1
    assert score(sample, "Ada") == 0


# files given by the user


def test_a_haystack_folder_replaces_the_bundled_text(tmp_path: Path) -> None:
    (tmp_path / "tale.txt").write_text("".join(f"Sentence {n} of the tale ends.\n" for n in range(90)))
    numbers = {}
    for split in SPLITS:
        context = make("niah_single_2", 700, split=split, haystack=tmp_path).context
        numbers[split] = {int(number) for number in re.findall(r"Sentence (\d+) of the tale ends\.", context)}
    assert numbers == {
        "train": set(range(30)),
        "validation": set(range(30, 60)),
        "test": set(range(60, 90)),
    }


def test_a_haystack_may_be_one_file_without_full_stops(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text(" ".join(f"word{n}" for n in range(5000)))
    numbers = [int(number) for number in re.findall(r"word(\d+)", make("niah_single_2", haystack=file).context)]
    assert len(numbers) > 350
    # no word is lost; after the last comes the first once more
    assert sum(after - before != 1 for before, after in pairwise(numbers)) <= 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no .txt file"),
        (b"", "too little text"),
        (b"One.", "too little text"),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_a_haystack_without_text_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        make("niah_single_2", split="train", haystack=tmp_path)


def test_a_haystack_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.txt file"):
        make("niah_single_2", haystack=tmp_path / "nowhere")


def templates_with(tmp_path: Path, **parts: object) -> Path:
    file = tmp_path / "templates.json"
    file.write_text(json.dumps({**json.loads(OWN.read_text()), **parts}))
    return file


def test_templates_replace_every_word_around_the_task(tmp_path: Path) -> None:
    part = {
        "template": "Find the {type_needle_v}.\n{context}\nWhat of {query}?",
        "answer_prefix": " It is",
        "tokens_to_generate": 9,
    }
    file = templates_with(tmp_path, niah=part, _needle="{key}: {value} ({type_needle_v})", _noise_haystack="Hm.")
    sample = make("niah_single_1", 60, templates=file)
    key = sample.question.removeprefix("\nWhat of ").removesuffix("?")
    lines = sample.context.split("\n")
    assert lines[0] == "Find the number."
    assert Counter(lines[1:])["Hm."] == len(lines) - 2
    assert f"{key}: {sample.answers[0]} (numbers)" in lines
    assert (sample.answer_prefix, sample.max_new_tokens) == (" It is", 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"niah": None}, "'niah'.*missing"),
        ({"niah": {"template": "{context}"}}, "needs .*answer_prefix"),
        ({"niah": {"template": "{context}", "answer_prefix": "", "tokens_to_generate": 0}}, "above 0"),
        ({"niah": {"template": "no", "answer_prefix": "", "tokens_to_generate": 5}}, "once.*0 times"),
        ({"niah": {"template": "{context}{quest}", "answer_prefix": "", "tokens_to_generate": 5}}, "'quest'.*query"),
        ({"niah": {"template": "{context}{", "answer_prefix": "", "tokens_to_generate": 5}}, "braces"),
        ({"_needle": "{key.__class__}"}, "_needle.*it may use"),
        ({"_noise_haystack": 4}, "_noise_haystack.*no text"),
    ],
)
def test_templates_that_cannot_be_filled_in_say_what_is_wrong(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make("niah_single_1", templates=templates_with(tmp_path, **change))


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff"])
def test_unreadable_templates_are_refused_with_their_path(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "mine.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.json.*leave templates out"):
        make("vt", templates=file)


def test_a_data_folder_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"qa/squad_paragraphs\.json"):
        make("qa_1", data=tmp_path)


def test_unknown_names_are_answered_with_the_near_ones() -> None:
    with pytest.raises(ValueError, match=r"'niah_singel_1'.*niah_single_1"):
        make("niah_singel_1")
    with pytest.raises(ValueError, match=r"'tset'.*test"):
        make("vt", split="tset")
    with pytest.raises(ValueError, match="index=-1"):
        make("vt", index=-1)


# the official form, where its data is at hand


def anonymous(text: str) -> str:
    return UUID.sub("<uuid>", text)


@with_data
def test_official_templates_give_the_official_prompt_but_for_the_random_uuids() -> None:
    folder = Path(DATA or "") / "ruler"
    with (folder / "niah_multikey_3_4k_reference.jsonl").open() as lines:
        official = json.loads(next(lines))
    sample = generate(
        "niah_multikey_3",
        num_tokens=official["input"].count("\n"),
        count_tokens=lambda text: text.count("\n"),
        templates=folder / "templates.json",
    )
    assert anonymous(text_of(sample)) == anonymous(official["input"])
    assert len(sample.answers) == len(official["outputs"])


@with_data
@pytest.mark.parametrize("task", NAMES)
def test_official_templates_and_data_serve_every_task(task: str) -> None:
    data = Path(DATA or "")
    for split in SPLITS:
        sample = make(task, 3000, split=split, index=5, templates=data / "ruler" / "templates.json", data=data)
        assert 2500 < sample.num_tokens <= 3000
        assert not re.search("ledger (number|uuid)|Rain taps|code word", sample.prompt)
        assert any(answer in sample.context for answer in sample.answers)
        documents = re.split(r"\n\nDocument \d+:\n", sample.context)[1:]
        assert len(set(documents)) == len(documents)


# the demo


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_tokens=st.integers(200, 4000))
def test_a_demo_document_holds_each_fact_once_and_its_answer_nowhere_else(seed: int, num_tokens: int) -> None:
    text, facts = demo_document(num_tokens, count, seed)
    assert count(text) <= num_tokens
    assert len(facts) == 6
    for fact in facts:
        assert text.count(fact.sentence) == 1
        assert text.lower().count(fact.answer.lower()) == 1
        assert fact.answer in fact.sentence and fact.answer not in fact.question


@given(st.lists(st.floats(0, 0.999), min_size=6, max_size=6))
def test_every_sixth_of_the_text_gets_one_of_six_facts(jitter: list[float]) -> None:
    facts = [Fact(question="", answer="", sentence=f"FACT{order}") for order in range(6)]
    words = plant(["word "] * 60, facts, jitter).split()
    sixths = [(words.index(fact.sentence) - order) // 10 for order, fact in enumerate(facts)]
    assert sixths == list(range(6))


def test_a_demo_document_fills_its_length() -> None:
    assert all(2900 < count(demo_document(3000, count, seed)[0]) <= 3000 for seed in range(8))


def test_a_demo_document_without_its_facts_is_the_chapter() -> None:
    text, facts = demo_document(2000, count, 3)
    for fact in facts:
        text = text.replace(fact.sentence, "")
    assert " ".join(chapter(2000, count, 3).split()).startswith(" ".join(text.split()))


def test_another_seed_gives_another_demo() -> None:
    assert len({demo_document(500, count, seed)[0] for seed in range(10)}) == 10


def test_a_demo_document_too_small_for_its_facts_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens=20 is too small"):
        demo_document(20, count, 0)
