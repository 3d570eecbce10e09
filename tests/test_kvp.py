"""KVP as a policy: what it ranks and when, for which model, and how its weights travel.

A agents, B sequences, H KV heads, N tokens, D head size.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import build_tiny
from named import policy_named
from test_saving import edit_header
from torch import Tensor

import kvkeep
from kvkeep import KVCache, saving
from kvkeep.fingerprint import fingerprint
from kvkeep.policies import KVP, make_policy
from kvkeep.policies.agents import AgentShape, make_agents
from kvkeep.policies.files import read_policy, write_policy
from kvkeep.policies.kvp import Ranking
from kvkeep.rotation import rotary_of, rotate

ARCHITECTURES = ("compact", "paper")
FASTER = {"rope_type": "default", "rope_theta": 5e5}


def tokens(length: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def untrained(model) -> KVP:
    return KVP.untrained(fingerprint(model.config))


def agents_and_tokens(architecture: str, A: int = 6, N: int = 30, dtype=torch.float32):
    """Agents, and the keys, values, positions and length that they score."""
    agents = make_agents(
        AgentShape(num_agents=A, key_size=8, value_size=6, architecture=architecture, hidden=16, num_positions=64)
    )
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(A, N, size, generator=generator).to(dtype) for size in (8, 6))
    return agents, (keys, values, torch.arange(N).expand(A, -1), torch.tensor(N))


# agents


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_agents_asked_for_some_rows_say_what_they_say_among_all(architecture):
    agents, (keys, values, positions, length) = agents_and_tokens(architecture)
    every, some = agents(keys, values, positions, length), slice(2, 4)
    assert torch.allclose(agents(keys[some], values[some], positions[some], length, rows=some), every[some], atol=1e-5)
    assert every.shape == (6, 30) and every.std() > 0.01


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_agent_reads_its_own_tokens_alone_and_in_any_order(architecture):
    agents, (keys, values, positions, length) = agents_and_tokens(architecture)
    every, order = agents(keys, values, positions, length), torch.randperm(30)
    moved = agents(keys[:, order], values[:, order], positions[:, order], length)
    assert torch.allclose(moved, every[:, order], atol=1e-5)
    keys = keys.clone()
    keys[3] += 1
    changed = (agents(keys, values, positions, length) - every).abs().amax(1) > 1e-6
    assert changed.tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_agents_of_several_sequences_say_what_they_say_of_each(architecture):
    agents, (keys, values, positions, length) = agents_and_tokens(architecture)
    batch = agents(
        *(torch.stack([array, array.flip(1)]) for array in (keys, values, positions)), torch.stack([length, length])
    )
    every = agents(keys, values, positions, length)
    assert torch.allclose(batch[0], every, atol=1e-5) and torch.allclose(batch[1], every.flip(1), atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_16_bit_keys_are_ranked_almost_as_in_fp32_with_scores_that_do_not_tie(monkeypatch, architecture, dtype):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    agents, (keys, values, positions, length) = agents_and_tokens(architecture, N=400, dtype=dtype)
    exact = agents(keys.float(), values.float(), positions, length)
    rounded = agents(keys, values, positions, length)
    assert rounded.dtype == torch.float32
    assert all(len(row.unique()) > 390 for row in rounded)
    correlation = [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(exact, rounded, strict=True)]
    assert min(correlation) > 0.995


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_16_bit_keys_are_multiplied_in_fp32_where_the_processor_has_no_16_bit_products(monkeypatch, architecture):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    agents, (keys, values, positions, length) = agents_and_tokens(architecture, dtype=torch.bfloat16)
    exact = agents(keys.float(), values.float(), positions, length)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert torch.equal(agents(keys, values, positions, length), exact)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not torch.equal(agents(keys, values, positions, length), exact)


def test_places_are_bounded_and_the_protected_end_counts_as_its_edge():
    agents, (keys, values, positions, length) = agents_and_tokens("compact")
    same = [array[:, :1].expand(-1, 30, -1) for array in (keys, values)]
    agents.first.data[:, :14] = 0
    agents.first.data[:, 14] = 0
    agents.first.data[:, 16] = 0
    scores = agents(*same, positions, length)
    # with p / n and the distance to the start switched off, what is nearer than 16 tokens looks alike
    assert torch.allclose(scores[:, 13:], scores[:, 13:14].expand(-1, 17), atol=1e-6)
    assert (scores[:, :13] - scores[:, 13:14]).abs().amin() > 1e-5
    far = torch.tensor([10**7])
    inputs = agents._inputs(keys[:, :1], values[:, :1], far.expand(6, -1), far[0] + 1, dtype=torch.float32)
    assert inputs[..., 14:].abs().max() < 1.2


@pytest.mark.parametrize("sight", (0, 12, 1024))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_are_read_as_the_next_query_sees_them(architecture, sight):
    frequencies = torch.tensor([1.0, 0.3, 0.01])
    shape = {"num_agents": 6, "key_size": 8, "value_size": 6, "architecture": architecture, "hidden": 16}
    turning = make_agents(AgentShape(**shape, turned=2 * len(frequencies), sight=sight), 0, frequencies)
    plain = make_agents(AgentShape(**shape), 0)
    _, (keys, values, positions, length) = agents_and_tokens(architecture)
    positions, length, rotary = positions + 1000, length + 1000, rotary_of(frequencies)
    # six of eight numbers of a key are turned
    cached = rotate(keys, *rotary(positions))
    seen = rotate(keys, *rotary(-(length - 1 - positions).clamp(max=sight)))
    expected = plain(seen, values, positions, length)
    assert torch.allclose(turning(cached, values, positions, length), expected, atol=1e-4)
    assert not torch.allclose(plain(cached, values, positions, length), expected, atol=1e-2)


def test_calibrated_inputs_are_centred_and_scaled():
    agents, (keys, values, positions, length) = agents_and_tokens("compact", N=500)
    keys = keys * 30 + 100
    agents.calibrate([(keys, values, positions, length)])
    inputs = agents._inputs(keys, values, positions, length, dtype=torch.float32)
    scaled = (inputs - agents.centre) / agents.spread
    assert scaled.mean(1).abs().max() < 1e-3
    assert (scaled.std(1) - 1).abs().max() < 1e-3
    # large biases of keys must not eat the bits of what differs
    low = agents(keys.bfloat16(), values.bfloat16(), positions, length)
    high = agents(keys.bfloat16().float(), values.bfloat16().float(), positions, length)
    assert torch.corrcoef(torch.stack([low.flatten(), high.flatten()]))[0, 1] > 0.999


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "large"}, "compact, paper"),
        ({"hidden": 0}, "hidden of the agents must be at least 1"),
        ({"glance": -1}, "got -1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        AgentShape(num_agents=1, key_size=2, value_size=2, **change)


# ranking


def test_a_bounded_conversation_is_ranked_after_each_prompt_and_every_16_tokens(tiny, monkeypatch):
    model, lengths = tiny("llama"), []
    score = Ranking.score

    def watched(self, layer, keys, values, positions, seen, received):
        lengths.extend(seen.tolist() if layer == 0 else [])
        return score(self, layer, keys, values, positions, seen, received)

    monkeypatch.setattr(Ranking, "score", watched)
    cache = KVCache(model, policy=untrained(model), budget=40)
    answer = kvkeep.generate(model, tokens(70), cache=cache, max_new_tokens=40, do_sample=False)
    assert lengths == [70, 80, 96]
    kvkeep.generate(model, torch.cat([answer, tokens(9)], 1), cache=cache, max_new_tokens=2, do_sample=False)
    assert lengths == [70, 80, 96, 119]


def test_agents_that_see_no_queries_need_no_attaching(tiny):
    model = tiny("llama")
    prompt, argument = tokens(60), kvkeep.cache_argument(model)
    options = {"max_new_tokens": 20, "do_sample": False}
    made = {glance: KVP.untrained(fingerprint(model.config), glance=glance) for glance in (0, 8)}
    caches = [KVCache(model, policy=made[0], budget=40) for _ in range(2)]
    alone = model.generate(prompt, **{argument: caches[0]}, **options)
    assert torch.equal(alone, kvkeep.generate(model, prompt, cache=caches[1], **options))
    assert not made[0].needs and made[0].side == ("kvp",) and made[8].side == ("kvp", "snapkv")
    with pytest.raises(RuntimeError, match=r"kvkeep\.attach\(model\)"):
        model.generate(prompt, **{argument: KVCache(model, policy=made[8], budget=40)}, **options)


def test_rows_of_a_batch_are_ranked_at_lengths_of_their_own(tiny, monkeypatch):
    model, seen_lengths = tiny("llama"), []
    score = Ranking.score

    def watched(self, layer, keys, values, positions, seen, received):
        seen_lengths.append(seen.tolist())
        return score(self, layer, keys, values, positions, seen, received)

    monkeypatch.setattr(Ranking, "score", watched)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :7] = 0
    cache = KVCache(model, policy=untrained(model), budget=40)
    kvkeep.generate(model, tokens(60, batch=2), cache=cache, attention_mask=mask, max_new_tokens=14, do_sample=False)
    assert seen_lengths[::3] == [[53, 60], [64], [64]]


def test_only_tokens_that_were_ranked_leave_under_the_usual_window(tiny):
    model = tiny("llama")
    cache = KVCache(model, policy=untrained(model), budget=40)
    kvkeep.generate(model, tokens(70), cache=cache, max_new_tokens=60, do_sample=False)
    for layer in cache.managed:
        unranked = layer.slots.side("kvp") == torch.finfo(torch.float32).max
        assert (layer.slots.positions[unranked] >= layer.seen - 16).all()
        assert unranked.sum() == 2 * (layer.seen % 16)


# which model


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 2}, "number of layers is 3; this model's is 2"),
        ("llama", {"num_key_value_heads": 4}, "number of KV heads is 2; this model's is 4"),
        ("llama", {"head_dim": 32}, "head size is 16; this model's is 32"),
        ("llama", {"rope_parameters": FASTER}, r"rotation is .*10000.*; this model's is .*500000"),
        ("qwen3", {}, "type is llama; this model's is qwen3"),
    ],
)
def test_weights_for_another_model_are_refused_naming_both_sides(tiny, family, changes, message):
    policy = untrained(tiny("llama"))
    with pytest.raises(ValueError, match=rf"policy kvp \(untrained\) was made with a model whose {message}"):
        KVCache(build_tiny(family, **changes), policy=policy, budget=40)


def test_a_model_that_knows_more_words_is_the_same_model(tiny):
    policy = untrained(tiny("llama"))
    assert KVCache(tiny("llama", vocab_size=144), policy=policy, budget=40).policy is policy


def test_agents_for_some_layers_alone_are_refused(tiny):
    model = tiny("llama")
    policy = KVP.untrained(fingerprint(model.config), layers=[0, 2])
    with pytest.raises(ValueError, match=r"weights for layers \[0, 2\], and the layers to manage are \[0, 1, 2\]"):
        KVCache(model, policy=policy, budget=40)


# files


def test_saved_weights_come_back_to_the_bit(tiny, tmp_path):
    policy = untrained(tiny("llama"))
    policy.save_pretrained(tmp_path)
    loaded = KVP.from_pretrained(tmp_path)
    assert loaded == policy and loaded.digest == policy.digest
    assert loaded.file.state == policy.file.state
    for name, tensor in policy.file.tensors.items():
        assert torch.equal(loaded.file.tensors[name], tensor)
        assert tensor.dtype == (torch.float32 if name in ("centre", "spread") else torch.bfloat16)
    words = json.loads((tmp_path / "policy.json").read_text())
    assert words["method"] == "kvp" and words["digest"] == policy.digest
    assert sorted(file.name for file in tmp_path.iterdir()) == ["policy.json", "policy.safetensors"]


def test_replaced_weights_are_read_anew(tiny, tmp_path):
    for seed in (0, 1):
        policy = KVP.untrained(fingerprint(tiny("llama").config), seed=seed)
        policy.save_pretrained(tmp_path)
        assert KVP.from_pretrained(tmp_path) == policy


def test_policies_of_equal_weights_are_equal_and_others_are_not(tiny):
    one, same, other = (KVP.untrained(fingerprint(tiny("llama").config), seed=seed) for seed in (0, 0, 1))
    assert one == same and hash(one) == hash(same) and one != other


def damaged(path: Path, how: str) -> None:
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    elif how == "edited":
        edit_header(path, lambda h: h.update(state=h["state"].replace('"head size": 16', '"head size": 64')))
    elif how == "newer":
        edit_header(path, lambda h: h.update(version="99"))
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("cut", ValueError, "truncated"),
        ("edited", ValueError, "changed after it was written"),
        ("newer", ValueError, "upgrade kvkeep"),
        ("gone", FileNotFoundError, "no policy in"),
    ],
)
def test_damaged_weights_are_refused(tiny, tmp_path, how, error, message):
    untrained(tiny("llama")).save_pretrained(tmp_path)
    damaged(tmp_path / "policy.safetensors", how)
    with pytest.raises(error, match=message):
        KVP.from_pretrained(tmp_path)


def test_weights_of_another_method_or_another_shape_are_refused(tiny, tmp_path):
    file = untrained(tiny("llama")).file
    write_policy(tmp_path / "other", replace(file, method="kvpop"))
    with pytest.raises(ValueError, match="a policy for 'kvpop', not for 'kvp'"):
        KVP.from_pretrained(tmp_path / "other")
    write_policy(tmp_path / "wide", replace(file, architecture={**file.architecture, "hidden": 32}))
    with pytest.raises(ValueError, match="not those of AgentShape"):
        KVP.from_pretrained(tmp_path / "wide")


def test_unknown_weights_are_refused_with_those_that_ship():
    with pytest.raises(ValueError, match=r"'smolm2' is no folder, no hub id .* did you mean smollm2"):
        KVP(weights="smolm2")


def test_fields_of_a_later_version_are_left_aside_and_missing_ones_have_defaults(tmp_path):
    saving.write(tmp_path / "policy.safetensors", "policy", 1, {"method": "kvp", "later": 1}, {"a": torch.zeros(2)})
    file = read_policy(tmp_path, "kvp")
    assert (file.layers, file.training, file.architecture) == ([], {}, {})


# saved caches


def test_a_saved_cache_names_its_weights_and_does_not_hold_them(tiny, tmp_path):
    model, policy = tiny("llama"), policy_named("kvp", tiny("llama"))
    cache = KVCache(model, policy=policy, budget=40)
    kvkeep.prefill(model, tokens(80), cache)
    cache.save(tmp_path / "cache")
    state, tensors = saving.read(tmp_path / "cache", "cache", 99)
    options = {"weights": policy.weights, "digest": policy.digest}
    assert state["policy"] == {"name": "KVP", "options": options}
    assert not {name.partition(".")[2] for name in tensors} & set(policy.file.tensors)
    assert KVCache.load(tmp_path / "cache", model).policy == policy


def test_a_cache_whose_weights_have_changed_or_are_gone_asks_for_the_policy(tiny, tmp_path):
    model, folder = tiny("llama"), tmp_path / "weights"
    policy = untrained(model)
    policy.save_pretrained(folder)
    cache = KVCache(model, policy=KVP.from_pretrained(folder), budget=40)
    kvkeep.prefill(model, tokens(80), cache)
    cache.save(tmp_path / "cache")
    KVP.untrained(fingerprint(model.config), seed=1).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"have changed.*pass it as policy="):
        KVCache.load(tmp_path / "cache", model)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(ValueError, match="pass it as policy="):
        KVCache.load(tmp_path / "cache", model)
    assert KVCache.load(tmp_path / "cache", model, policy=policy).get_seq_length() == 80


# the hub


def test_weights_come_from_the_hub_and_go_there(tiny, tmp_path, monkeypatch):
    import huggingface_hub

    policy, calls = untrained(tiny("llama")), []

    class Hub:
        def create_repo(self, repository, **options):
            calls.append(("create", repository, options))

        def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
            calls.append(("upload", repo_id, sorted(file.name for file in Path(folder_path).iterdir())))
            KVP.from_pretrained(folder_path).save_pretrained(tmp_path)
            return type("Done", (), {"commit_url": f"https://hub/{repo_id}/commit/1"})

    def download(repository, allow_patterns):
        if repository != "me/kvp":
            raise OSError(f"404: no {repository}\nand more")
        assert allow_patterns == ["policy.safetensors", "policy.json"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert policy.push_to_hub("me/kvp", private=True) == "https://hub/me/kvp/commit/1"
    assert calls == [
        ("create", "me/kvp", {"private": True, "exist_ok": True}),
        ("upload", "me/kvp", ["policy.json", "policy.safetensors"]),
    ]
    assert make_policy("kvp", weights="me/kvp") == policy
    with pytest.raises(ValueError, match=r"you/kvp could not be fetched from the hub: 404: no you/kvp$"):
        KVP.from_pretrained("you/kvp")


# what ships


@pytest.mark.parametrize(("name", "reads"), [("smollm2", {"queries"}), ("smollm2-no-queries", set())])
def test_the_shipped_weights_are_small_and_say_how_they_came_about(name, reads):
    policy = KVP.from_pretrained(name)
    assert policy.needs == reads
    folder = Path(kvkeep.__file__).parent / "weights/kvp" / name
    assert sum(file.stat().st_size for file in folder.parent.rglob("*.*")) <= 8_000_000
    assert {file.name for file in folder.iterdir()} == {"policy.json", "policy.safetensors"}
    assert policy.file.layers == list(range(30)) and policy.file.training
    # a command, but no place of one machine
    assert not re.search(r"(?<![\w.])/(?:work|root|home|tmp)/", json.dumps(policy.file.training))
    assert math.prod(policy.file.tensors["last"].shape) == 90 * policy.file.architecture["hidden"]


@pytest.mark.parametrize("name", ["smollm2", "smollm2-no-queries"])
def test_the_embedded_model_answers_with_the_shipped_weights(embedded, name):
    model, tokenizer = embedded
    text = "The lighthouse keeper counts ships and writes their names into a long book. " * 8
    prompt = tokenizer(text, return_tensors="pt").input_ids
    cache = KVCache(model, policy=KVP.from_pretrained(name), budget=64)
    kvkeep.generate(model, prompt, cache=cache, max_new_tokens=4, do_sample=False)
    assert cache.report().kept == 64
    held = [layer.slots.positions.sort(-1).values for layer in cache.managed]
    assert not all(torch.equal(held[0], other) for other in held[1:])
