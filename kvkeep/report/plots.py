"""Accuracy against budget and bytes against the full cache, as PNG images for a light or a dark page."""

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.report.tables import Block, Line, grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart under the common forms of colour blindness; yellow is too pale for lines
LIGHT_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
DARK_COLOURS = ("#4f9de8", "#f0813a", "#2fc29a", "#e39cc4", "#f2b632", "#8fd0f7", "#b5b5b5")
MARKERS = "osD^vPX"
DASHES = ("-", "--", ":")


class Theme(NamedTuple):
    """The colours of a page: paper, ink and faint lines, and one colour per policy."""

    paper: str
    ink: str
    faint: str
    colours: Sequence[str]


LIGHT = Theme("#ffffff", "#1d2126", "#d9dde2", LIGHT_COLOURS)
DARK = Theme("#171a1f", "#e4e7eb", "#3a4048", DARK_COLOURS)


def accuracy_plot(block: Block, policies: Sequence[str], theme: Theme) -> bytes:
    """Mean accuracy over tasks against the budget, a panel for each position of the question; a PNG image.

    `policies` lists all policies of the report, so that each keeps its colour from plot to plot.
    """
    from matplotlib.figure import Figure

    with styled(theme):
        figure = Figure(figsize=(2.6 + 3.9 * len(block.questions), 4.4), layout="constrained")
        panels = figure.subplots(1, len(block.questions), sharey=True, squeeze=False)[0]
        for axes, question in zip(panels, block.questions, strict=True):
            _accuracy_panel(axes, block, question, policies, theme)
        panels[0].set_ylabel("accuracy, mean over tasks (%)" if len(block.tasks) > 1 else "accuracy (%)")
        figure.legend(handles=_by_height(panels[0]), loc="outside right center", frameon=False)
        return png(figure)


def _accuracy_panel(axes: "Axes", block: Block, question: str, policies: Sequence[str], theme: Theme) -> None:
    places = _places(block)
    _full_line(axes, block, question, theme)
    for policy, lines in grouped(block.lines, lambda line: line.arm.policy).items():
        shown = [line for line in lines if not line.is_full and question in line.means]
        if shown:
            _policy_line(axes, shown, question, places, policy, look_of(policy, policies, theme))
    axes.set_title(f"question {question}" if question else "")
    axes.set_xlabel("cache budget")
    _budget_axis(axes, places, is_scaled=_is_scaled(block))
    axes.set_ylim(bottom=0)


def _budget_axis(axes: "Axes", places: dict[str, float], *, is_scaled: bool) -> None:
    first, last = min(places.values()), max(places.values())
    if is_scaled:
        # limits first: a scale alone warns about a single budget, which spans nothing
        axes.set_xlim(first / 1.15, last * 1.15)
        axes.set_xscale("log")
    else:
        axes.set_xlim(first - 0.3, last + 0.3)
    axes.set_xticks(list(places.values()), list(places))
    axes.minorticks_off()


def _by_height(axes: "Axes") -> list[Any]:
    """The labelled lines of a panel as they end on its right side, from above."""
    handles, _ = axes.get_legend_handles_labels()
    return sorted(handles, key=lambda handle: -handle.get_ydata()[-1])


def _full_line(axes: "Axes", block: Block, question: str, theme: Theme) -> None:
    cell = block.full.means.get(question) if block.full else None
    if cell is None:
        return
    if cell.low is not None and cell.high is not None:
        axes.axhspan(100 * cell.low, 100 * cell.high, color=theme.ink, alpha=0.07, linewidth=0)
    axes.axhline(100 * cell.value, color=theme.ink, linewidth=1.4, linestyle=(0, (6, 3)), label="full cache")


def _policy_line(
    axes: "Axes",
    lines: Sequence[Line],
    question: str,
    places: dict[str, float],
    policy: str,
    look: dict[str, Any],
) -> None:
    where = [places[line.arm.budget] for line in lines]
    cells = [line.means[question] for line in lines]
    axes.plot(where, [100 * cell.value for cell in cells], label=policy, **look)
    low = [100 * (cell.value if cell.low is None else cell.low) for cell in cells]
    high = [100 * (cell.value if cell.high is None else cell.high) for cell in cells]
    axes.fill_between(where, low, high, color=look["color"], alpha=0.09, linewidth=0)
    if len(cells) == 1:
        # a band over a single budget has no width
        axes.vlines(where, low, high, color=look["color"], alpha=0.5, linewidth=1.5)


def _is_scaled(block: Block) -> bool:
    return all(line.budget_share for line in block.lines if not line.is_full)


def _places(block: Block) -> dict[str, float]:
    """Where each budget lies: at its share of the full cache, or evenly spread if that is not known of all."""
    lines = grouped((line for line in block.lines if not line.is_full), lambda line: line.arm.budget)
    if not _is_scaled(block):
        return {budget: float(index) for index, budget in enumerate(lines)}
    return {budget: sum(line.budget_share or 0 for line in found) / len(found) for budget, found in lines.items()}


def look_of(policy: str, policies: Sequence[str], theme: Theme) -> dict[str, Any]:
    index = policies.index(policy)
    # later lines are thinner, so that equal ones still show
    weight = 1 - index / len(policies)
    turn, colour = divmod(index, len(theme.colours))
    return {
        "color": theme.colours[colour],
        "marker": MARKERS[(colour + turn) % len(MARKERS)],
        "linestyle": DASHES[turn % len(DASHES)],
        "linewidth": 1.3 + 1.1 * weight,
        "markersize": 4.5 + 3.0 * weight,
        # markers at zero stay whole
        "clip_on": False,
    }


def bytes_plot(block: Block, policies: Sequence[str], theme: Theme) -> bytes | None:
    """Measured MiB of each policy and budget beside the full cache's; a PNG image, None without measured bytes."""
    from matplotlib.figure import Figure

    lines = [line for line in block.lines if line.cache_bytes is not None and not line.is_full]
    if not lines:
        return None
    with styled(theme):
        figure = Figure(figsize=(8.2, 1.3 + 0.27 * len(lines)), layout="constrained")
        axes = figure.subplots()
        _bars(axes, lines, policies, theme)
        full = full_bytes_of(block)
        if full is not None:
            axes.axvline(full / 2**20, color=theme.ink, linestyle=(0, (6, 3)), linewidth=1.4)
            axes.set_title(f"dashed: full cache, {full / 2**20:.3g} MiB", loc="right", fontsize=9)
        axes.set_xlabel("measured cache (MiB)")
        axes.grid(axis="y", visible=False)
        return png(figure)


def full_bytes_of(block: Block) -> float | None:
    """What the full cache holds in this setting: measured on it, else as the policies' rows tell."""
    if block.full and block.full.cache_bytes:
        return block.full.cache_bytes
    known = [line.full_bytes for line in block.lines if line.full_bytes]
    return sum(known) / len(known) if known else None


def _bars(axes: "Axes", lines: Sequence[Line], policies: Sequence[str], theme: Theme) -> None:
    names = [f"{line.arm.policy}  {line.arm.budget}" for line in lines]
    sizes = [(line.cache_bytes or 0) / 2**20 for line in lines]
    colours = [look_of(line.arm.policy, policies, theme)["color"] for line in lines]
    budgets = list(dict.fromkeys(line.arm.budget for line in lines))
    # a gap before each further budget
    where = [index + 0.6 * budgets.index(line.arm.budget) for index, line in enumerate(lines)]
    bars = axes.barh(where, sizes, color=colours, height=0.72)
    axes.bar_label(bars, [f"{size:.3g}" for size in sizes], padding=4, fontsize=8)
    axes.set_yticks(where, names)
    axes.set_ylim(where[-1] + 0.6, -0.6)


def styled(theme: Theme) -> Any:
    import matplotlib

    return matplotlib.rc_context(
        {
            "savefig.dpi": 170,
            "savefig.facecolor": theme.paper,
            "figure.facecolor": theme.paper,
            "axes.facecolor": theme.paper,
            "axes.edgecolor": theme.faint,
            "axes.labelcolor": theme.ink,
            "axes.titlecolor": theme.ink,
            "axes.titlesize": 10.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": theme.faint,
            "grid.linewidth": 0.7,
            "text.color": theme.ink,
            "xtick.color": theme.ink,
            "ytick.color": theme.ink,
            "xtick.major.size": 0,
            "ytick.major.size": 0,
            "legend.fontsize": 9,
            "font.size": 9.5,
            # names may hold dollar signs, which are no formulas
            "text.parse_math": False,
        }
    )


def png(figure: "Figure") -> bytes:
    image = BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
