"""Every example runs by itself and says something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in ROOT.glob("examples/*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_opens_with_a_sentence_and_stays_short(name):
    text = (ROOT / "examples" / name).read_text()
    assert text.startswith('"""')
    assert len(text.splitlines()) <= 40


# `make test` asks for them after the fast suite, and on one version of transformers
@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, tmp_path, embedded):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
