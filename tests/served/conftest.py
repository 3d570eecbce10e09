"""Tests inside vLLM, in an environment of their own (`make test-vllm`); elsewhere there are none."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
