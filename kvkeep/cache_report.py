"""What a cache holds, measured: tokens seen and kept, and bytes by array."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table

_FULL = ("keys", "values")
_CODES = ("coded.keys", "coded.values")
_SCALES = ("coded.key_scale", "coded.key_zero", "coded.value_scale", "coded.value_zero")
_MIB = 2**20


@dataclass(frozen=True)
class LayerReport:
    """One managed layer: tokens seen, slots kept per KV head, bytes of each array's storage, tokens held as codes.

    Arrays of windows held as codes are named "coded...".
    """

    index: int
    seen: int
    kept: int
    bytes_by_array: dict[str, int]
    coded: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_array.values())

    def bytes_of(self, names: Iterable[str]) -> int:
        """Bytes of some arrays, of those of them that there are."""
        return sum(self.bytes_by_array.get(name, 0) for name in names)


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
    def coded(self) -> float:
        """Mean tokens held as codes alone, per KV head and layer."""
        return sum(layer.coded for layer in self.layers) / len(self.layers)

    @property
    def held(self) -> float:
        """Mean tokens held per KV head and layer, in full precision or as codes."""
        return self.kept + self.coded

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
        held = f"{self.kept:g} of {self.seen} tokens" + (f" and {self.coded:g} as codes" if self.coded else "")
        table = Table(title=f"{self.policy}, budget {self.budget}: {held}, {size}")
        columns = self._columns()
        for heading in columns:
            table.add_column(heading, justify="right")
        for layer in self.layers:
            table.add_row(*(show(layer) for show in columns.values()))
        if self.unmanaged_bytes:
            table.caption = f"sliding-window layers, not managed: {self.unmanaged_bytes / _MIB:.2f} MiB"
        return table

    def _columns(self) -> dict[str, Callable[[LayerReport], str]]:
        """What the table says of each layer, by heading."""
        tiers: dict[str, tuple[str, ...]] = {"keys + values": _FULL}
        if any("coded.keys" in layer.bytes_by_array for layer in self.layers):
            tiers |= {"codes": _CODES, "scales": _SCALES}
        named = {name for names in tiers.values() for name in names}

        def size(names: Iterable[str]) -> Callable[[LayerReport], str]:
            return lambda layer: f"{layer.bytes_of(names) / _MIB:.3f}"

        coded: dict[str, Callable[[LayerReport], str]] = {"as codes": lambda layer: f"{layer.coded:g}"}
        return {
            "layer": lambda layer: str(layer.index),
            "seen": lambda layer: str(layer.seen),
            "kept": lambda layer: str(layer.kept),
            **(coded if "codes" in tiers else {}),
            **{f"{heading} MiB": size(names) for heading, names in tiers.items()},
            "side arrays MiB": lambda layer: f"{layer.bytes_of(set(layer.bytes_by_array) - named) / _MIB:.3f}",
        }
