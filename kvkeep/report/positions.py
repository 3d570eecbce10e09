"""Agreement with the full cache by how far behind the prompt a token lies, as PNG images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.evaluate.rows import Row
from kvkeep.report.plots import DARK, LIGHT, Theme, look_of, png, styled
from kvkeep.report.tables import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# metric, how its axis is called, and the factor of what is drawn
_PANELS = (
    ("top1_agreement", "same likeliest token (%)", 100.0),
    ("kl_to_full", "KL from the full cache (nats)", 1.0),
)


class Stretch(NamedTuple):
    """The rows of one model and kind of text, by position; `light` and `dark` are images."""

    title: str
    light: bytes
    dark: bytes


def stretches(rows: Sequence[Row]) -> list[Stretch]:
    """One drawing for each model, dtype and task with numbers by position: a column of panels for each budget."""
    placed = [row for row in rows if row.extra.get("by_position")]
    policies = [name for name in dict.fromkeys(row.policy for row in placed) if name != "full"]
    found = grouped(placed, lambda row: (row.model, row.dtype, row.task, row.split))
    return [
        Stretch(" · ".join(part for part in names if part), *(_drawn(group, policies, at) for at in (LIGHT, DARK)))
        for names, group in found.items()
        if any(row.policy != "full" for row in group)
    ]


def _drawn(rows: Sequence[Row], policies: Sequence[str], theme: Theme) -> bytes:
    from matplotlib.figure import Figure

    budgets = list(dict.fromkeys(row.budget for row in rows if row.policy != "full"))
    with styled(theme):
        figure = Figure(figsize=(2.2 + 3.4 * len(budgets), 6.4), layout="constrained")
        panels = figure.subplots(2, len(budgets), sharex=True, sharey="row", squeeze=False)
        for line, (metric, label, factor) in zip(panels, _PANELS, strict=True):
            for axes, budget in zip(line, budgets, strict=True):
                shown = [row for row in rows if row.metric == metric and row.budget in (budget, "full")]
                _panel(axes, shown, policies, factor, theme)
            line[0].set_ylabel(label)
        for axes, budget in zip(panels[0], budgets, strict=True):
            axes.set_title(f"budget {budget}")
        for axes in panels[1]:
            axes.set_xlabel("tokens behind the prompt")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        return png(figure)


def _panel(axes: "Axes", rows: Sequence[Row], policies: Sequence[str], factor: float, theme: Theme) -> None:
    axes.set_xscale("log", base=2)
    for row in rows:
        places = row.extra["by_position"]
        where = [(place["first"] + place["until"]) / 2 for place in places]
        value, low, high = ([factor * place[name] for place in places] for name in ("value", "low", "high"))
        if row.policy == "full":
            axes.plot(where, value, color=theme.ink, linewidth=1.4, linestyle=(0, (6, 3)), label="rounding alone")
            continue
        look = look_of(row.policy, policies, theme)
        axes.plot(where, value, label=row.policy, **look)
        axes.fill_between(where, low, high, color=look["color"], alpha=0.09, linewidth=0)
    axes.set_xticks(where, [f"{place['until']:,}" for place in places])
    axes.minorticks_off()
