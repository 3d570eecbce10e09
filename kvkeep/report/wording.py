"""How numbers are written, on the page and in the terminal alike. None is written as a dash."""

from kvkeep.report.tables import Cell

DASH = "–"


def percent(share: float | int | None, digits: int = 1) -> str:
    """0.25 -> 25.0, without the sign."""
    return DASH if share is None else f"{100 * share:.{digits}f}"


def bounds(cell: Cell) -> str:
    """The 95% interval of a score in percent: 12–31."""
    return "" if cell.low is None else f"{percent(cell.low, 0)}–{percent(cell.high, 0)}"


def mebibytes(size: float | int | None) -> str:
    """Bytes as MiB with three digits: 1048576 -> 1.00."""
    return DASH if size is None else number(size / 2**20)


def number(value: float | int | None) -> str:
    """Three significant digits as people write them: 1234.5 -> 1,234; 0.00012 -> 0.00012; 1e-9 -> 1e-09."""
    if value is None:
        return DASH
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 0.001 else f"{value:.3g}"
