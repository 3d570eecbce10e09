"""The OpenAI-compatible server under load: errors are errors, nothing leaks, and a killed engine starts again clean."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from folders import save_tiny

TOKENS, LONGEST = 48, 256
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Server:
    """`kvkeep serve` on a port of this machine."""

    def __init__(self, model: str, log: Path):
        self.address, self.model = f"http://127.0.0.1:{(port := free_port())}", model
        arguments = ["--policy", "snapkv", "--budget", str(TOKENS), "--port", str(port), "--host", "127.0.0.1"]
        arguments += ["--max-model-len", str(LONGEST), "--enforce-eager", "--dtype", "float32"]
        arguments += ["--kv-cache-memory-bytes", str(2**26), "--max-num-seqs", "16"]
        command = [sys.executable, "-m", "kvkeep", "serve", model, *arguments]
        self.log = log
        with log.open("wb") as said:
            environment = {**os.environ, **ENVIRONMENT}
            self.process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)

    def wait(self) -> None:
        for _ in range(240):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        raise AssertionError("the server does not answer: " + self.log.read_text()[-3000:])

    def get(self, path: str) -> tuple[int, str]:
        with urllib.request.urlopen(self.address + path, timeout=10) as answer:
            return answer.status, answer.read().decode()

    def post(self, body: bytes | dict[str, Any], timeout: float = 60) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + "/v1/completions", data, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, prompt: list[int], count: int = 8) -> list[str]:
        code, answer = self.post({"model": self.model, "prompt": prompt, "max_tokens": count, "temperature": 0})
        assert code == 200, answer
        return [choice["text"] for choice in answer["choices"]]

    def leave(self, prompt: list[int]) -> None:
        """Ask for a long answer, read a little of it and hang up."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 100, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            self.address + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.startswith(name + "{")]
        assert lines, f"no {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def engines(self) -> list[int]:
        """Processes of the server that compute."""
        listed = subprocess.run(["ps", "-eo", "pid,pgid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
        own = [(int(pid), args) for pid, group, args in rows if int(group) == os.getpgid(self.process.pid)]
        return [pid for pid, args in own if "EngineCore" in args or "VLLM::Engine" in args]

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(model: str, log: Path) -> Iterator[Server]:
    server = Server(model, log)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), head_dim=32, hidden_size=128)


def drawn(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(4, 90) for _ in range(length)]


def malformed(server: Server, rng: random.Random) -> tuple[bytes | dict[str, Any], int]:
    """A request that cannot be answered, and what the server must say."""
    return rng.choice(
        [
            (b"{not json", 400),
            ({"model": server.model}, 400),
            ({"model": server.model, "prompt": drawn(rng, LONGEST + 40)}, 400),
            ({"model": server.model, "prompt": drawn(rng, 9), "max_tokens": "many"}, 400),
            ({"model": server.model, "prompt": drawn(rng, 9), "temperature": -3}, 400),
            ({"model": "another", "prompt": drawn(rng, 9)}, 404),
        ]
    )


def one_request(server: Server, number: int) -> str:
    rng = random.Random(number)
    kind = rng.choices(["answer", "leave", "malformed"], [6, 2, 2])[0]
    if kind == "answer":
        assert len(server.complete(drawn(rng, rng.randrange(1, 200)), rng.randrange(1, 40))) == 1
    elif kind == "leave":
        server.leave(drawn(rng, rng.randrange(1, 150)))
    else:
        body, wanted = malformed(server, rng)
        code, answer = server.post(body)
        assert code == wanted and answer["error"]["message"], (body, code, answer)
    return kind


def test_two_hundred_requests_leave_nothing_behind(model, tmp_path):
    prompt = drawn(random.Random(7), 150)
    with serving(model, tmp_path / "log") as server:
        before = server.complete(prompt)
        seen = server.metric("kvkeep:tokens_seen_total")
        with ThreadPoolExecutor(24) as pool:
            kinds = list(pool.map(lambda number: one_request(server, number), range(200)))
        assert {kind: kinds.count(kind) > 20 for kind in set(kinds)} == dict.fromkeys(
            ("answer", "leave", "malformed"), True
        )
        for _ in range(100):
            if server.metric("vllm:num_requests_running") == 0 and server.metric("vllm:kv_cache_usage_perc") == 0:
                break
            time.sleep(0.1)
        # every page is free again, and what was there before is not seen by others
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        assert server.complete(prompt) == before
        counted = {name: server.metric(f"kvkeep:tokens_{name}_total") for name in ("seen", "kept", "evicted")}
        assert counted["seen"] > seen and counted["evicted"] > 0
        assert counted["seen"] == counted["kept"] + counted["evicted"]
        assert server.metric("kvkeep:request_bytes") > 0
        assert "prefix caching is off" in server.log.read_text()


def test_a_killed_engine_starts_again_clean(model, tmp_path):
    prompt = drawn(random.Random(7), 150)
    with serving(model, tmp_path / "first") as server:
        before = server.complete(prompt)
        (engine,) = server.engines()
        os.kill(engine, signal.SIGKILL)
        # the server sees that it has none left, and ends
        server.process.wait(timeout=60)
    with serving(model, tmp_path / "second") as server:
        assert server.complete(prompt) == before
        assert server.metric("vllm:kv_cache_usage_perc") == 0
