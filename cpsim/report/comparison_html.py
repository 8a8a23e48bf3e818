"""The page of a comparison: predicted against measured times, errors over time, size and strategy, every case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go

from cpsim.prediction.compare import Comparison, Pair, grouped
from cpsim.report.comparison import (
    CASES_HEAD,
    CHOICES_HEAD,
    ERRORS_HEAD,
    REGRETS_HEAD,
    case_rows,
    choice_rows,
    error_rows,
    headline,
    left_out,
    regret_rows,
    short_case,
    who_text,
)
from cpsim.report.figures import PALETTE, log_axis, styled
from cpsim.report.page import figure, page, table
from cpsim.runtime.files import write
from cpsim.units import MS_PER_S

SYMBOLS: Final = {"cpsim": "circle", "ring-flash-attn": "diamond", "yunchang": "square", "torch": "triangle-up"}


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Write the page."""
    write(path, comparison_html(comparison))


def comparison_html(comparison: Comparison) -> str:
    """The page as text."""
    pairs = comparison.pairs
    sections = [f"<h1>Predicted and measured</h1><p class='lead fact'>{escape(headline(comparison))}</p>"]
    if pairs:
        sections += [_errors(pairs), _plots(pairs), _choices(comparison)]
        sections.append("<h2>Every case, worst first</h2>" + table(CASES_HEAD, case_rows(pairs), num_text=2))
    if left := left_out(comparison):
        items = "".join(f"<li>{escape(line)}</li>" for line in left)
        sections.append(f"<h2>Not compared: {len(left)}</h2><ul class=muted>{items}</ul>")
    return page("cpsim: predicted and measured", sections, with_plots=bool(pairs))


def _errors(pairs: Sequence[Pair]) -> str:
    note = (
        "Errors are predicted over measured time, less one; cases of 1 ms or more and shorter ones apart. "
        "In range: share of the measurements inside their 90 % interval."
    )
    return f"<h2>Errors</h2>{table(ERRORS_HEAD, error_rows(pairs), num_text=1)}<p class=muted>{note}</p>"


def _choices(comparison: Comparison) -> str:
    rows = choice_rows(comparison)
    if not rows:
        return ""
    note = (
        "A choice is between cases that are the same in everything but strategy, knobs and implementation. Right: "
        "the predicted best is the measured best. Regret: how much longer the predicted best takes than the best."
    )
    wrong = regret_rows(comparison.choices())
    worst = table(REGRETS_HEAD, wrong, num_text=3) if wrong else ""
    return f"<h2>Choices</h2>{table(CHOICES_HEAD, rows, num_text=1)}<p class=muted>{note}</p>{worst}"


def _plots(pairs: Sequence[Pair]) -> str:
    captions = {
        "scatter": "Every case with its 90 % interval; the line is where they are equal, the dotted ones 10 % off.",
        "residual-time": "Error against measured time. Above zero: predicted too slow.",
        "residual-strategy": "Error by implementation and strategy.",
    }
    made = {"scatter": scatter(pairs), "residual-time": residuals(pairs), "residual-strategy": by_strategy(pairs)}
    return "".join(figure(plot, name, captions[name]) for name, plot in made.items())


def scatter(pairs: Sequence[Pair]) -> Any:
    """Predicted against measured milliseconds, both axes logarithmic."""
    made = go.Figure()
    ends = [f(p.run.time_s for p in pairs) * MS_PER_S for f in (min, max)]
    for factor, dash in ((1.0, "solid"), (0.9, "dot"), (1.1, "dot")):
        line = {"color": "#9ca3af", "width": 1, "dash": dash}
        made.add_scatter(
            x=ends, y=[factor * end for end in ends], mode="lines", line=line, hoverinfo="skip", showlegend=False
        )
    _add_pairs(made, pairs, lambda pair: pair.predicted.time_s * MS_PER_S)
    for trace, some in zip(made.data[3:], _by_who(pairs).values(), strict=True):
        high, low = ([getattr(p.predicted, n) * MS_PER_S for p in some] for n in ("time_s_high", "time_s_low"))
        trace.error_y = {
            "type": "data",
            "symmetric": False,
            "thickness": 1,
            "width": 0,
            "array": [h - y for h, y in zip(high, trace.y, strict=True)],
            "arrayminus": [y - lo for lo, y in zip(low, trace.y, strict=True)],
        }
    made.update_xaxes(log_axis("measured [ms]", ends))
    made.update_yaxes(log_axis("predicted [ms]", [*ends, *(p.predicted.time_s * MS_PER_S for p in pairs)]))
    return styled(made, 620)


def residuals(pairs: Sequence[Pair]) -> Any:
    """Signed error against measured time."""
    made = go.Figure()
    _add_pairs(made, pairs, lambda pair: 100 * pair.error)
    made.add_hline(y=0, line={"color": "#9ca3af", "width": 1})
    made.update_xaxes(log_axis("measured [ms]", [pair.run.time_s * MS_PER_S for pair in pairs]))
    made.update_yaxes(title="error [%]")
    return styled(made, 480)


def by_strategy(pairs: Sequence[Pair]) -> Any:
    """Signed errors of every implementation and strategy, all points beside a box."""
    made = go.Figure()
    for number, (who, some) in enumerate(sorted(_by_who(pairs).items())):
        made.add_box(
            x=[100 * pair.error for pair in some],
            name=escape(who),
            boxpoints="all",
            jitter=0.4,
            pointpos=0,
            marker={"color": PALETTE[number % len(PALETTE)], "size": 5},
            text=[_hover(pair) for pair in some],
            hoverinfo="text",
            showlegend=False,
        )
    made.update_xaxes(title="error [%]", zeroline=True)
    made.update_yaxes(autorange="reversed", automargin=True)
    return styled(made, 160 + 46 * len(_by_who(pairs)))


def _add_pairs(made: Any, pairs: Sequence[Pair], height: Callable[[Pair], float]) -> None:
    """One trace per implementation and strategy, against measured milliseconds."""
    strategies = sorted({str(pair.scenario.strategy) for pair in pairs})
    for who, some in _by_who(pairs).items():
        first = some[0].scenario
        colour = PALETTE[strategies.index(str(first.strategy)) % len(PALETTE)]
        made.add_scatter(
            x=[pair.run.time_s * MS_PER_S for pair in some],
            y=[height(pair) for pair in some],
            mode="markers",
            name=escape(who),
            text=[_hover(pair) for pair in some],
            hoverinfo="text",
            marker={"color": colour, "symbol": SYMBOLS.get(first.implementation, "x"), "size": 8, "opacity": 0.8},
        )


def _by_who(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    return grouped(pairs, lambda pair: f"{pair.scenario.implementation} {pair.scenario.strategy}")


def _hover(pair: Pair) -> str:
    times = f"predicted {pair.predicted.time_s * MS_PER_S:.3g} ms, measured {pair.run.time_s * MS_PER_S:.3g} ms"
    return f"{escape(who_text(pair.scenario))}<br>{escape(short_case(pair.scenario))}<br>{times}<br>{pair.error:+.1%}"
