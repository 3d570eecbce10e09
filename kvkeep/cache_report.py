"""What a cache holds, measured: tokens seen and kept, and bytes by array."""

from collections import Counter
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table

_TIER = ("keys", "values")
_MIB = 2**20


@dataclass(frozen=True)
class LayerReport:
    """One managed layer: tokens seen, slots kept per KV head, bytes of each array's storage."""

    index: int
    seen: int
    kept: int
    bytes_by_array: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_array.values())


@dataclass(frozen=True)
class CacheReport:
    """Every managed layer, and the bytes of layers that are left to transformers."""

    policy: str
    budget: str
    layers: list[LayerReport]
    unmanaged_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Measured bytes of all managed layers, side arrays included."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def seen(self) -> int:
        return self.layers[0].seen

    @property
    def kept(self) -> float:
        """Mean slots kept per KV head and layer."""
        return sum(layer.kept for layer in self.layers) / len(self.layers)

    @property
    def bytes_by_array(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for layer in self.layers:
            total.update(layer.bytes_by_array)
        return dict(total)

    def __str__(self) -> str:
        console = Console(width=100)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    def __rich__(self) -> RenderableType:
        size = f"{self.bytes / _MIB:.2f} MiB"
        table = Table(title=f"{self.policy}, budget {self.budget}: {self.kept:g} of {self.seen} tokens, {size}")
        for heading in ("layer", "seen", "kept", "keys + values MiB", "side arrays MiB"):
            table.add_column(heading, justify="right")
        for layer in self.layers:
            tier = sum(layer.bytes_by_array.get(name, 0) for name in _TIER)
            table.add_row(
                str(layer.index),
                str(layer.seen),
                str(layer.kept),
                f"{tier / _MIB:.3f}",
                f"{(layer.bytes - tier) / _MIB:.3f}",
            )
        if self.unmanaged_bytes:
            table.caption = f"sliding-window layers, not managed: {self.unmanaged_bytes / _MIB:.2f} MiB"
        return table
