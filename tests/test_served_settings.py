"""What the environment asks of a server, and what is refused before one starts."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvkeep.cli import app
from kvkeep.vllm_plugin.settings import BUDGET, POLICY, Settings


def test_nothing_set_means_nothing_done():
    assert Settings.read({}) is None
    code = "import sys, os; os.environ.pop('KVKEEP_POLICY', None)\nfrom kvkeep.vllm_plugin import register\n"
    code += "register()\nassert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_survive_the_environment():
    settings = Settings.parse("snapkv(window=16)", "256", "2", "8")
    assert (settings.tokens, settings.budget.sinks, settings.budget.recent) == (256, 2, 8)
    assert Settings.read(settings.environment()) == settings


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({POLICY: "knorm"}, f"{BUDGET} is not"),
        ({BUDGET: "64"}, f"{POLICY} is not"),
        ({POLICY: "knorm", BUDGET: "25%"}, "number of tokens"),
        ({POLICY: "knorm", BUDGET: "64MiB"}, "number of tokens"),
        ({POLICY: "knorm", BUDGET: "full"}, "number of tokens"),
        ({POLICY: "knorm", BUDGET: "8"}, "smallest possible is 20"),
        ({POLICY: "knorm", BUDGET: "64", "KVKEEP_SINKS": "four"}, "KVKEEP_SINKS"),
        ({POLICY: "knrm", BUDGET: "64"}, "did you mean knorm"),
        ({POLICY: "qevict", BUDGET: "64"}, "codes"),
        ({POLICY: "lorekv", BUDGET: "64"}, "looks ahead"),
        ({POLICY: "oracle", BUDGET: "64"}, "future"),
        ({POLICY: "expected_attention", BUDGET: "64"}, "rotation"),
        ({POLICY: "pyramidkv", BUDGET: "64"}, "one size"),
    ],
)
def test_what_cannot_be_served_is_refused(environment, said):
    with pytest.raises(ValueError, match=said):
        Settings.read(environment)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["serve", *arguments])
    return done.exit_code, " ".join(done.output.split())


def test_serve_refuses_before_anything_starts(monkeypatch):
    assert run("smollm2", "--budget", "25%")[0] == 2
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    code, said = run("smollm2")
    assert code == 2 and "pip install 'kvkeep[vllm]'" in said


def test_serve_starts_vllm_with_the_policy_and_hands_on_what_it_does_not_know(monkeypatch, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said; env | grep KVKEEP_ | sort >> {tmp_path}/said\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    started = {}
    monkeypatch.setattr("os.execve", lambda *call: started.update(call=call))
    arguments = ["--policy", "snapkv(window=16)", "--budget", "64", "--port", "8123", "--max-model-len=4096"]
    assert run(str(model), *arguments)[0] == 0
    path, command, environment = started["call"]
    subprocess.run([path, *command[1:]], env=environment, check=True)
    said = (tmp_path / "said").read_text().splitlines()
    name = f"--served-model-name {model}"
    assert said[0] == f"serve {model} {name} --port 8123 --max-model-len=4096"
    assert said[1:] == ["KVKEEP_BUDGET=64", "KVKEEP_POLICY=snapkv(window=16)", "KVKEEP_RECENT=16", "KVKEEP_SINKS=4"]


def test_vllm_finds_what_it_loads_where_the_package_says():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nkvkeep = "kvkeep.vllm_plugin:register"' in text
    assert '[project.entry-points."vllm.stat_logger_plugins"]\nkvkeep = "kvkeep.vllm_plugin.metrics:Metrics"' in text
