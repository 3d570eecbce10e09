"""Stacked layers: one small network for each KV head, all of them in parameters `[A, ...]` and one product.

A agents.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)

EVERY = slice(None)


def stacked_layer(num_agents: int, size: int, hidden: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight `[A, size, hidden]` and bias `[A, 1, hidden]`."""
    weight = torch.randn(num_agents, size, hidden) / math.sqrt(size)
    return nn.Parameter(weight), nn.Parameter(torch.zeros(num_agents, 1, hidden))


def stacked_norm(num_agents: int, size: int) -> nn.Parameter:
    """Gain and shift of a normalised layer, `[A, 2, 1, size]`."""
    return nn.Parameter(torch.stack([torch.ones(num_agents, 1, size), torch.zeros(num_agents, 1, size)], dim=1))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`[*B, A, n, size]` through a stacked layer, in the numbers of `x`."""
    return torch.matmul(x, weight.to(x.dtype)) + bias.to(x.dtype)


def make_stack(make: Callable[[], Network], seed: int, frequencies: Tensor | None = None) -> Network:
    """An untrained network, the same for the same seed.

    Args:
        frequencies: what goes into its buffer of that name, of the model's rotation.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make()
    if frequencies is not None:
        network.get_buffer("frequencies").copy_(frequencies)
    return network


def stacks_from(make: Callable[[], Network], tensors: Mapping[str, Tensor], shape: Any) -> Network:
    """A trained network from its state, without gradients.

    Raises:
        ValueError: where the tensors do not belong to a network of this shape.
    """
    with torch.device("meta"):
        network = make()
    try:
        network.load_state_dict(dict(tensors), assign=True)
    except RuntimeError as error:
        raise ValueError(f"these weights are not those of {shape}: {error}") from error
    return network.requires_grad_(False)
