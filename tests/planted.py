"""Traces in which each head finds tokens important by a rule of its own, that an agent can read off keys and places."""

from pathlib import Path

import torch

from kvkeep.frequencies import rotation_frequencies
from kvkeep.policies.kvp import GLANCE, glimpses_of
from kvkeep.rotation import rotary_of, rotate
from kvkeep.trace import Trace, TraceIndex, add_prompts, write_index, write_trace

L, H, D = 2, 2, 8
NAMES = [f"layer {layer}, head {head}" for layer in range(L) for head in range(H)]
ROTATION = {"rope_type": "default", "rope_theta": 1e4}
FINGERPRINT = {
    "type": "planted",
    "number of layers": L,
    "number of KV heads": H,
    "head size": D,
    "rotation": ROTATION,
}
INDEX = TraceIndex(
    fingerprint=FINGERPRINT, model="planted", layers=[0, 1], heads=[0, 1], group=2, dtype="float32", settings={"f": 1}
)


def planted(
    key: str,
    n: int = 60,
    *,
    source: str = "planted/inside",
    split: str = "train",
    from_end: bool = True,
    by_reading: bool = False,
) -> Trace:
    """A prompt whose tokens are important in the direction that their head likes, and a little less the older.

    Heads like keys as the query behind the prompt sees them, or as they are before rotation (`from_end=False`).
    With `by_reading` tokens are important as far as the newest queries read them, whatever their keys.
    """
    # a text's checksum is the same in every run
    generator = torch.Generator().manual_seed(sum(key.encode()) + 1000 * len(key))
    keys = torch.randn(L, H, n, D, generator=generator).bfloat16()
    likes = torch.randn(L, H, 1, D, generator=torch.Generator().manual_seed(0))
    worth = (2 * (keys * likes).sum(-1) / likes.norm(dim=-1) + torch.arange(n) / n).exp()
    read = torch.randn(L, H, n, generator=generator).exp() / n
    # one angle for all of them leaves each where it is beside the query at the end
    turns = torch.full((n,), n - 1) if from_end else torch.arange(n)
    cos, sin = rotary_of(rotation_frequencies(FINGERPRINT))(turns)
    return Trace(
        key=key,
        source=source,
        split=split,
        token_ids=torch.arange(n, dtype=torch.int32),
        future_ids=torch.zeros(1, 1, dtype=torch.int32),
        keys=rotate(keys.float(), cos, sin).bfloat16(),
        values=torch.randn(L, H, n, D, generator=generator).bfloat16(),
        importance_max=read[None].clone() if by_reading else worth[None],
        importance_mean=worth[None] / 2,
        importance_square=read[None].clone() if by_reading else worth[None].clone(),
        # attention of the newest 32 queries, and of the last, which says nothing
        worths=dict(
            zip(glimpses_of(GLANCE).values(), (read, torch.rand(read.shape, generator=generator)), strict=True)
        ),
    )


def save_traces(folder: Path, traces: list[Trace], index: TraceIndex = INDEX) -> Path:
    for trace in traces:
        write_trace(folder, trace)
    write_index(folder, add_prompts(index, [trace.key for trace in traces]))
    return folder


def save_planted(folder: Path, num_train: int = 12, num_validation: int = 2) -> Path:
    """A folder of planted traces."""
    train = [planted(f"t{i}", 50 + i) for i in range(num_train)]
    return save_traces(folder, train + [planted(f"v{i}", split="validation") for i in range(num_validation)])
