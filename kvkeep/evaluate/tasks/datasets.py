"""Questions over real documents: SQuAD paragraphs and HotpotQA articles in a data folder."""

import json
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from .draw import Draw
from .invented import Case

SQUAD = "qa/squad_paragraphs.json"
HOTPOT_TRAIN, HOTPOT_HARD = "qa/hotpotqa_train_100.json", "qa/hotpotqa_hard_100.jsonl"


class Collection(NamedTuple):
    """The cases of one split in a fixed random order, and all their documents."""

    cases: list[Case]
    documents: list[str]


def ask(draw: Draw, data: Path, num_hops: int, index: int, num_others: int) -> Case:
    """The `index`-th question of the draw's split, and `num_others` further documents: related ones, then any."""
    collection = _squad(data, draw.part) if num_hops == 1 else _hotpot(data, draw.part)
    case = collection.cases[index % len(collection.cases)]
    near = list(case.others)
    draw.random.shuffle(near)
    known = {*case.documents, *near}
    far = [document for document in collection.documents if document not in known]
    draw.random.shuffle(far)
    return case._replace(others=list(islice(cycle([*near, *far]), num_others)))


@lru_cache(maxsize=8)
def _squad(data: Path, part: int) -> Collection:
    """Every third article, with its other paragraphs as related documents."""
    articles = _read(data / SQUAD)["data"][part::3]
    cases = []
    for article in articles:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            others = [text for text in texts if text != paragraph["context"]]
            for asked in paragraph["qas"]:
                answers = list(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                cases.append(Case(asked["question"], answers, [paragraph["context"]], others))
    return _collected([case for case in cases if case.answers])


@lru_cache(maxsize=8)
def _hotpot(data: Path, part: int) -> Collection:
    """The hard questions for test; the others in turn for train and validation."""
    records = _read(data / HOTPOT_HARD) if part == 2 else _read(data / HOTPOT_TRAIN)[part::2]
    cases = []
    for record in records:
        gold = {title for title, _ in record["supporting_facts"]}
        documents = {title: f"{title}\n{''.join(sentences)}" for title, sentences in record["context"]}
        cases.append(
            Case(
                record["question"],
                [record["answer"]],
                [text for title, text in documents.items() if title in gold],
                [text for title, text in documents.items() if title not in gold],
            )
        )
    return _collected(cases)


def _collected(cases: list[Case]) -> Collection:
    Random(0).shuffle(cases)
    documents = dict.fromkeys(text for case in cases for text in [*case.documents, *case.others])
    return Collection(cases, list(documents))


def _read(path: Path) -> Any:
    """A JSON file, or one of JSON lines."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.split("\n") if line]
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read {path}: {error}; with data= the tasks qa_1 and qa_2 take {SQUAD}, {HOTPOT_TRAIN} and "
            f"{HOTPOT_HARD} in that folder, without it they ask about invented documents"
        ) from error
