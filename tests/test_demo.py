"""The demo measures what it shows: every answer is generated, the full cache is transformers' own."""

import json
from statistics import median

import pytest
import torch
from folders import save_tiny
from letters import letter_tokenizer
from transformers import DynamicCache
from typer.testing import CliRunner

import kvkeep
from kvkeep.chat import prompt_ids
from kvkeep.cli import app
from kvkeep.demo import ANSWER_TOKENS, ARMS, BRIEFLY, arms_for, ask, plant, rows_of, time_decoding
from kvkeep.evaluate.speed import STOCK, Arm, held_bytes
from kvkeep.evaluate.tasks import Fact

DOCUMENT = "The keeper counts the ships and writes them into a long book, night after night. " * 5
FACT = Fact(question="What is the password?", answer="saffron", sentence="The password is saffron.")
TWO = (Arm(policy="tova", budget="25%"), Arm(policy="knorm", budget="10%"))
# what a model without trained weights is asked under
SHOWN = [arm for arm in ARMS if "kvp" not in arm.policy]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer()


@pytest.fixture
def asked(tiny, tokenizer):
    return ask(tiny("llama"), tokenizer, DOCUMENT, FACT, arms=TWO, naming={"index": 3})


def greedy(model, tokenizer, cache) -> str:
    """The answer of transformers' own generate, through `cache`."""
    prompt = prompt_ids(tokenizer, DOCUMENT, f"{FACT.question} {BRIEFLY}")
    options = {kvkeep.cache_argument(model): cache, "max_new_tokens": ANSWER_TOKENS, "do_sample": False}
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True).strip()


def test_the_full_answer_is_that_of_plain_transformers(tiny, tokenizer, asked):
    full = asked.records[0]
    assert (full["policy"], full["budget"]) == ("full", "full")
    assert full["output"] == greedy(tiny("llama"), tokenizer, DynamicCache())


def test_every_other_answer_is_what_its_policy_gives_alone(tiny, tokenizer, asked):
    model = tiny("llama")
    for arm, record in zip(TWO, asked.records[1:], strict=True):
        with kvkeep.attach(model):
            alone = greedy(model, tokenizer, kvkeep.KVCache(model, policy=arm.policy, budget=arm.budget))
        assert (record["policy"], record["budget"], record["output"]) == (arm.policy, arm.budget, alone)


def test_sizes_are_those_of_the_caches_at_the_end_of_the_answer(asked, tokenizer):
    seen = prompt_ids(tokenizer, DOCUMENT, f"{FACT.question} {BRIEFLY}").shape[1] + ANSWER_TOKENS - 1
    full, *others = asked.records
    # three layers, two KV heads of 16, keys and values in fp32
    assert full["cache_bytes"] == full["full_bytes"] == seen * 3 * 2 * 16 * 2 * 4
    assert full["kept"] == seen
    for share, record, arm in zip((0.25, 0.1), others, TWO, strict=True):
        assert record["kept"] == pytest.approx(share * seen, abs=1)
        assert record["cache_bytes"] == held_bytes(asked.prompts[arm].cache) < full["cache_bytes"] / 2


def test_an_answer_is_right_when_it_contains_the_planted_one_in_any_case(tiny, tokenizer):
    def scores(answer: str) -> list[float]:
        fact = Fact(question=FACT.question, answer=answer, sentence="")
        asked = ask(tiny("llama"), tokenizer, DOCUMENT, fact, arms=TWO, naming={})
        return [record["score"] for record in asked.records]

    said = ask(tiny("llama"), tokenizer, DOCUMENT, FACT, arms=TWO, naming={}).records[0]["output"]
    assert scores(said[2:9].swapcase())[0] == 1
    assert scores("saffron") == [0, 0, 0]


def test_an_answer_ends_where_the_model_ends_it(tiny, tokenizer, asked, monkeypatch):
    model, said = tiny("llama"), asked.records[0]["output"]
    # the answer's own fourth token is declared the end
    monkeypatch.setattr(model.generation_config, "eos_token_id", tokenizer(said)["input_ids"][3])
    ended = ask(model, tokenizer, DOCUMENT, FACT, arms=TWO, naming={}).records[0]["output"]
    assert said.startswith(ended)
    assert len(ended) <= 3


def test_timing_takes_turns_and_leaves_the_caches_alone(tiny, asked):
    before = {arm: prompt.cache.get_seq_length() for arm, prompt in asked.prompts.items()}
    turns = []
    speeds = time_decoding(tiny("llama"), asked.prompts, rounds=3, steps=2, each_round=lambda: turns.append(len(turns)))
    assert list(speeds) == [STOCK, *TWO]
    assert all(len(found) == 3 and min(found) > 0 for found in speeds.values())
    assert turns == [0, 1, 2]
    assert {arm: prompt.cache.get_seq_length() for arm, prompt in asked.prompts.items()} == before


def test_rows_hold_shares_medians_and_ratios_of_neighbours():
    arm = TWO[0]
    records = [
        {**names, "score": score, "index": index, "prompt_tokens": 100 + index, "question": "inside", "task": "demo"}
        for names, scores in (({"policy": "full", "budget": "full"}, (1, 1)), (arm.names, (1, 0)))
        for index, score in enumerate(scores)
    ]
    speeds = {STOCK: [10.0, 20.0, 40.0], arm: [20.0, 30.0, 50.0]}
    rows = rows_of(records, speeds, {"model": "tiny"})
    values = {(row.policy, row.metric): row.value for row in rows}
    assert values == {
        ("full", "accuracy"): 1.0,
        ("tova", "accuracy"): 0.5,
        ("full", "tokens_per_s"): 20.0,
        ("tova", "tokens_per_s"): 30.0,
        ("full", "decode_ratio"): 1.0,
        # round by round 2, 1.5 and 1.25
        ("tova", "decode_ratio"): median([2, 1.5, 1.25]),
    }
    assert {(row.model, row.length) for row in rows} == {("tiny", 100)}


def test_the_command_answers_anew_shows_every_arm_and_writes_rows_samples_and_a_page(folder, tmp_path):
    stale = {"key": "of an earlier run", "score": 1.0, "policy": "full", "budget": "full", "index": 0, "seed": 1}
    (tmp_path / "samples.jsonl").write_text(json.dumps(stale) + "\n")
    options = ["--model", folder, "--length", "600", "--seed", "2", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, ["demo", *options])
    assert done.exit_code == 0, done.output
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    arms = {(record["policy"], record["budget"], record["index"], record["seed"]) for record in samples}
    assert arms == {(*arm.names.values(), index, 2) for arm in (STOCK, *SHOWN) for index in range(6)}
    assert done.stdout == (tmp_path / "rows.jsonl").read_text()
    assert len(done.stdout.splitlines()) == 3 * (1 + len(SHOWN))
    assert all(f" {arm.policy} " in done.stderr for arm in SHOWN)
    assert "</html>" in (tmp_path / "report.html").read_text().lower()


@pytest.mark.slow
def test_with_its_full_cache_the_embedded_model_finds_five_of_six_facts(embedded):
    document, facts = plant(embedded.tokenizer, 3000, 0)
    found = [ask(*embedded, document, fact, arms=TWO, naming={}).records[0]["score"] for fact in facts]
    assert sum(found) >= 5


def test_a_model_without_trained_weights_is_shown_the_other_policies(tiny, embedded):
    assert arms_for(embedded.model) == list(ARMS)
    assert arms_for(tiny("llama")) == SHOWN
