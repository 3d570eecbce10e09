"""Tiers: what is held in full precision, what as codes, what goes; measured bytes, and codes that never change."""

import copy
import shutil
import sys
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from named import policy_named
from test_conformance import greedy, tokens
from torch import Tensor

import kvkeep
from kvkeep import CacheGroup, KVCache
from kvkeep.attention import attend_shared, kernel, read_coded, reference
from kvkeep.attention.coded import read_blocks
from kvkeep.policies import Policy, QEvict, Tiered, make_policy
from kvkeep.quant import dequantize, quantize
from kvkeep.rotation import RotaryTable
from kvkeep.routing import Room, route, share_out, side_by_side
from kvkeep.slots import Slots
from kvkeep.windows import Codec, TieredSlots

H, G, D, SCALE = 2, 2, 16, 0.3


def draw(generator: torch.Generator, *shape: int, spread: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator) * spread


class Story:
    """One layer that reads tokens, beside everything it was given."""

    def __init__(self, model, policy, batch: int = 1, seed: int = 0, **options):
        self.cache = KVCache(model, policy=policy, **options)
        self.layer = self.cache.managed[0]
        self.generator = torch.Generator().manual_seed(seed)
        self.queries, self.keys, self.values = (torch.zeros(batch, heads, 0, D) for heads in (H * G, H, H))

    def read(self, num_tokens: int) -> Tensor:
        new = [draw(self.generator, len(self.keys), heads, num_tokens, D) for heads in (H * G, H, H)]
        whole = [torch.cat(pair, 2) for pair in zip((self.queries, self.keys, self.values), new, strict=True)]
        self.queries, self.keys, self.values = whole
        output = self.layer.attend(*new, None, SCALE)
        self.cache.plan.forget_limits()
        return output

    @property
    def slots(self) -> TieredSlots:
        return self.layer.slots

    @property
    def codes(self) -> dict[tuple[int, int, int], list[bytes]]:
        """Codes and scales of each window, by row, head and first position."""
        coded, found = self.slots.coded, {}
        if coded is None:
            return found
        names = [name for name in coded.side_names if name not in ("worth", "dormant")]
        arrays = [coded.keys, coded.values, *(coded.side(name) for name in names)]
        for place in (coded.positions >= 0).nonzero().tolist():
            row, head, window = place
            key = (row, head, int(coded.positions[row, head, window]))
            found[key] = [array[row, head, window].numpy().tobytes() for array in arrays]
        return found

    def windows(self, *, dormant: bool) -> set[tuple[int, int, int]]:
        coded = self.slots.coded
        if coded is None:
            return set()
        chosen = (coded.positions >= 0) & (coded.side("dormant") == dormant)
        return {(r, h, int(coded.positions[r, h, w])) for r, h, w in chosen.nonzero().tolist()}


@dataclass(frozen=True, kw_only=True)
class Whims(Policy):
    """Worth that has nothing to do with anything and changes all the time."""

    def score(self, seen):
        return torch.rand(seen.slots.positions.shape, generator=torch.Generator().manual_seed(int(seen.lengths.sum())))

    def revise(self, worth, seen):
        return torch.rand(worth.shape, generator=torch.Generator().manual_seed(int(seen.lengths.sum()) + 1))


# bytes


def test_a_window_takes_the_bytes_of_the_paper():
    codec = Codec(
        table=RotaryTable(lambda positions: (positions, positions)),
        window=8,
        key_bits=2,
        value_bits=2,
        key_size=128,
        value_size=128,
    )
    assert 8 * codec.window_bytes == 8448
    assert 8 * 8 * (128 + 128) * 2 == 32768


def test_what_is_stored_takes_the_bytes_that_were_planned(tiny):
    story = Story(tiny("llama"), Tiered(of=Whims(), promote=True), budget=80)
    story.read(300)
    coded = story.slots.coded
    codec = story.layer._known_codec
    assert coded.length > 10
    assert sum(coded.bytes_by_array().values()) == coded.length * H * codec.slot_bytes
    assert coded.keys.dtype == coded.values.dtype == torch.uint8
    names = story.cache.report().bytes_by_array
    assert names["coded.keys"] == coded.length * H * 8 * D * 2 // 8
    assert names["coded.key_scale"] == coded.length * H * D * 2
    held = story.layer.holdings()
    tokens_of = [set(held[tier][0, 0].tolist()) - {-1} for tier in ("full", "quantized")]
    assert not tokens_of[0] & tokens_of[1]
    assert len(tokens_of[1]) == 8 * len([w for w in story.windows(dormant=False) if w[1] == 0])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranking=st.sampled_from(("qevict", "h2o", "tova", "knorm", "streaming", "random", "snapkv")),
    heads=st.booleans(),
    bits=st.sampled_from((2, 4, 8)),
    omega=st.sampled_from((1, 4, 8, 11)),
    q=st.sampled_from((0.0, 0.1, 0.5, 0.7, 1.0)),
    promote=st.booleans(),
    neighbours=st.booleans(),
    budget=st.sampled_from((45, 64, 100, 300, 0.1, 0.3, 0.8, "50KB", "200KB")),
    batch=st.integers(1, 2),
    sizes=st.lists(st.sampled_from((1, 1, 1, 2, 7, 9, 40, 150)), min_size=1, max_size=8),
)
def test_measured_bytes_never_exceed_the_budget(
    tiny, ranking, heads, bits, omega, q, promote, neighbours, budget, batch, sizes
):
    options = {"bits": bits, "omega": omega, "q": q, "promote": promote, "neighbours": neighbours}
    policy = QEvict(**options) if ranking == "qevict" else Tiered(of=make_policy(ranking), share_heads=heads, **options)
    story = Story(tiny("llama"), policy, batch, budget=budget, recent=12)
    slot = H * (2 * D * 4 + 4 + 4 * len(policy.side))
    for size in sizes:
        story.read(size)
        seen = story.layer.seen
        if isinstance(budget, str):
            # a third of it: only one of three layers has read
            most = int(budget[:-2]) * 1000 / 3
        else:
            kept = budget if isinstance(budget, int) else max(-(-int(budget * 1000) * seen // 1000), 16 + omega - 1)
            most = batch * ((kept + 1) * slot + 8 * H + 4)
        assert sum(story.layer.nbytes().values()) <= most


@pytest.mark.parametrize("neighbours", (True, False))
def test_a_short_sequence_beside_a_long_one_takes_no_bytes_beyond_the_budget(tiny, neighbours):
    """Alone it would stay in full precision as a whole, in slots that the long one could not fill."""
    model, budget = tiny("llama"), 200
    batch, mask = tokens(600, batch=2), torch.ones(2, 600, dtype=torch.long)
    mask[1, :400] = 0
    cache = KVCache(model, policy=QEvict(neighbours=neighbours), budget=budget)
    greedy(model, batch, cache, 20, attention_mask=mask)
    slot = H * (2 * D * 4 + 4 + 4)
    assert cache.report().bytes <= 3 * 2 * ((budget + 1) * slot + 8 * H + 4)
    held = cache.managed[0].holdings()
    assert all(int((held[tier][row, 0] >= 0).sum()) > 40 for tier in ("full", "quantized") for row in range(2))
    assert int((held["full"][1, 0] >= 0).sum() + (held["quantized"][1, 0] >= 0).sum()) == 219


def test_a_budget_without_room_for_a_window_in_the_making_is_refused(tiny):
    with pytest.raises(ValueError, match="smallest possible is 27"):
        KVCache(tiny("llama"), policy="qevict", budget=26)
    KVCache(tiny("llama"), policy="qevict", budget=27)
    with pytest.raises(ValueError, match="smallest possible is") as refused:
        KVCache(tiny("llama"), policy="qevict", budget="1KB")
    smallest = int(str(refused.value).split("smallest possible is ")[1].split()[0])
    story = Story(tiny("llama"), "qevict", budget=f"{smallest}B")
    story.read(100)
    assert 3 * sum(story.layer.nbytes().values()) <= smallest


# dividing bytes


@settings(max_examples=200, deadline=None)
@given(
    windows=st.integers(0, 200),
    free=st.integers(0, 10**6),
    full=st.integers(100, 9000),
    part=st.floats(0.05, 0.9),
    q=st.floats(0, 1),
)
def test_bytes_are_divided_as_by_counting(windows, free, full, part, q):
    coded = max(1, int(full * part))
    room = share_out(torch.tensor([windows]), torch.tensor([free]), full_bytes=full, coded_bytes=coded, quantized=q)
    k, n = int(room.full), int(room.coded)
    assert k * full + n * coded <= free < k * full + (n + 1) * coded
    if windows * full <= free:
        assert k == windows
    else:
        # as many in full precision as leave codes for all, or those that 1 - q buys
        counted = sum(i * full + windows * coded <= free for i in range(1, windows + 1))
        assert k == min(windows, max(counted, int(free * (1 - q) / full + 1e-9)))


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 10**5)), min_size=1, max_size=4), q=st.floats(0, 1))
def test_sequences_side_by_side_fit_into_what_the_largest_has(rows, q):
    windows, free = (torch.tensor(numbers) for numbers in zip(*rows, strict=True))
    sizes = {"full_bytes": 900, "coded_bytes": 250}
    alone = share_out(windows, free, quantized=q, **sizes)
    together = side_by_side(alone, windows, free, **sizes)
    coded = torch.where(together.full < windows, torch.minimum(together.coded, windows), 0)
    assert int(together.full.amax() * 900 + coded.amax() * 250) <= int(free.amax())
    # nothing that was held is lost, and who fits beside the others is left alone
    assert bool((together.full + together.coded >= torch.minimum(windows, alone.full + alone.coded)).all())
    same = alone.full <= together.full.amax()
    assert torch.equal(together.full[same], alone.full[same]) and torch.equal(together.coded[same], alone.coded[same])


@settings(max_examples=200, deadline=None)
@given(
    worth=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    data=st.data(),
    full=st.integers(0, 5),
    coded=st.integers(0, 6),
)
def test_windows_go_where_sorting_puts_them(worth, data, full, coded):
    exists = data.draw(st.lists(st.booleans(), min_size=len(worth), max_size=len(worth)))
    has = data.draw(st.lists(st.booleans(), min_size=len(worth), max_size=len(worth)))
    starts = [8 * i if there else -1 for i, there in enumerate(exists)]
    ranked = sorted((i for i in range(len(worth)) if exists[i]), key=lambda i: (-worth[i], -starts[i]))
    stays = data.draw(st.lists(st.booleans(), min_size=len(worth), max_size=len(worth)))
    want_full = set([i for i in ranked if not stays[i]][:full])
    want_coded = [i for i in ranked if has[i] or i not in want_full][:coded]
    got = route(
        torch.tensor(worth)[None, None].float(),
        torch.tensor(starts)[None, None],
        torch.tensor(has)[None, None],
        Room(torch.tensor([full]), torch.tensor([coded])),
        torch.tensor(stays)[None, None],
    )
    assert set(got.full[0, 0].nonzero()[:, 0].tolist()) == want_full
    assert set(got.coded[0, 0].nonzero()[:, 0].tolist()) == set(want_coded)


# moving


@pytest.mark.parametrize("neighbours", (True, False))
@pytest.mark.parametrize("share_heads", (True, False))
def test_a_thousand_moves_change_no_code(tiny, share_heads, neighbours):
    policy = Tiered(of=Whims(), promote=True, share_heads=share_heads, q=0.5, omega=2, neighbours=neighbours)
    story = Story(tiny("llama"), policy, batch=2, budget=60, recent=4)
    story.read(150)
    moves, known = Counter(), story.codes
    while sum(moves.values()) < 1000:
        active, dormant = story.windows(dormant=False), story.windows(dormant=True)
        story.read(2)
        now = story.codes
        for window in known.keys() & now.keys():
            assert known[window] == now[window]
        moves["promoted"] += len(active & story.windows(dormant=True))
        moves["demoted again"] += len(dormant & story.windows(dormant=False))
        known = now
    assert min(moves.values()) > 200


@pytest.mark.parametrize("neighbours", (True, False))
def test_without_promotion_nothing_comes_back_and_codes_are_read_all_the_same(tiny, neighbours):
    policy = Tiered(of=Whims(), q=0.5, omega=2, promote=False, neighbours=neighbours)
    story = Story(tiny("llama"), policy, batch=2, budget=60, recent=4)
    story.read(150)
    fell = set()
    for _ in range(100):
        story.read(2)
        fell |= story.windows(dormant=False)
        assert not story.windows(dormant=True)
    assert len(fell) > 100


@dataclass(frozen=True, kw_only=True)
class Lots(Policy):
    """A worth of each token and head that never changes, drawn by position."""

    @staticmethod
    def of(positions: Tensor) -> Tensor:
        heads = torch.arange(positions.shape[1])[:, None]
        return ((positions + 1) * 7919 * (heads + 3) % 10007).float()

    def score(self, seen):
        return self.of(seen.slots.positions)


@pytest.mark.parametrize("promote", (True, False))
def test_without_neighbours_each_token_is_where_its_own_worth_puts_it(tiny, promote):
    policy = Tiered(of=Lots(), neighbours=False, promote=promote)
    story = Story(tiny("llama"), policy, budget=120)
    story.read(600)
    held = story.layer.holdings()
    for head in range(H):
        worth = Lots.of(torch.arange(600).expand(1, H, -1))[0, head]
        ranked = (4 + worth[4:-16].argsort(descending=True)).tolist()
        full = {at for at in held["full"][0, head].tolist() if 4 <= at < 584}
        quantized = {at for at in held["quantized"][0, head].tolist() if at >= 0}
        assert len(quantized) > 2 * len(full) > 40
        assert full == set(ranked[: len(full)])
        assert quantized == set(ranked[len(full) : len(full) + len(quantized)])


@pytest.mark.parametrize("neighbours", (True, False))
def test_what_comes_back_is_what_its_codes_say_and_errs_by_half_a_step(tiny, neighbours):
    story = Story(tiny("llama"), Tiered(of=Whims(), promote=True, q=0.5, neighbours=neighbours), budget=120)
    story.read(400)
    for _ in range(40):
        story.read(1)
    codec, coded, slots = story.layer._known_codec, story.slots.coded, story.slots
    checked = 0
    for row, head, start in story.windows(dormant=True):
        entry = int((coded.positions[row, head] == start).nonzero())
        positions = codec.positions(coded)[row, head, entry]
        assert positions.amin() == start and (neighbours or not torch.equal(positions, positions.sort().values))
        at = [int((slots.positions[row, head] == position).nonzero()) for position in positions]
        exact = story.keys[row, head, positions.long()]
        assert torch.equal(slots.keys[row, head, at], codec.keys(coded)[row, head, entry])
        assert torch.equal(slots.values[row, head, at], codec.values(coded)[row, head, entry])
        # turned back by a rotation of our own
        angle = positions[:, None] / 10000 ** (torch.arange(D // 2) / (D // 2))
        turn = torch.polar(torch.ones_like(angle), -angle)
        plain = torch.view_as_real(torch.complex(exact[:, : D // 2], exact[:, D // 2 :]) * turn)
        plain = torch.cat([plain[..., 0], plain[..., 1]], -1)
        expected = dequantize(quantize(plain, 2, over=-2), 2, D, over=-2)
        step = (plain.amax(0) - plain.amin(0)) / 3
        got = torch.view_as_real(torch.complex(*slots.keys[row, head, at].chunk(2, -1)) * turn)
        got = torch.cat([got[..., 0], got[..., 1]], -1)
        assert ((got - plain).abs() <= step / 2 + 0.01).all()
        # a number half-way between two codes may fall to either
        assert ((got - expected).abs() < 1e-2).float().mean() > 0.99
        checked += 1
    assert checked > 3


@pytest.mark.parametrize("neighbours", (True, False))
@pytest.mark.parametrize("share_heads", (True, False))
@pytest.mark.parametrize("chunk", (1, 5, 30))
def test_attention_is_one_softmax_over_slots_and_codes(tiny, share_heads, chunk, neighbours):
    """And the mass that each slot and window receives is that softmax's."""
    policy = Tiered(of=Whims(), promote=True, share_heads=share_heads, q=0.6, neighbours=neighbours)
    story = Story(tiny("llama"), policy, batch=2, budget=120)
    story.read(350)
    moved = 0
    for _ in range(30):
        codec = story.layer._known_codec
        before = copy.deepcopy(story.slots)
        read = (before.coded.positions >= 0) & ~before.coded.side("dormant")
        coded_at = codec.positions(before.coded).masked_fill(~read[..., None], -1)
        seen = story.layer.seen
        seen_masses = {}
        settle = story.layer.settle

        def witness(observed, settle=settle, masses=seen_masses):
            masses["slots"] = observed.attention.received(power=2.0, decay=0.9)
            masses["windows"] = observed.coded.received(power=2.0, decay=0.9)
            masses["last"] = observed.coded.received(last=2)
            settle(observed)

        story.layer.settle = witness
        got = story.read(chunk)
        del story.layer.settle
        new = torch.arange(seen, seen + chunk, dtype=torch.int32)
        keys = torch.cat([before.keys, story.keys[:, :, seen:], codec.keys(before.coded).flatten(2, 3)], 2)
        values = torch.cat([before.values, story.values[:, :, seen:], codec.values(before.coded).flatten(2, 3)], 2)
        positions = torch.cat([before.positions, new.expand(2, H, -1), coded_at.flatten(2)], 2)
        queries = story.queries[:, :, seen:].unflatten(1, (H, G))
        at = new.expand(2, -1)
        expected = reference.attend(queries, keys, values, positions, at, SCALE)
        assert (got.unflatten(1, (H, G)) - expected).abs().max() < 1e-5
        weights = reference.attention_map(queries, keys, positions, at, SCALE)
        fade = 0.9 ** (new[-1] - new).float()
        mass = (weights.square().mean(2) * fade[:, None]).sum(2)
        num_slots = before.length + chunk
        assert (seen_masses["slots"] - mass[..., :num_slots]).abs().max() < 1e-5
        assert (seen_masses["windows"] - mass[..., num_slots:].unflatten(-1, (-1, 8)).mean(-1)).abs().max() < 1e-5
        last = weights.mean(2)[:, :, -2:].sum(2)[..., num_slots:].unflatten(-1, (-1, 8)).mean(-1)
        assert (seen_masses["last"] - last).abs().max() < 1e-5
        moved += len(story.windows(dormant=True))
    assert moved > 0


def test_windows_go_on_gathering_attention_through_their_codes(tiny):
    """The score of every window is the sum of the attention that its tokens got, in whichever tier they were."""
    story = Story(tiny("llama"), QEvict(q=0.5, neighbours=True), budget=100)
    gathered: dict[tuple[int, int], float] = {}

    def watch(observed):
        for name, positions, mass in (
            ("slots", observed.slots.positions, observed.attention.received()),
            ("coded", None, None if observed.coded is None else observed.coded.received()),
        ):
            if name == "coded":
                if mass is None:
                    continue
                positions = story.slots.coded.positions.masked_fill(story.slots.coded.side("dormant"), -1)
            for head in range(H):
                for place, position in enumerate(positions[0, head].tolist()):
                    window = (position - 4) // 8 * 8 + 4
                    if position >= 4:
                        share = 1 / 8 if name == "slots" else 1
                        gathered[head, window] = gathered.get((head, window), 0.0) + share * float(mass[0, head, place])
        type(story.layer).settle(story.layer, observed)

    story.layer.settle = watch
    story.read(260)
    for _ in range(50):
        story.read(1)
    coded, checked = story.slots.coded, 0
    for _, head, start in story.windows(dormant=False):
        entry = int((coded.positions[0, head] == start).nonzero())
        mean = sum(gathered[h, start] for h in range(H)) / H
        got = float(coded.side("worth")[0, head, entry])
        # heads keep one set, by their mean, which is what was written when the window was last moved
        assert sum(
            float(coded.side("worth")[0, h, int((coded.positions[0, h] == start).nonzero())]) for h in range(H)
        ) / H == pytest.approx(mean, rel=1e-3)
        assert got > 0
        checked += 1
    assert checked > 5


def test_windows_first_compete_so_many_tokens_behind_the_prompt(tiny, tmp_path):
    story = Story(tiny("llama"), QEvict(first_after=8), budget=100)
    for layer in story.cache.managed:
        story.layer = layer
        for size in (200, 100, *[1] * 5):
            story.read(size)
    assert story.slots.length == 305 and story.slots.coded is None
    story.cache.save(tmp_path / "waiting.kv")
    for cache in (story.cache, KVCache.load(tmp_path / "waiting.kv", tiny("llama"))):
        story.cache, story.layer = cache, cache.managed[0]
        story.read(1)
        story.read(1)
        assert story.slots.length == 307
        story.read(1)
        assert story.slots.length <= 101 and story.slots.coded.length > 10
        # the next prompt is held to the budget at once
        story.read(50)
        assert story.slots.length <= 101


# carrying


def masses(story: Story) -> dict[str, Tensor]:
    return {name: array.clone() for name, array in story.slots.state().items()}


@pytest.mark.parametrize("neighbours", (True, False))
def test_rows_move_with_their_codes_and_nothing_is_coded_anew(tiny, neighbours):
    story = Story(tiny("llama"), Tiered(of=Whims(), promote=True, neighbours=neighbours), batch=3, budget=100)
    story.read(300)
    before = masses(story)
    story.layer.reorder_cache(torch.tensor([2, 0, 0]))
    for name, array in masses(story).items():
        assert torch.equal(array, before[name][[2, 0, 0]])
    story.layer.batch_repeat_interleave(2)
    assert all(array.shape[0] == 6 for array in masses(story).values())
    story.layer.offload()
    story.layer.prefetch()
    assert torch.equal(masses(story)["coded.keys"][::2], before["coded.keys"][[2, 0, 0]])
    story.layer.reset()
    assert story.layer.slots is None and story.layer.seen == 0


@pytest.mark.parametrize("neighbours", (True, False))
def test_a_copy_and_a_saved_layer_hold_the_same_codes(tiny, tmp_path, neighbours):
    story = Story(tiny("llama"), QEvict(bits=4, neighbours=neighbours), budget=100)
    for layer in story.cache.managed:
        story.layer = layer
        story.read(300)
    fork = copy.deepcopy(story.cache)
    story.cache.save(tmp_path / "tiers.kv")
    loaded = KVCache.load(tmp_path / "tiers.kv", tiny("llama"))
    for other in (fork, loaded):
        for one, two in zip(story.cache.managed, other.managed, strict=True):
            assert all(torch.equal(a, two.slots.state()[name]) for name, a in one.slots.state().items())
        other.managed[0].slots.coded.side("worth").add_(1)
    assert loaded.policy == story.cache.policy
    assert not torch.equal(fork.managed[0].slots.coded.side("worth"), story.cache.managed[0].slots.coded.side("worth"))


@pytest.mark.parametrize("neighbours", (True, False))
def test_tokens_taken_back_one_by_one_leave_all_tiers_as_they_were(tiny, neighbours):
    story = Story(tiny("llama"), Tiered(of=Whims(), promote=True, q=0.5, neighbours=neighbours), budget=100)
    story.read(300)
    story.cache.plan.expected = torch.tensor([300])
    story.layer.activate_past_recording()
    before, codes = masses(story), story.codes
    for _ in range(20):
        story.read(1)
    assert masses(story).keys() == before.keys() and story.codes != codes
    story.layer.crop(-20)
    assert all(torch.equal(array, before[name]) for name, array in masses(story).items())
    assert story.layer.seen == 300


# reading codes


def some_windows(
    window: int, bits: int, size: int, count: int, batch: int = 2, *, scattered: bool = False
) -> tuple[Slots, Codec]:
    generator = torch.Generator().manual_seed(count)
    angles = 1 / 10000 ** (torch.arange(size // 2) / (size // 2))

    def rotary(positions):
        angle = torch.cat([positions[..., None] * angles] * 2, -1)
        return angle.cos(), angle.sin()

    codec = Codec(
        table=RotaryTable(rotary),
        window=window,
        key_bits=bits,
        value_bits=2,
        key_size=size,
        value_size=size + 4,
        scattered=scattered,
    )
    at = torch.arange(count * window, dtype=torch.int32) + 4
    at = at[torch.randperm(len(at), generator=generator)] if scattered else at
    positions = at.view(count, window).repeat(batch, H, 1, 1)
    keys, values = (draw(generator, batch, H, count, window, n) for n in (size, size + 4))
    coded = codec.encode(keys, values, positions, torch.zeros(batch, H, count))
    coded.side("dormant").copy_(torch.rand(batch, H, count, generator=generator) < 0.3)
    coded._arrays["positions"][0, 1, : count // 2] = -1
    return coded, codec


@pytest.mark.skipif(shutil.which("cc") is None, reason="the kernel needs a compiler")
@pytest.mark.parametrize(("window", "size", "count"), [(1, 8, 1), (3, 24, 17), (8, 64, 63)])
@pytest.mark.parametrize("bits", (2, 4, 8))
@pytest.mark.parametrize("num_queries", (1, 3, 32))
@pytest.mark.parametrize("scattered", (True, False))
def test_the_kernel_reads_what_torch_reads(window, size, count, bits, num_queries, scattered):
    coded, codec = some_windows(window, bits, size, count, scattered=scattered)
    queries = draw(torch.Generator().manual_seed(0), 2, H, num_queries, size)
    assert kernel.serves(queries)
    ours, twin = read_coded(queries, coded, codec, SCALE), read_blocks(queries, coded, codec, SCALE)
    read = ((coded.positions >= 0) & ~coded.side("dormant")).repeat_interleave(window, -1)[:, :, None]
    assert ((ours.logits - twin.logits) * read).abs().max() < 1e-4
    assert (ours.logits.masked_fill(read, -torch.inf) < -1e37).all()
    some = read.any(-1, keepdim=True)
    for one, two in zip(ours.part, twin.part, strict=True):
        assert torch.where(some, one - two, 0).abs().max() < 1e-4
    assert torch.where(some, -torch.inf, ours.part.logsum).amax() < -1e37


def test_the_kernel_leaves_small_numbers_alone():
    kernel._kernel()
    assert torch.full((9,), 1e-40).mul(1.0).gt(0).all() and sys.float_info.min / 2 > 0


def test_without_a_kernel_torch_reads(monkeypatch):
    coded, codec = some_windows(8, 2, 16, 5)
    queries = draw(torch.Generator().manual_seed(0), 2, H, 1, 16)
    expected = read_blocks(queries, coded, codec, SCALE)
    monkeypatch.setenv("KVKEEP_KERNEL", "0")
    kernel._kernel.cache_clear()
    try:
        assert not kernel.serves(queries)
        assert torch.equal(read_coded(queries, coded, codec, SCALE).part.output, expected.part.output)
    finally:
        monkeypatch.undo()
        kernel._kernel.cache_clear()
    assert not kernel.serves(queries.double()) and not kernel.serves(queries.expand(-1, -1, 33, -1))


def test_codes_are_never_all_dequantized_at_once(tiny, monkeypatch):
    coded, codec = some_windows(8, 2, 64, 2000)
    largest, decode = 0, Codec.keys

    def watched(codec, coded, part=slice(None)):
        nonlocal largest
        keys = decode(codec, coded, part)
        largest = max(largest, keys.numel())
        return keys

    monkeypatch.setattr(Codec, "keys", watched)
    for num_queries in (1, 100):
        read_blocks(draw(torch.Generator().manual_seed(0), 2, H, num_queries, 64), coded, codec, SCALE)
    assert 0 < largest <= 2**17 < coded.length * H * 2 * 8 * 64 / 8


def test_continuations_read_the_codes_of_the_sequence_they_continue(tiny):
    story = Story(tiny("llama"), Tiered(of=Whims(), promote=True), batch=2, budget=120)
    story.read(350)
    slots, codec = story.slots, story.layer._known_codec
    queries, keys, values = (draw(story.generator, 6, heads, 4, D) for heads in (H * G, H, H))
    got = attend_shared(
        queries[:, :, -1:], keys, values, slots.keys, slots.values, None, SCALE, story.layer.beyond(SCALE)
    )
    coded_at = codec.positions(slots.coded).masked_fill(slots.coded.side("dormant")[..., None], -1)
    own = torch.arange(350, 354, dtype=torch.int32).expand(6, H, -1)

    def whole(*parts):
        return torch.cat([*(part.repeat_interleave(3, 0) for part in parts[:-1]), parts[-1]], 2)

    expected = reference.attend(
        queries[:, :, -1:].unflatten(1, (H, G)),
        whole(slots.keys, codec.keys(slots.coded).flatten(2, 3), keys),
        whole(slots.values, codec.values(slots.coded).flatten(2, 3), values),
        whole(slots.positions, coded_at.flatten(2), own),
        torch.full((6, 1), 353, dtype=torch.int32),
        SCALE,
    )
    assert (got.unflatten(1, (H, G)) - expected).abs().max() < 1e-5


# with a model


@pytest.mark.parametrize("neighbours", (True, False))
@pytest.mark.parametrize("ranking", ("kvp", "lorekv", "lorekv(kept=True)", "expected_attention", "pyramidkv"))
def test_any_ranking_serves_prompts_chunks_and_turns_within_its_bytes(tiny, ranking, neighbours):
    model = tiny("llama")
    of = policy_named("kvp", model) if ranking == "kvp" else make_policy(ranking)

    def new():
        return KVCache(model, policy=Tiered(of=of, neighbours=neighbours), budget="70KB")

    prompt, more = tokens(150), tokens(60, seed=1)
    caches = [new(), new()]
    answer = greedy(model, prompt, caches[0], 20)
    assert answer.shape == (1, 20)
    greedy(model, torch.cat([prompt, answer, more], 1), caches[0], 12)
    greedy(model, prompt, caches[1], 12, chunk=32)
    for cache in caches:
        report = cache.report()
        assert report.bytes <= 70_000 and report.coded > 0
    together = greedy(model, prompt, new(), 20, prompt_lookup_num_tokens=4) if "kept" not in ranking else answer
    assert together.tolist() == answer.tolist()


def test_members_of_a_group_decode_as_each_does_alone(tiny):
    model, prompt = tiny("llama"), tokens(200)
    names = ("qevict", "tiered(knorm)", "h2o", "tiered(snapkv, bits=4, neighbours=False)")
    group = CacheGroup(KVCache(model, policy=name, budget=60) for name in names)
    argument = kvkeep.cache_argument(model)
    with torch.no_grad(), kvkeep.attach(model):
        model(prompt, **{argument: group})
        alone = [KVCache(model, policy=name, budget=60) for name in names]
        for cache in alone:
            model(prompt, **{argument: cache})
        for seed in range(12):
            token = tokens(1, seed=seed)
            got = model(token.expand(4, -1), **{argument: group}).logits
            expected = torch.cat([model(token, **{argument: cache}).logits for cache in alone])
            assert (got - expected).abs().max() < 1e-4


# keys that two bits cannot hold


def test_keys_whose_logits_err_too_much_get_more_bits_and_the_bytes_still_hold(tiny):
    story = Story(tiny("llama"), Tiered(of=Whims(), promote=True, neighbours=True), budget=100)
    original = draw

    def biased(generator, *shape, spread=1.0):
        new = original(generator, *shape, spread=spread)
        # one KV head with a channel of large products, as in the first layers of Qwen2
        head = 1 if shape[1] == H else 2
        new[:, head, :, 3] = new[:, head, :, 3] * 2 + 40
        return new

    globals()["draw"] = biased
    try:
        story.read(300)
    finally:
        globals()["draw"] = original
    codec = story.layer._known_codec
    assert codec.key_bits == 4 and codec.value_bits == 2
    assert sum(story.layer.nbytes().values()) <= 101 * H * (2 * D * 4 + 4) + 8 * H + 4
    plain = Story(tiny("llama"), Tiered(of=Whims(), promote=True, neighbours=True), budget=100)
    plain.read(300)
    assert plain.layer._known_codec.key_bits == 2
    unguarded = Story(tiny("llama"), Tiered(of=Whims(), promote=True, guard=1e9, neighbours=True), budget=100)
    unguarded.read(300)
    assert unguarded.layer._known_codec.key_bits == 2


# refusals


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("tiered(tiered)", "cannot rank windows"),
        ("tiered(bits=3)", "bits must be one of 2, 4, 8"),
        ("qevict(omega=0)", "at least 1 token"),
        ("qevict(q=1.5)", "q must lie"),
        ("qevict(guard=0.0)", "guard must be positive"),
        ("qevict(first_after=-1)", "first_after must be 0 or more"),
        ("qevict(decay=0.0)", "decay must lie"),
        ("tiered(snapkvv)", "did you mean snapkv"),
    ],
)
def test_impossible_settings_are_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        make_policy(policy)


def test_a_rotation_that_changes_with_the_text_is_refused(tiny):
    model = copy.deepcopy(tiny("llama"))
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match=r"rotation \(dynamic\) changes"):
        KVCache(model, policy="qevict", budget=60)
