"""The command: what it prints where, what it refuses and how, and that help costs nothing."""

import inspect
import json
import re
import subprocess
import sys

import pytest
import torch
import typer.main
from folders import save_tiny
from typer.testing import CliRunner

import kvkeep
from kvkeep import POLICIES
from kvkeep.chat import prompt_ids
from kvkeep.cli import app
from kvkeep.cli.console import names, numbers

COMMANDS = ("generate", "eval", "bench", "trace", "replay", "report", "models", "demo")
TEXT = "The lighthouse keeper counts ships, and writes their names into a long book. " * 6
QUESTION = "What is counted?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny model with its tokenizer, as a transformers folder."""
    return save_tiny(tmp_path_factory.mktemp("model"))


def run(*arguments, stdin: str | None = None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def generate(folder, *arguments, **options):
    return run("generate", "--model", folder, "--max-new-tokens", 8, *arguments, **options)


def expected_answer(folder: str, document: str = TEXT, **options) -> str:
    model, tokenizer = kvkeep.load(folder)
    prompt = prompt_ids(tokenizer, document, QUESTION)
    output = kvkeep.generate(model, prompt, max_new_tokens=8, do_sample=False, **options)
    return tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


def test_help_needs_neither_torch_nor_transformers():
    program = """
import sys
from kvkeep.cli import main
sys.argv = ["kvkeep", "--help"]
try:
    main()
finally:
    print("heavy:", {"torch", "transformers", "matplotlib"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "heavy: set()" in done.stdout, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_shows_it_in_use(command):
    page = run(command, "--help").stdout
    assert len(re.findall(rf"kvkeep {command} ?", page)) >= 1 + page.count("Usage: ")
    assert "--json" in page


def test_help_lists_every_policy_but_the_oracle():
    command = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    [text] = [parameter.help for parameter in command.params if parameter.name == "policy"]
    assert set(re.findall(r"\w+", text.partition(":")[2].partition("(")[0])) - {"or"} == POLICIES.keys() - {"oracle"}


def test_the_answer_goes_to_stdout_and_its_cost_to_stderr_in_one_line(folder, tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(TEXT)
    done = generate(folder, "--policy", "tova", "--budget", 64, "--file", file, QUESTION)
    assert done.exit_code == 0
    assert done.stdout == expected_answer(folder, policy="tova", budget=64) + "\n"
    [line] = done.stderr.strip().splitlines()
    assert re.fullmatch(
        r"[\d,]+ tokens seen, 64 kept, \d+\.\d MiB against \d+\.\d MiB full, prompt \d+\.\d s, [\d,.]+ tokens/s", line
    )


def test_json_holds_the_answer_and_numbers_that_were_measured(folder):
    done = generate(folder, "-f", "-", "-b", "25%", "--json", QUESTION, stdin=TEXT)
    told = json.loads(done.stdout)
    tokenizer = kvkeep.load(folder).tokenizer
    seen = prompt_ids(tokenizer, TEXT, QUESTION).shape[1] + 7
    # three layers, two KV heads of 16, keys and values in fp32
    assert told["full_bytes"] == seen * 3 * 2 * 16 * 2 * 4
    assert told["seen"] == seen
    assert told["kept"] == pytest.approx(seen / 4, abs=1)
    assert told["cache_bytes"] < told["full_bytes"] / 2
    assert told["answer"] == expected_answer(folder, policy="snapkv", budget="25%")
    assert done.stderr == ""


def test_a_document_and_a_question_may_come_from_stdin(folder, tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(TEXT)
    from_file = generate(folder, "-f", file, QUESTION).stdout
    assert generate(folder, "-f", "-", QUESTION, stdin=TEXT).stdout == from_file
    assert generate(folder, "-f", file, "-", stdin=QUESTION).stdout == from_file


def test_chunks_reach_the_prefill(folder):
    arguments = ["-p", "streaming", "-b", 64, "-f", "-", QUESTION]
    # what a chunk evicts, the next one does not see: the answer is another one
    whole, chunked = (expected_answer(folder, policy="streaming", budget=64, chunk=chunk) for chunk in (None, 100))
    assert whole != chunked
    assert generate(folder, *arguments, stdin=TEXT).stdout == whole + "\n"
    assert generate(folder, *arguments, "--chunk", 100, stdin=TEXT).stdout == chunked + "\n"


def test_sinks_and_recent_reach_the_cache(folder):
    refused = generate(folder, "-b", 30, "--sinks", 10, "--recent", 21, QUESTION)
    assert refused.exit_code == 2
    assert "the smallest possible is 31" in refused.stderr


def test_sampling_repeats_with_its_seed_and_changes_with_another(folder):
    first, same, other = (generate(folder, "--temperature", 1.5, "--seed", seed, QUESTION).stdout for seed in (1, 1, 2))
    assert first == same != other


def test_show_report_adds_a_line_for_each_layer(folder):
    table = generate(folder, "-b", 64, "--show-report", "-f", "-", QUESTION, stdin=TEXT).stdout
    assert "keys + values MiB" in table
    assert len(re.findall(r"│\s+\d+ │", table)) >= 3


REFUSED = {
    "unknown policy": (["generate", "-p", "tovva", QUESTION], "did you mean tova?"),
    "impossible budget": (["generate", "-b", "3", QUESTION], "the smallest possible is 20"),
    "unreadable budget": (["generate", "-b", "many", QUESTION], "cannot read the budget"),
    "empty prompt": (["generate"], "the prompt is empty"),
    "stdin twice": (["generate", "-f", "-", "-"], "not both"),
    "missing file": (["generate", "-f", "no-such-file.txt", QUESTION], "no-such-file.txt: No such file"),
    "table in json": (["generate", "--json", "--show-report", QUESTION], "leave it out with --json"),
    "unknown model": (["generate", "-m", "smollm", QUESTION], "smollm2"),
    "missing rows": (["report", "no-rows.jsonl"], "no-rows.jsonl"),
    "unknown task": (["eval", "-m", "FOLDER", "-t", "vtt"], "vt"),
    "odd length": (["bench", "-m", "FOLDER", "-l", "long"], "whole numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_line_on_stderr_and_exit_code_2(case, folder):
    arguments, reason = REFUSED[case]
    done = run(*[folder if argument == "FOLDER" else argument for argument in arguments])
    assert done.exit_code == 2
    assert done.stdout == ""
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert reason in line


def test_debug_shows_where_an_error_came_from():
    done = run("--debug", "generate", "-b", "3", QUESTION)
    assert isinstance(done.exception, ValueError)


def test_a_file_that_is_no_text_is_refused_with_the_place(tmp_path):
    file = tmp_path / "scan.pdf"
    file.write_bytes(b"abc\xff\xfe")
    done = run("generate", "-f", file, QUESTION)
    assert done.exit_code == 2
    assert "not UTF-8 text (byte 3)" in done.stderr


def test_a_prompt_beyond_the_models_maximum_gets_exactly_one_warning(tmp_path):
    save_tiny(tmp_path, max_position_embeddings=256)
    arguments = ["generate", "-m", tmp_path, "-f", "-", "--max-new-tokens", "4", "--budget", "64", QUESTION]
    # a process of its own: what transformers says goes past sys.stderr
    program = [sys.executable, "-c", "from kvkeep.cli import main; main()", *arguments]
    done = subprocess.run(program, input=TEXT, capture_output=True, text=True, timeout=200)
    warned, cost = done.stderr.strip().splitlines()
    assert re.fullmatch(
        r"warning: prompt and answer may take \d+ tokens, more than the 256 this model knows; .*", warned
    )
    assert "tokens seen" in cost


def test_nan_falls_back_with_one_readable_warning(folder, tmp_path):
    model, tokenizer = kvkeep.load(folder)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0] = float("nan")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    done = generate(tmp_path, "-p", "knorm", "-b", 64, "-f", "-", QUESTION, stdin=TEXT)
    assert done.exit_code == 0
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warned) >= 1
    assert all("KNorm gave NaN in layer" in line and ".py" not in line for line in warned)


def test_models_lists_the_embedded_one_before_it_was_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    [info] = json.loads(run("models", "--json").stdout)
    assert (info["name"], info["path"]) == ("smollm2", None)
    assert "not fetched yet" in run("models").stdout


def test_eval_offers_every_setting_of_evaluate():
    from kvkeep.evaluate.run import evaluate

    command = typer.main.get_command(app).commands["eval"]  # type: ignore[attr-defined]
    offered = {option.lstrip("-").replace("-", "_") for parameter in command.params for option in parameter.opts}
    renamed = {"tasks": "task", "policies": "policy", "budgets": "budget", "model_name": "model"}
    renamed["num_samples"] = "samples"
    wanted = {renamed.get(name, name) for name in inspect.signature(evaluate).parameters}
    assert wanted - {"tokenizer", "progress", "command"} <= offered


def test_eval_writes_rows_and_goes_on_where_it_was(folder, tmp_path):
    arguments = ["eval", "-m", folder, "-t", "niah_single_1", "-p", "streaming,tova", "-b", "64", "-l", 700]
    arguments += ["--out", tmp_path, "--max-new-tokens", 4, "--question", "inside", "--question", "after", "--json"]
    first = run(*arguments, "-n", 1)
    assert first.exit_code == 0, first.output
    rows = [json.loads(line) for line in first.stdout.splitlines()]
    arms = {(row["policy"], row["question"], row["n"]) for row in rows}
    assert arms == {(policy, place, 1) for policy in ("full", "streaming", "tova") for place in ("inside", "after")}
    before = (tmp_path / "samples.jsonl").read_text()
    more = run(*arguments, "-n", 2)
    assert (tmp_path / "samples.jsonl").read_text().startswith(before)
    assert {json.loads(line)["n"] for line in more.stdout.splitlines()} == {2}


def test_report_turns_rows_into_a_page(tmp_path):
    from kvkeep.evaluate.rows import Row, write_rows

    write_rows(tmp_path / "rows.jsonl", [Row(value=1.0, n=3, policy=name, budget=name) for name in ("full", "10%")])
    done = run("report", tmp_path / "rows.jsonl", "--out", tmp_path / "page", "--json")
    page = json.loads(done.stdout)
    assert page["report"] == str(tmp_path / "page" / "report.html")
    assert (tmp_path / "page" / "report.html").read_text().lower().startswith("<!doctype html>")


def test_bench_prints_and_writes_the_same_rows(folder, tmp_path):
    file = tmp_path / "bench.jsonl"
    arguments = ["--length", 64, "--batch", "1,2", "--budget", "32", "--new-tokens", 2, "--repeats", 2]
    done = run("bench", "-m", folder, *arguments, "--out", file, "--json")
    assert done.exit_code == 0, done.output
    assert done.stdout == file.read_text()
    metrics = {(row["metric"], row["task"]) for row in map(json.loads, done.stdout.splitlines())}
    assert {("decode_ratio", "batch 1"), ("decode_ratio", "batch 2"), ("prefill_ratio", "batch 1")} <= metrics


def test_names_and_numbers_may_be_repeated_or_separated_by_commas():
    assert names(["a,b", "b", " c "]) == ["a", "b", "c"]
    assert numbers("--length", ["2_048,8000", "64"]) == [2048, 8000, 64]
