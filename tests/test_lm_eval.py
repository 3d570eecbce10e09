"""lm-evaluation-harness through an evicting cache."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from folders import save_tiny
from torch.nn.functional import log_softmax

import kvkeep
from kvkeep import KVCache

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (pip install 'kvkeep[eval]')")

from kvkeep.evaluate import lm_eval_model
from kvkeep.evaluate.lm_eval_model import EvictingLM

QUOTE = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness."
DOCS = [
    {"text": f"{QUOTE} It is {number}. {QUOTE} What is it?", "choices": ["one", "twelve"], "right": right}
    for number, right in (("one", 0), ("twelve", 1), ("neither", 0))
]
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "tiny_writing": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[right]}}"
generation_kwargs: {max_gen_toks: 12, until: ["x"], do_sample: false}
metric_list:
  - metric: exact_match
""",
    "tiny_perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny fp32 model with its tokenizer, as a transformers folder."""
    return Path(save_tiny(tmp_path_factory.mktemp("tiny")))


def build(folder: Path, **options) -> EvictingLM:
    return EvictingLM(str(folder), dtype="float32", **options)


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> Path:
    """The tasks of TASKS over DOCS, as a folder for --include_path."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return write_tasks(tmp_path / "tasks", TASKS, DOCS)


def write_tasks(path: Path, tasks: dict[str, str], docs: list[dict]) -> Path:
    path.mkdir()
    (path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    files = json.dumps({"data_files": {"test": str(path / "docs.jsonl")}})
    for name, body in tasks.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {files}\ntest_split: test\n"
        (path / f"{name}.yaml").write_text(head + body)
    return path


def run(model, tasks: Path, names: list[str]) -> dict:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True)
    answers = {name: [sample["resps"] for sample in samples] for name, samples in results["samples"].items()}
    return {"scores": results["results"], "answers": answers}


def score(model: EvictingLM, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    return model.loglikelihood([SimpleNamespace(args=pair) for pair in pairs], disable_tqdm=True)


def test_a_full_budget_gives_the_harness_own_results(folder, tasks):
    from lm_eval.models.huggingface import HFLM

    lm = build(folder)
    ours = run(lm, tasks, list(TASKS))
    stock = run(HFLM(pretrained=lm.model, tokenizer=lm.tokenizer), tasks, list(TASKS))
    assert ours["answers"]["tiny_writing"] == stock["answers"]["tiny_writing"]
    assert ours["scores"]["tiny_choice"] == stock["scores"]["tiny_choice"]
    for task in ("tiny_choice", "tiny_perplexity"):
        assert numbers(ours["answers"][task]) == pytest.approx(numbers(stock["answers"][task]), abs=1e-3)


def numbers(answers: object) -> list[float]:
    if isinstance(answers, list | tuple):
        return [number for answer in answers for number in numbers(answer)]
    return [float(answers)]


def test_a_budget_changes_the_answers(folder, tasks):
    full, evicted = (run(build(folder, budget=budget), tasks, list(TASKS)) for budget in (None, 32))
    for task in TASKS:
        assert full["answers"][task] != evicted["answers"][task], task


@pytest.mark.parametrize("policy", ("streaming", "h2o", "snapkv"))
def test_a_continuation_is_scored_as_decoding_would_have_gone(folder, policy):
    lm = build(folder, policy=policy, budget=32, chunk=1)
    ids = torch.tensor([lm.tok_encode(QUOTE)])
    cache = KVCache(lm.model, policy=policy, budget=32)
    kvkeep.prefill(lm.model, ids[:, :-1], cache)
    written = kvkeep.generate(
        lm.model, ids, cache=cache, max_new_tokens=8, do_sample=False, output_scores=True, return_dict_in_generate=True
    )
    tokens = written.sequences[0, ids.shape[1] :].tolist()
    expected = sum(float(log_softmax(step[0], -1)[token]) for step, token in zip(written.scores, tokens, strict=True))
    (got,) = lm._loglikelihood_tokens([(None, ids[0].tolist(), tokens)], disable_tqdm=True)
    assert got == (pytest.approx(expected, abs=1e-4), True)


def test_even_the_first_new_token_comes_from_the_compressed_cache(folder):
    full, evicted = (score(build(folder, budget=budget), (QUOTE, "s")) for budget in (None, 32))
    assert full[0][0] != pytest.approx(evicted[0][0], abs=1e-3)


def test_continuations_share_one_compressed_prompt_and_do_not_meet(folder, monkeypatch):
    lm = build(folder, policy="tova", budget=32)
    apart = [score(lm, (QUOTE, word))[0] for word in (" yes", " no", " perhaps")]
    read = []
    monkeypatch.setattr(lm_eval_model, "prefill", lambda *args, **kwargs: read.append(kvkeep.prefill(*args, **kwargs)))
    together = score(lm, *((QUOTE, word) for word in (" yes", " no", " perhaps")))
    assert len(read) == 1
    assert together == [(pytest.approx(logprob, abs=1e-5), greedy) for logprob, greedy in apart]


def test_scores_come_back_in_the_order_of_the_requests(folder):
    lm = build(folder, policy="knorm", budget=32)
    pairs = [(QUOTE, " a"), (QUOTE[::-1], " b"), (QUOTE, " c"), (QUOTE[::-1], " d")]
    assert score(lm, *pairs) == [(pytest.approx(score(lm, pair)[0][0], abs=1e-5), False) for pair in pairs]


def test_batched_answers_are_those_given_one_at_a_time(folder):
    pairs = [(QUOTE[:length], {"until": ["x"], "max_gen_toks": 10}) for length in (110, 40, 75)]
    requests = [SimpleNamespace(args=pair) for pair in pairs]
    one, three = (build(folder, policy="snapkv", budget=32, batch_size=size) for size in (1, 3))
    assert three.generate_until(requests, disable_tqdm=True) == one.generate_until(requests, disable_tqdm=True)


def test_a_context_that_does_not_fit_is_cut_from_the_left(folder):
    # the last token of " yes" is only scored, so 40 tokens are 37 letters and three of these
    cut, whole = score(build(folder, max_length=40), (QUOTE, " yes")), score(build(folder), (QUOTE[-37:], " yes"))
    assert cut == [(pytest.approx(whole[0][0], abs=1e-5), False)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "snapkw"}, "did you mean snapkv"),
        ({"policy": "oracle", "budget": 32}, "kvkeep eval"),
        ({"policy": "snapkv", "windw": 8}, "unknown arguments windw"),
        ({"budget": 3}, "smallest possible is 20"),
        ({"chunk": 0}, "at least 1 token"),
        ({"policy": "snapkv", "window": 0}, "window must be positive"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_read(folder, options, message):
    with pytest.raises(ValueError, match=message):
        build(folder, **options)


def test_a_continuation_longer_than_the_model_is_refused(folder):
    with pytest.raises(ValueError, match="does not fit"):
        score(build(folder, max_length=5), (QUOTE, " perhaps"))


def test_the_harness_own_command_knows_the_model(folder, tasks, tmp_path, monkeypatch, capsys):
    arguments = f"pretrained={folder},dtype=float32,policy=snapkv,window=8,budget=25%"
    command = ["lm_eval", "--model", "kvkeep", "--model_args", arguments, "--tasks", "tiny_choice"]
    monkeypatch.setattr(sys, "argv", [*command, "--include_path", str(tasks), "--output_path", str(tmp_path / "out")])
    lm_eval_model.main()
    assert "tiny_choice" in capsys.readouterr().out
    (results,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(results.read_text())["config"]["model_args"]["budget"] == "25%"


def test_our_command_hands_everything_to_the_harness(monkeypatch):
    from typer.testing import CliRunner

    from kvkeep.cli import app

    given = []
    monkeypatch.setattr(lm_eval_model, "main", given.append)
    arguments = ["--model", "kvkeep", "--model_args", "pretrained=smollm2,budget=25%", "-L", "2", "--tasks", "boolq"]
    done = CliRunner().invoke(app, ["lm-eval", *arguments])
    assert (done.exception, given) == (None, [arguments])
    CliRunner().invoke(app, ["lm-eval", "--", "--help"])
    assert given[1] == ["--help"]


BOOLQ = """
output_type: multiple_choice
doc_to_text: "{{passage}}\\nQuestion: {{question}}?\\nAnswer:"
doc_to_target: answer
doc_to_choice: [" no", " yes"]
"""


def test_boolq_runs_from_a_local_file(embedded, tmp_path, monkeypatch):
    data = Path(os.environ.get("KVKEEP_DATA", "")) / "qa" / "boolq_validation.json"
    if "KVKEEP_DATA" not in os.environ or not data.is_file():
        pytest.skip("KVKEEP_DATA does not name a folder with qa/boolq_validation.json")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    docs = [{**doc, "answer": int(doc["answer"])} for doc in json.loads(data.read_text())[:4]]
    tasks = write_tasks(tmp_path / "tasks", {"local_boolq": BOOLQ}, docs)
    results = run(EvictingLM("smollm2", policy="snapkv", budget="50%"), tasks, ["local_boolq"])
    assert len(results["answers"]["local_boolq"]) == 4
    assert 0 <= results["scores"]["local_boolq"]["acc,none"] <= 1
