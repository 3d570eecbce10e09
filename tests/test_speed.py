"""The bench on tiny models: what its rows say, against storages, hand-made times and plain loops."""

from statistics import median

import pytest
import torch
from transformers import DynamicCache

import kvkeep
from kvkeep.evaluate import speed
from kvkeep.evaluate.rows import Row
from kvkeep.evaluate.speed import STOCK, Arm, Measured, bench

METRICS = ["decode_ratio", "decode_tokens_per_s", "limit_share", "cache_bytes"]


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setattr(speed, "COPY_BYTES", 2**16)


def measure(model, **changes) -> list[Row]:
    options = {"model_name": "tiny", "lengths": [96], "budgets": ("50%", "full"), "new_tokens": 3, "repeats": 2}
    with torch.no_grad():
        return bench(model, **{**options, **changes})


def test_every_setting_gets_a_row_of_every_metric(tiny):
    rows = measure(tiny("llama"), lengths=[64, 96], batch_sizes=[1, 3])
    decoded = [(r.metric, r.length, r.task, r.policy, r.budget) for r in rows if r.metric != "prefill_ratio"]
    assert sorted(decoded) == sorted(
        (metric, length, task, *arm)
        for metric in METRICS
        for length in (64, 96)
        for task in ("batch 1", "batch 3")
        for arm in (("tova", "50%"), ("full", "full"))
    )
    read = [(r.length, r.task, r.policy) for r in rows if r.metric == "prefill_ratio"]
    assert read == [(length, "batch 1", policy) for length in (64, 96) for policy in ("tova", "full")]


def test_rows_say_where_they_come_from_and_how_often_they_were_measured(tiny):
    for row in measure(tiny("llama"), repeats=3, command="kvkeep bench"):
        assert (row.model, row.command, row.threads, row.dtype, row.device) == (
            "tiny",
            "kvkeep bench",
            1,
            "float32",
            "cpu",
        )
        assert row.commit and row.extra["batch_size"] == 1
        if row.metric == "cache_bytes":
            assert (row.n, row.interval) == (1, "none")
        else:
            assert (row.n, row.interval) == (3, "bootstrap")
            assert 0 < row.low <= row.value <= row.high


def test_several_policies_are_measured_beside_one_full_cache(tiny):
    rows = measure(tiny("llama"), policies=["tova", "qevict"], repeats=1, prefill=False)
    arms = [(row.policy, row.budget) for row in rows if row.metric == "decode_ratio"]
    assert arms == [("tova", "50%"), ("qevict", "50%"), ("full", "full")]


def test_the_quantized_cache_of_transformers_is_measured_too(tiny):
    pytest.importorskip("optimum.quanto")
    model = tiny("llama", head_dim=64)
    rows = measure(model, lengths=[300], beside=["QuantizedCache-2", "QuantizedCache-4"], batch_sizes=[2])
    two, four = (row for row in rows if row.metric == "cache_bytes" and row.policy.startswith("Quantized"))
    # 2 sequences, 3 layers, 2 heads, 300 tokens of 64 codes with a scale and a zero, keys and values; then 3 whole ones
    rest = 2 * 3 * 2 * 2 * (300 * 8 + 3 * 64 * 4)
    assert [row.value for row in (two, four)] == [rest + 2 * 3 * 2 * 2 * 300 * size for size in (16, 32)]
    assert two.full_bytes > 3 * two.value
    ratios = [row for row in rows if row.metric == "decode_ratio"]
    assert len(ratios) == 4 and all(row.value > 0 for row in ratios)


def test_one_round_gives_a_value_and_no_interval(tiny):
    assert {row.interval for row in measure(tiny("llama"), repeats=1)} == {"none"}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bytes_are_those_of_the_storages_of_caches_that_decoded_as_much(tiny, name):
    model, tokens = tiny(name), speed.random_tokens(tiny(name), 96)
    rows = {row.budget: row for row in measure(model, policies=["h2o"], batch_sizes=[2]) if row.metric == "cache_bytes"}
    stock = DynamicCache(config=model.config)
    ours = kvkeep.KVCache(model, policy="h2o", budget="50%")
    for cache, attached in ((stock, False), (ours, True)):
        _decode_plainly(model, cache, tokens.repeat(2, 1), 3, attached)
    report = ours.report()
    in_layers = [t.untyped_storage().nbytes() for layer in stock.layers for t in (layer.keys, layer.values)]
    assert rows["50%"].full_bytes == rows["full"].full_bytes == sum(in_layers)
    assert rows["50%"].value == rows["50%"].cache_bytes == report.bytes + report.unmanaged_bytes
    assert rows["50%"].kept == report.kept
    assert rows["full"].kept == 96 + 3


def _decode_plainly(model, cache, tokens, steps, attached) -> None:
    argument = {kvkeep.model.cache_argument(model): cache}
    attachment = kvkeep.attach(model) if attached else None
    with torch.no_grad():
        for _ in range(1 + steps):
            tokens = model(input_ids=tokens, **argument).logits[:, -1:].argmax(-1)
    if attachment is not None:
        attachment.detach()


def test_both_sides_decode_the_same_tokens_in_the_same_number_of_forwards(tiny):
    model, calls = tiny("qwen2"), []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((kwargs["input_ids"].tolist(), kwargs["position_ids"].tolist())),
        with_kwargs=True,
    )
    try:
        measure(model, prefill=False, repeats=1, budgets=["full"], batch_sizes=[2])
    finally:
        hook.remove()
    prompts = [call for call in calls if len(call[0][0]) == 96]
    assert len(prompts) == 2 and prompts[0] == prompts[1]
    stock, ours = calls[-6:-3], calls[-3:]
    assert stock == ours
    assert [positions for _, positions in ours] == [[[96], [96]], [[97], [97]], [[98], [98]]]


def test_prompts_survive_decoding_so_that_every_round_starts_alike(tiny):
    model, arm = tiny("llama"), Arm(policy="tova", budget="50%")
    with torch.inference_mode():
        prompt, _ = speed.read_prompt(model, arm, speed.random_tokens(model, 96))
        caches = [speed.decode(model, arm, prompt, 2, 5)[0] for _ in range(2)]
    assert prompt.cache.get_seq_length() == 96
    for first, second in zip(caches[0].managed, caches[1].managed, strict=True):
        assert first.seen == second.seen == 101
        assert torch.equal(first.slots.keys, second.slots.keys)


def test_the_model_is_as_before_and_so_are_the_threads(tiny):
    model, threads = tiny("llama"), torch.get_num_threads()
    measure(model, threads=2, prefill=False, repeats=1, lengths=[24], budgets=["full"])
    assert model.config._attn_implementation == "sdpa"
    assert torch.get_num_threads() == threads


def test_arms_take_turns_in_every_round(tiny):
    told = []
    measure(tiny("llama"), prefill=False, progress=lambda done, total, what: told.append((done, total, what)))
    assert [done for done, _, _ in told] == list(range(10))
    assert {total for _, total, _ in told} == {9}
    assert [what for _, _, what in told] == (
        ["reading 96 tokens"] * 3 + ["decoding after 96 tokens, batch 1"] * 6 + ["done"]
    )


def test_a_ratio_pairs_the_times_of_one_round():
    stock, ours = Measured([2.0, 40.0, 6.0]), Measured([1.0, 10.0, 3.0])
    # paired: 2, 4, 2; a ratio of medians would be 6 / 3 = 2, of means 16 / 4.67
    assert speed._ratios(stock, ours) == [2.0, 4.0, 2.0]


def test_tokens_per_second_and_the_limits_share_by_hand():
    # 300 bytes at 1,000 bytes/s need 0.3 s, and a step took 0.2 s: more than the copy reached
    shape = speed._Shape(batch_size=4, new_tokens=10, weight_bytes=200, bandwidth=1000.0)
    measured = Measured([2.0], read_bytes=100)
    assert shape.tokens_per_s(measured) == [20.0]
    assert shape.limit_shares(measured) == [pytest.approx(1.5)]


def test_the_interval_of_a_median_lies_within_the_values_and_widens_with_them():
    assert speed.median_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    low, high = speed.median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert 1.0 <= low < 3.0 < high <= 5.0
    # one slow round of nine hardly matters to a median
    low, high = speed.median_interval([1.0] * 8 + [100.0])
    assert (low, high) == (1.0, 1.0)


def test_a_step_reads_the_keys_and_values_in_use_and_no_spare_room(tiny):
    model = tiny("llama")
    with torch.inference_mode():
        full, _ = speed.read_prompt(model, Arm(policy="tova", budget="full"), speed.random_tokens(model, 96))
        stock, _ = speed.read_prompt(model, STOCK, speed.random_tokens(model, 96))
    # 3 layers, 2 heads, 96 tokens, 16 numbers of 4 bytes, keys and values
    assert speed.read_bytes(full.cache) == speed.read_bytes(stock.cache) == 3 * 2 * 96 * 16 * 4 * 2
    assert speed.held_bytes(full.cache) > speed.read_bytes(full.cache)


def test_weights_count_once_and_an_embedding_only_if_it_is_also_the_head(tiny):
    tied, untied = tiny("llama", tie_word_embeddings=True), tiny("llama", tie_word_embeddings=False)
    embedding = tied.get_input_embeddings().weight.nbytes
    total = sum(weight.nbytes for weight in untied.parameters())
    assert speed.weight_bytes(tied) == speed.weight_bytes(untied) == total - embedding


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": []}, "lengths"),
        ({"lengths": [0]}, "lengths"),
        ({"batch_sizes": [2, 0]}, "batch_sizes"),
        ({"new_tokens": 0}, "new_tokens"),
        ({"repeats": 0}, "repeats"),
        ({"threads": 0}, "threads"),
        ({"budgets": []}, "budgets"),
        ({"budgets": ["3"]}, "smallest possible"),
        ({"policies": ["tovva"]}, "tova"),
        ({"policies": ["tova", "oracle"]}, "future"),
        ({"policies": []}, "no policies"),
        ({"beside": ["QuantizedCache-3"]}, "choose from QuantizedCache-2, QuantizedCache-4"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(tiny, changes, words):
    with pytest.raises(ValueError, match=words):
        measure(tiny("llama"), **changes)


def test_a_model_on_other_attention_is_refused(tiny):
    with kvkeep.attach(tiny("llama")), pytest.raises(ValueError, match="sdpa"):
        measure(tiny("llama"))


def test_the_ratio_is_the_median_of_rounds_whatever_the_machine_does(tiny, monkeypatch):
    # a clock that gives each side its own pace: DynamicCache 3 s a step, the others 1 s
    clock = {"now": 0.0}
    model = tiny("llama")

    def tick(module, args, kwargs):
        clock["now"] += 1.0 if model.config._attn_implementation == "kvkeep" else 3.0

    hook = model.register_forward_pre_hook(tick, with_kwargs=True)
    monkeypatch.setattr(speed, "_now", lambda model: clock["now"])
    monkeypatch.setattr(speed, "copy_bandwidth", lambda model: 1e9)
    try:
        rows = measure(model)
    finally:
        hook.remove()
    by_metric = {metric: [row.value for row in rows if row.metric == metric] for metric in ("prefill_ratio", *METRICS)}
    assert by_metric["prefill_ratio"] == by_metric["decode_ratio"] == [3.0, 3.0]
    assert by_metric["decode_tokens_per_s"] == [1.0, 1.0]
    least = [row.extra["step_bytes"] / 1e9 for row in rows if row.metric == "limit_share"]
    assert by_metric["limit_share"] == pytest.approx(least)
    assert median(
        row.extra["dynamic_cache_tokens_per_s"] for row in rows if row.metric == "decode_ratio"
    ) == pytest.approx(1 / 3)
