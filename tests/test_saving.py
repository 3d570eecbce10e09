"""A saved cache is whole, checked and guarded; each way it can be wrong has an error of its own."""

import json
import struct

import pytest
import torch
from test_conformance import greedy, tokens

import kvkeep
from kvkeep import KVCache, saving


@pytest.fixture
def saved(tiny, tmp_path):
    model = tiny("llama")
    cache = KVCache(model, policy="tova", budget=40)
    kvkeep.prefill(model, tokens(80), cache)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    return model, path


def edit_header(path, change):
    """Rewrite the JSON state in the safetensors header, as a text editor might."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def test_a_saved_prompt_answers_many_questions(saved):
    model, path = saved
    for seed in (1, 2):
        question = torch.cat([tokens(80), tokens(10, seed=seed)], 1)
        fresh = KVCache(model, policy="tova", budget=40)
        kvkeep.prefill(model, tokens(80), fresh)
        expected = greedy(model, question, fresh, 8)
        assert torch.equal(greedy(model, question, KVCache.load(path, model), 8), expected)


def test_another_text_is_refused(saved):
    model, path = saved
    other = tokens(80)
    other[0, 7] += 1
    with pytest.raises(ValueError, match="token 7 differs"):
        KVCache.load(path, model, prefix=other)
    with pytest.raises(ValueError, match="token 7 differs"):
        greedy(model, torch.cat([other, tokens(5)], 1), KVCache.load(path, model))
    with pytest.raises(ValueError, match="has seen 80 tokens"):
        KVCache.load(path, model, prefix=tokens(30))


def test_another_model_is_refused(saved, tiny):
    _, path = saved
    with pytest.raises(ValueError, match="number of layers is 3; this model's is 2"):
        KVCache.load(path, tiny("llama", num_hidden_layers=2))
    with pytest.raises(ValueError, match="type is llama; this model's is qwen3"):
        KVCache.load(path, tiny("qwen3"))


def test_a_truncated_file_is_refused(saved):
    model, path = saved
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        KVCache.load(path, model)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="truncated"):
        KVCache.load(path, model)


def test_an_edited_header_is_refused(saved):
    model, path = saved
    edit_header(path, lambda header: header.update(state=header["state"].replace('"seen": 80', '"seen": 79')))
    with pytest.raises(ValueError, match="changed after it was written"):
        KVCache.load(path, model)


def test_a_newer_format_is_refused(saved):
    model, path = saved
    edit_header(path, lambda header: header.update(version="99"))
    with pytest.raises(ValueError, match="upgrade kvkeep"):
        KVCache.load(path, model)


def test_a_missing_file_and_another_kind_of_file_are_named(saved, tmp_path):
    model, _ = saved
    with pytest.raises(FileNotFoundError, match="no saved cache"):
        KVCache.load(tmp_path / "none", model)
    saving.write(tmp_path / "other", "policy", 1, {}, {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="no saved kvkeep cache"):
        KVCache.load(tmp_path / "other", model)


def test_others_may_read_a_file_as_the_users_mask_says(saved):
    _, path = saved
    plain = path.with_name("plain")
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(saved, monkeypatch):
    model, path = saved
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(saving.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        KVCache.load(path, model).save(path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_a_policy_of_your_own_is_asked_for(saved, tiny, tmp_path):
    from dataclasses import dataclass

    from kvkeep.policies.baselines import Streaming

    @dataclass(frozen=True, kw_only=True)
    class Mine(Streaming):
        pass

    model = tiny("llama")
    cache = KVCache(model, policy=Mine(), budget=40)
    kvkeep.prefill(model, tokens(60), cache)
    cache.save(tmp_path / "mine")
    with pytest.raises(ValueError, match="pass it as policy="):
        KVCache.load(tmp_path / "mine", model)
    assert KVCache.load(tmp_path / "mine", model, policy=Mine()).get_seq_length() == 60


def test_generate_remembers_the_conversation_and_refuses_another(tiny):
    model, prompt = tiny("llama"), tokens(60)
    cache = KVCache(model, policy="tova", budget=40)
    answer = kvkeep.generate(model, prompt, cache=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(cache.token_ids, answer[:, :65])
    kvkeep.generate(model, torch.cat([answer, tokens(9)], 1), cache=cache, max_new_tokens=3, do_sample=False)
    with pytest.raises(ValueError, match="token 0 differs"):
        kvkeep.generate(model, torch.cat([prompt + 1, tokens(60)], 1) % 128, cache=cache, max_new_tokens=3)
