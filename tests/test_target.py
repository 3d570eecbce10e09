"""The attention that later queries pay beyond a delay: streamed, by FlexAttention, and from the whole map.

B sequences, H KV heads, G query heads per KV head, T queries of as many keys, D head size.
"""

import pytest
import torch
from test_future import SCALE, B, D, H, draw, tiles  # noqa: F401
from torch import Tensor

from kvkeep.attention import flex, reference
from kvkeep.future import log_importance
from kvkeep.target import EPSILON, mean_later, target


def sums(queries: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Log-sum-exp `[B, H * G, T]` of each query over the keys that it may see, `[T, S]`."""
    logits = queries @ keys[:, :, None].mT * SCALE
    return logits.masked_fill(~visible, -torch.inf).logsumexp(-1).flatten(1, 2)


def causal(T: int) -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


@pytest.mark.parametrize("delay", [1, 4, 40])
def test_the_mean_counts_the_queries_behind_the_delay_alone(tiles, delay):  # noqa: F811
    queries, keys, at = draw(33, 33, 2)
    weights = reference.attention_map(queries, keys, torch.arange(33).expand(B, H, 33), at, SCALE)
    got = mean_later(queries.flatten(1, 2), keys, SCALE, delay)
    for t in range(33):
        expected = weights[..., t + delay :, t].mean(-1) if t + delay < 33 else torch.zeros(B, H, 2)
        torch.testing.assert_close(got[..., t], expected, atol=1e-6, rtol=1e-4)


def test_the_target_of_uniform_attention_by_hand():
    # queries at 2 and 3 see three and four equal keys: (1/3 + 1/4) / 2 for the first, 1/4 for the second
    later = mean_later(torch.randn(1, 2, 4, D), torch.ones(1, 1, 4, D), SCALE, 2)
    expected = torch.tensor([7 / 24, 1 / 4, 0, 0])
    torch.testing.assert_close(later, expected.expand(1, 1, 2, 4))
    torch.testing.assert_close(target(later), (expected + EPSILON).log().expand(1, 1, 4))


def test_a_group_counts_by_its_largest_head_or_by_the_mean_of_logarithms():
    later = torch.tensor([[[0.1, 0.4], [0.3, 0.2]]])
    torch.testing.assert_close(target(later, "max", 0.0).exp(), torch.tensor([[0.3, 0.4]]))
    torch.testing.assert_close(target(later, "mean", 0.0).exp(), torch.tensor([[0.03, 0.08]]).sqrt())
    with pytest.raises(ValueError, match="max or mean"):
        target(later, "sum")


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("T", [1, 17, 33])
def test_sums_by_a_given_normaliser_are_those_of_the_softmax(tiles, T, delay):  # noqa: F811
    queries, keys, at = draw(T, T, 3)
    got = log_importance(queries.flatten(1, 2), keys, at, SCALE, sums(queries, keys, causal(T)), delay=delay)
    torch.testing.assert_close(got.exp(), reference.future_importance(queries, keys, at, SCALE, delay=delay)[1])


def test_a_smaller_normaliser_may_give_terms_of_any_size(tiles):  # noqa: F811
    # queries that saw the newest three keys alone, and logits beyond what fp32 can take the exponential of
    queries, keys, at = draw(20, 20, 2)
    visible = causal(20) & ~causal(20).tril(-3)
    normaliser = sums(30 * queries, keys, visible)
    got = log_importance(30 * queries.flatten(1, 2), keys, at, SCALE, normaliser, delay=2)
    logits = (30 * queries).double() @ keys[:, :, None].double().mT * SCALE - normaliser.unflatten(1, (H, -1))[
        ..., None
    ]
    expected = logits.masked_fill(~causal(20).tril(-2), -torch.inf).logsumexp(-2)
    assert expected.max() > 100
    torch.testing.assert_close(got.double(), expected, atol=1e-2, rtol=1e-4)


def test_padding_queries_pay_nothing(tiles):  # noqa: F811
    queries, keys, at = draw(9, 20, 2)
    at = at.clone()
    at[1] = torch.cat([torch.full((4,), -1), torch.arange(4, 9)])
    normaliser = torch.zeros(B, H * 2, 9)
    both = log_importance(queries.flatten(1, 2), keys, at, SCALE, normaliser)
    alone = log_importance(queries[1:, :, :, 4:].flatten(1, 2), keys[1:], 4, SCALE, normaliser[1:, :, 4:])
    torch.testing.assert_close(both[1:], alone)
    assert bool((both[1, ..., 9:] == -torch.inf).all())


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_with_keys_and_queries_changed_gives_the_same_numbers(monkeypatch, compiled):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        monkeypatch.setattr(flex, "_compiled", lambda: (flex_attention, create_block_mask))
    queries, keys, at = draw(64, 64, 2)
    packed = queries.flatten(1, 2)
    try:
        normaliser = flex.log_sums(packed, keys, SCALE)
        got = flex.log_importance(packed, keys, SCALE, normaliser, delay=7)
    except Exception as refused:
        if not compiled:
            raise
        pytest.skip(f"FlexAttention does not compile here: {str(refused)[:200]}")
    torch.testing.assert_close(normaliser, sums(queries, keys, causal(64)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got, log_importance(packed, keys, at, SCALE, normaliser, delay=7), atol=1e-4, rtol=1e-4)
