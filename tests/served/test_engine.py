"""vLLM with pages answers as vLLM alone while nothing is evicted, and as kvkeep under transformers where it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep.fingerprint import fingerprint
from kvkeep.policies import KVP, KVpop
from kvkeep.vllm_plugin.engine import Engine
from kvkeep.vllm_plugin.settings import Settings

SIZES = {"head_dim": 32, "hidden_size": 128, "vocab_size": 512}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 2**26,
}
NEW = 32
TWO_WORKERS: dict[str, Any] = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
LEARNED: dict[str, type[Any]] = {"kvp": KVP, "kvpop": KVpop}


def drawn(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 500, (length,), generator=generator).tolist() for length in lengths]


# as many prompts as an engine's steps may hold at once
PROMPTS = drawn(50, 120, 300, 200, 77, 1, 2, 64, 65, 90, 100, 130, 31, 32, 33, 150)
FEW = PROMPTS[:5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`folder("qwen2")`: a tiny model on disk."""
    root = tmp_path_factory.mktemp("models")

    def saved(family: str, **changes: Any) -> str:
        path = root / "-".join([family, *map(str, changes.values())])
        if not path.exists():
            build_tiny(family, **SIZES, **changes).save_pretrained(path)
        return str(path)

    return saved


def served(
    folder: str, settings: Settings | None, prompts: list[list[int]], new: int = NEW, **options: Any
) -> list[list[int]]:
    with Engine(folder, settings, **{**ENGINE, **options}) as engine:
        return engine.generate(prompts, new).tokens


def settings(policy: str, tokens: int) -> Settings:
    return Settings.parse(policy, str(tokens))


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def policy_of(name: str, folder: str, path: Path) -> str:
    """The policy, if learned with untrained weights for the model in `folder`."""
    ranking = name.removeprefix("tiered(").removesuffix(")")
    if ranking not in LEARNED:
        return name
    LEARNED[ranking].untrained(fingerprint(load(folder).config)).save_pretrained(path)
    return name.replace(ranking, f"{ranking}(weights='{path}')")


def alone_under_budget(folder: str, policy: str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """What kvkeep writes under transformers, one prompt at a time, within 48 tokens."""
    model, answers = load(folder), []
    for prompt in prompts:
        limits = {"policy": policy, "budget": 48, "max_new_tokens": NEW, "do_sample": False}
        whole = kvkeep.generate(model, torch.tensor([prompt]), **limits, **options)
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_budget_above_the_length_changes_no_token(folder, family):
    prompts = [*PROMPTS, *drawn(300, 20, 7, 250)]
    alone = served(folder(family), None, prompts, new=64)
    assert served(folder(family), settings("tova", 400), prompts, new=64) == alone


def test_nor_do_pieces_of_prompts_or_requests_that_wait(folder):
    alone = served(folder("llama"), None, PROMPTS)
    # pieces of prompts are read beside requests that decode; of five pages one is vLLM's own
    for options in ({"max_num_batched_tokens": 64}, {"num_gpu_blocks_override": 5}):
        with Engine(folder("llama"), settings("tova", 400), **{**ENGINE, **options}) as engine:
            assert engine.generate(PROMPTS, NEW).tokens == alone
            # all pages are free again: as many requests find room once more
            assert engine.generate(PROMPTS, NEW).tokens == alone
            assert engine.info["blocks"] == options.get("num_gpu_blocks_override", engine.info["blocks"])


@pytest.mark.parametrize("name", ["streaming", "keydiff", "h2o", "snapkv", "kvp", "kvpop", "qevict", "tiered(kvp)"])
def test_what_is_evicted_is_what_goes_under_transformers(folder, name, tmp_path):
    policy = policy_of(name, folder("llama"), tmp_path)
    assert served(folder("llama"), settings(policy, 48), PROMPTS) == alone_under_budget(
        folder("llama"), policy, PROMPTS
    )


def test_a_prompt_in_pieces_is_evicted_piece_by_piece(folder):
    # one request at a time, so that pieces are those of kvkeep.prefill(chunk=)
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 1}
    ours = served(folder("llama"), settings("snapkv", 48), FEW, **options)
    assert ours == alone_under_budget(folder("llama"), "snapkv", FEW, chunk=64)


@pytest.mark.parametrize(("name", "tokens"), [("snapkv", 400), ("snapkv", 48), ("kvpop", 48), ("tiered(kvp)", 48)])
def test_two_workers_share_the_heads(folder, name, tokens, tmp_path):
    policy = policy_of(name, folder("llama"), tmp_path)
    one = served(folder("llama"), settings(policy, tokens), FEW)
    assert served(folder("llama"), settings(policy, tokens), FEW, **TWO_WORKERS) == one


@pytest.mark.parametrize(
    ("family", "changes", "options", "said"),
    [
        ("gemma3", {}, {}, "sliding"),
        ("llama", {}, {"kv_cache_dtype": "fp8"}, "fp8"),
        ("llama", {}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative"),
        ("llama", {}, TWO_WORKERS, "tensor parallel"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(folder, family, changes, options, said, capfd):
    with pytest.raises(RuntimeError):
        served(folder(family, **changes), settings("random", 48), FEW, **options)
    captured = capfd.readouterr()
    assert any("kvkeep: " in line and said in line for line in (captured.out + captured.err).splitlines())
