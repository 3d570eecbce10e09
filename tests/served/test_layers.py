"""Served pages decide as our own cache decides: the same tokens in every head, the same output."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from kvkeep.budget import Budget
from kvkeep.fingerprint import fingerprint
from kvkeep.frequencies import rotation_frequencies
from kvkeep.layer import KVLayer, Plan
from kvkeep.policies import KVP, KVpop, KVpopMLP, Policy, make_policy
from kvkeep.policies.tiered import Tiered
from kvkeep.rotation import rotary_of
from kvkeep.tiered_layer import TieredLayer
from kvkeep.vllm_plugin.layers import ServedLayer
from kvkeep.vllm_plugin.pages import Pages, PageShape
from kvkeep.vllm_plugin.steps import Steps

H, G, D = 2, 2, 32
TOKENS, LAYER, SCALE = 24, 1, D**-0.5
CONFIG = LlamaConfig(
    num_hidden_layers=3, num_attention_heads=H * G, num_key_value_heads=H, head_dim=D, hidden_size=H * G * D
)
BY_NAME = (
    "streaming",
    "random",
    "knorm",
    "keydiff",
    "lagkv(lag=8)",
    "tova",
    "h2o",
    "h2o(decay=.9)",
    "snapkv(window=8)",
)
LEARNED: dict[str, type[Any]] = {"kvp": KVP, "kvpop": KVpop, "kvpop_mlp": KVpopMLP}


def policy_of(name: str) -> Policy:
    ranking = name.removeprefix("tiered(").removesuffix(")")
    if name != ranking in LEARNED:
        return Tiered(of=policy_of(ranking))
    if name in LEARNED:
        return LEARNED[name].untrained(fingerprint(CONFIG))
    return make_policy(name)


class Served:
    """Requests on pages of one layer, and each of them alone in a KVLayer."""

    def __init__(
        self, name: str, dtype: torch.dtype = torch.float32, num_pages: int = 8, H: int = H, tokens: int = TOKENS
    ):
        self.heads = H
        policy, budget = policy_of(name), Budget(tokens=tokens, sinks=2, recent=4)
        plan = Plan(CONFIG, policy, budget, 3, rotary_of(rotation_frequencies(fingerprint(CONFIG))))
        self.shape = PageShape.of(policy, budget, heads=H, head_size=D, dtype=dtype)
        memory = torch.zeros(num_pages, H, self.shape.capacity, self.shape.slot_bytes, dtype=torch.int8)
        # what was there before is anything
        memory.random_(generator=torch.Generator().manual_seed(1))
        self.pages = Pages(memory, self.shape)
        self.layer = ServedLayer(plan, LAYER, self.pages)
        self.steps = Steps(policy, budget, self.shape, G)
        self.plan, self.dtype = plan, dtype
        self.alone: dict[int, KVLayer] = {}
        self.lengths: dict[int, int] = {}
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, heads: int, count: int) -> Tensor:
        return torch.randn(count, heads, D, generator=self.generator).to(self.dtype) * 2

    def start(self, page: int) -> None:
        kind = KVLayer if self.plan.policy.tiers is None else TieredLayer
        self.alone[page], self.lengths[page] = kind(self.plan, LAYER, 0), 0

    def step(self, counts: dict[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
        """So many new tokens for the request on each page: the served output, and that of the request alone."""
        new = [
            (self.draw(self.heads * G, n), self.draw(self.heads, n), self.draw(self.heads, n)) for n in counts.values()
        ]
        starts = torch.tensor([0, *counts.values()]).cumsum(0).int()
        for page, count in counts.items():
            self.lengths[page] += count
        lengths = torch.tensor([self.lengths[page] for page in counts], dtype=torch.int32)
        step = self.steps.step(starts, lengths, torch.tensor(list(counts)))
        queries, keys, values = (torch.cat(arrays) for arrays in zip(*new, strict=True))
        output = torch.full_like(queries, torch.nan)
        self.layer.attend(queries, keys, values, SCALE, step, output)
        for (page, count), (q, k, v), served in zip(
            counts.items(), new, output.split(list(counts.values())), strict=True
        ):
            q, k, v = (array.transpose(0, 1)[None] for array in (q, k, v))
            yield served, self.alone[page].attend(q, k, v, None, SCALE)[0].transpose(0, 1)
            assert served.shape[0] == count

    def follow(self, program: Iterable[dict[int, int]], tolerance: float = 1e-4) -> None:
        """Step by step the output is that of each request alone, and so is what every head keeps."""
        for counts in program:
            for ours, alone in self.step(counts):
                torch.testing.assert_close(ours, alone, rtol=tolerance, atol=tolerance)
            for page in counts:
                assert self.kept(page) == self.kept_alone(page)

    def kept(self, page: int) -> list[set[int]]:
        return [set(head.tolist()) - {-1} for head in self.pages.prompt(page).positions[0]]

    def kept_alone(self, page: int) -> list[set[int]]:
        slots = self.alone[page].slots
        assert slots is not None
        return [set(head.tolist()) - {-1} for head in slots.positions[0]]


@pytest.mark.parametrize("name", [*BY_NAME, *LEARNED])
def test_pages_keep_what_our_own_cache_keeps(name):
    served = Served(name)
    for page in (5, 1, 3):
        served.start(page)
    # a long prompt in two pieces, one that fits, one token; they decode while others are read, and go over budget
    program = [
        {5: 60},
        {5: 33, 1: 10},
        {5: 1, 1: 1, 3: 1},
        *[{3: 1, 5: 1, 1: 1}] * 24,
        {1: 7, 3: 1},
        *[{1: 1, 5: 1}] * 9,
    ]
    served.follow(program)
    assert any(len(served.kept(page)[0]) == TOKENS for page in (1, 3, 5))


TIERED = (
    "qevict",
    "qevict(promote=False, bits=4)",
    "tiered(h2o)",
    "tiered(h2o, q=0)",
    "tiered(tova, omega=4, share_heads=True)",
    "tiered(keydiff, bits=8)",
    "tiered(kvp)",
    "tiered(kvpop)",
)


@pytest.mark.parametrize("name", TIERED)
def test_pages_with_codes_keep_what_our_own_cache_keeps(name):
    served = Served(name, tokens=72)
    for page in (5, 1, 3):
        served.start(page)
    program = [
        {5: 160},
        {5: 33, 1: 30},
        {5: 1, 1: 1, 3: 1},
        *[{3: 1, 5: 1, 1: 1}] * 70,
        {1: 7, 3: 1},
        *[{1: 1, 5: 1}] * 19,
        {5: 300},
        *[{3: 1, 5: 1, 1: 1}] * 30,
    ]
    served.follow(program)


def test_a_worker_may_have_a_single_head():
    served = Served("tova", H=1)
    served.start(3)
    served.follow([{3: 40}, *[{3: 1}] * 3])


def test_a_page_that_is_taken_over_forgets_the_request_before():
    served = Served("kvpop")
    for _ in range(2):
        served.start(2)
        served.follow([{2: 40}, *[{2: 1}] * 5])


def test_numbers_of_a_page_that_are_not_finite_stay_there():
    served = Served("streaming")
    served.pages.values[2:4] = torch.nan
    served.start(2)
    served.follow([{2: 5}, {2: 1}])


def test_pages_in_16_bits_keep_what_our_own_cache_keeps():
    served = Served("knorm", torch.bfloat16)
    served.start(0)
    served.follow([{0: 50}, *[{0: 1}] * 12], tolerance=0.05)
