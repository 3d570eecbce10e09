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
        ({POLICY: "qevict(first_after=8)", BUDGET: "64"}, "first_after"),
        ({POLICY: "tiered(expected_attention)", BUDGET: "64"}, "rotation"),
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
    monkeypatch.setattr(sys.modules["kvkeep.cli.serve"], "find_spec", lambda name: None)
    code, said = run("smollm2")
    assert code == 2 and "pip install 'kvkeep[vllm]'" in said
    monkeypatch.setattr(sys.modules["kvkeep.cli.serve"], "find_spec", lambda name: name)
    code, said = run("smollm2", "--budget", "25%")
    assert code == 2 and "number of tokens" in said


def test_serve_starts_vllm_with_the_policy_and_hands_on_what_it_does_not_know(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    started = []
    monkeypatch.setattr(sys.modules["kvkeep.cli.serve"], "find_spec", lambda name: name)
    monkeypatch.setattr("os.execve", lambda *call: started.append(call))
    arguments = ["--policy", "snapkv(window=16)", "--budget", "64", "--port", "8123", "--max-model-len=4096"]
    assert run(str(tmp_path), *arguments)[0] == 0
    ((program, command, environment),) = started
    assert (program, command[:2]) == (sys.executable, [sys.executable, "-m"])
    names = ["--model", str(tmp_path), "--served-model-name", str(tmp_path)]
    assert command[3:] == [*names, "--port", "8123", "--max-model-len=4096"]
    assert Settings.read(environment) == Settings.parse("snapkv(window=16)", "64")


def test_vllm_finds_what_it_loads_where_the_package_says():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nkvkeep = "kvkeep.vllm_plugin:register"' in text
    assert '[project.entry-points."vllm.stat_logger_plugins"]\nkvkeep = "kvkeep.vllm_plugin.metrics:Metrics"' in text
