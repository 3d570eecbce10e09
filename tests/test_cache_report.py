"""What a report says is what the storages hold, layer by layer, and it reads well."""

import pytest
import torch
from rich.console import Console
from torch import Tensor

import kvkeep
from kvkeep import KVCache
from kvkeep.cache_report import CacheReport, LayerReport

MIB = 2**20


def example(**changes) -> CacheReport:
    layers = [
        LayerReport(0, 4096, 1024, {"keys": 2 * MIB, "values": 2 * MIB, "positions": MIB // 4}),
        LayerReport(2, 4096, 512, {"keys": MIB, "values": MIB, "positions": MIB // 8, "snapkv": MIB // 8}),
    ]
    return CacheReport(**{"policy": "SnapKV", "budget": "25%", "layers": layers, **changes})


def words(report: CacheReport) -> list[str]:
    return str(report).split()


def test_totals_are_sums_over_layers_and_kept_is_their_mean():
    report = example()
    assert report.bytes == int(6.5 * MIB)
    assert report.bytes_by_array == {
        "keys": 3 * MIB,
        "values": 3 * MIB,
        "positions": 3 * MIB // 8,
        "snapkv": MIB // 8,
    }
    assert sum(report.bytes_by_array.values()) == report.bytes
    assert report.seen == 4096
    assert report.kept == 768
    assert report.layers[1].bytes == int(2.25 * MIB)


def test_the_title_names_policy_budget_tokens_and_bytes():
    assert "SnapKV, budget 25%: 768 of 4096 tokens, 6.50 MiB" in str(example())


def test_each_layer_is_a_line_with_its_numbers():
    lines = [line.replace("│", " ").split() for line in str(example()).splitlines()]
    assert ["0", "4096", "1024", "4.000", "0.250"] in lines
    assert ["2", "4096", "512", "2.000", "0.250"] in lines


def test_codes_and_scales_have_columns_of_their_own_where_there_are_any():
    arrays = {"keys": MIB, "values": MIB, "coded.keys": 3 * MIB, "coded.value_scale": MIB // 2, "coded.worth": MIB // 4}
    text = str(CacheReport("QEvict", "25%", [LayerReport(0, 4096, 100, arrays, 1200.0)]))
    assert "100 of 4096 tokens and 1200 as codes" in text
    for cells in (("as codes", "codes MiB", "scales MiB"), ("1200", "2.000", "3.000", "0.500", "0.250")):
        assert any(all(cell in line for cell in cells) for line in text.splitlines())
    assert "codes" not in str(example())


def test_layers_left_to_transformers_are_counted_apart_and_only_mentioned_if_there_are_any():
    assert "not managed: 1.50 MiB" in str(example(unmanaged_bytes=3 * MIB // 2))
    assert example(unmanaged_bytes=3 * MIB // 2).bytes == example().bytes
    assert "not managed" not in str(example())


def test_printing_is_plain_text_of_a_hundred_columns_and_rich_where_rich_prints():
    text = str(example(policy="ExpectedAttention", unmanaged_bytes=MIB))
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text and text == text.rstrip()
    console = Console(width=100, force_terminal=True)
    with console.capture() as capture:
        console.print(example())
    assert "\x1b[" in capture.get() and "SnapKV" in capture.get()


def storages(layer) -> dict[int, Tensor]:
    """Every tensor that a layer of a cache reaches, by the place of its storage."""
    found: dict[int, Tensor] = {}
    todo = [vars(layer.slots), layer.lengths]
    while todo:
        item = todo.pop()
        if isinstance(item, Tensor):
            found[item.untyped_storage().data_ptr()] = item
        elif isinstance(item, dict):
            todo.extend(item.values())
    return found


@pytest.mark.parametrize("budget", [None, 40, 0.3, "60KB"])
@pytest.mark.parametrize("policy", ["streaming", "snapkv", "expected_attention"])
def test_a_real_caches_report_equals_the_bytes_of_all_its_storages(tiny, policy, budget):
    model = tiny("llama")
    cache = KVCache(model, policy=policy, budget=budget)
    prompt = torch.randint(2, 128, (2, 90), generator=torch.Generator().manual_seed(0))
    for new in (prompt, prompt[:, :1], prompt[:, :7], prompt[:, :1]):
        kvkeep.prefill(model, new, cache)
        report = cache.report()
        for layer, line in zip(cache.managed, report.layers, strict=True):
            held = storages(layer)
            assert line.bytes == sum(array.untyped_storage().nbytes() for array in held.values())
            assert line.kept == int((layer.slots.positions >= 0).sum(-1).max())
        assert report.seen == cache.get_seq_length()
    name = type(cache.policy).__name__
    assert f"{name}, budget {cache.budget}: {report.kept:g} of 99 tokens" in str(report)


def test_a_fresh_caches_report_holds_nothing(tiny):
    report = KVCache(tiny("llama"), policy="h2o", budget=40).report()
    assert (report.bytes, report.seen, report.kept) == (0, 0, 0)
    assert "H2O, budget 40: 0 of 0 tokens, 0.00 MiB" in str(report)


def test_a_full_budget_costs_keys_values_and_positions_and_no_side_arrays(tiny):
    model = tiny("llama")
    cache = KVCache(model, policy="h2o")
    kvkeep.prefill(model, torch.randint(2, 128, (1, 90)), cache)
    assert set(cache.report().bytes_by_array) == {"keys", "values", "positions", "lengths"}
