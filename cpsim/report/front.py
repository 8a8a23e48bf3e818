"""What stands first in report and explorer: what to run, how fast it is, how sure that is; and what stands last."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cpsim.case.resolve import cluster_of
from cpsim.prediction.results import Advice, Candidate, inseparable
from cpsim.report import validation
from cpsim.report.caveats import caveats_html
from cpsim.report.figures import Figure, bar_label, house, rows_height, strategy_colour, titled
from cpsim.report.page import figure, page, section
from cpsim.report.words import (
    CLEAR,
    case_text,
    documents_text,
    interval_text,
    ms_text,
    percent_text,
    strategy_label,
    unbroken,
)
from cpsim.units import MS_PER_S, format_bytes, short_count

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario

CHECKED: Final = "checked"
"""Where all that was checked is drawn, in a report and in the explorer."""
TOP: Final = 4
"""Ways in the short ranking of the first screen."""
WHY: Final = 5
"""Ways whose time is taken apart."""
PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "attention": ("attention", "#0072b2"),
    "memory-bound": ("memory-bound kernels", "#56b4e9"),
    "elementwise": ("memory-bound kernels", "#56b4e9"),
    "matrix products": ("matrix products", "#009e73"),
    "transfer between nodes": ("communication between nodes", "#d55e00"),
    "collective between nodes": ("communication between nodes", "#d55e00"),
    "transfer": ("communication inside nodes", "#e69f00"),
    "collective": ("communication inside nodes", "#e69f00"),
    "interference": ("attention slowed by communication", "#cc79a7"),
    "host": ("waiting for hosts", "#999999"),
    "planning": ("waiting for plans", "#f0e442"),
}
"""What parts of a critical path are called, and their colours, by the beginnings of cost models' names; the first that
holds counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number of an answer."""

    name: str
    value: str
    more: str = ""
    share: float | None = None
    """Of a limit, drawn as a bar; more than 1 is over it."""


def answered_page(
    title: str,
    question: str,
    scenario: Scenario,
    said: str,
    front: str,
    sections: Sequence[tuple[str, str, str]],
    notes: Sequence[str],
    *,
    known: bool,
    with_plots: bool,
    closest: str = "",
) -> str:
    """A page that begins with the answer to a question and ends with the caveats.

    Args:
        title, question, said: escaped here; ``said`` is the recommendation.
        scenario: the case.
        front: HTML below the recommendation.
        sections: titles, ids and HTML of what follows.
        notes: caveats.
        known: whether there is an answer.
        with_plots: whether sections have figures.
        closest: HTML of what is closest among all that was checked.
    """
    every = [*sections]
    if with_plots:
        every.append(("Checked", CHECKED, figure(validation.scatter(), CHECKED, validation.CAPTION) + closest))
    if notes:
        every.append(("Caveats", "caveats", caveats_html(notes)))
    case = f"{case_text(scenario)}; {documents_text(scenario)}"
    answer = (
        f'<section id="answer"><h1>{escape(question)}</h1><p class=muted>{escape(case)}</p>'
        f'<p class="{"lead" if known else "lead none"}">{escape(unbroken(said))}</p>{front}</section>'
    )
    links = {"Answer": "answer"} | {heading: name for heading, name, _ in every}
    return page(title, [answer, *(section(*one) for one in every)], with_plots=with_plots, links=links)


def facts_html(facts: Iterable[Fact]) -> str:
    """Numbers beside each other."""
    parts = []
    for fact in facts:
        meter = ""
        if fact.share is not None:
            over = ' class="over"' if fact.share > 1 else ""
            meter = f'<span class="meter"><i{over} style="width: {min(1.0, fact.share):.1%}"></i></span>'
        parts.append(
            f"<div><dt>{escape(fact.name)}</dt><dd><strong>{escape(unbroken(fact.value))}</strong>"
            f"<span>{escape(unbroken(fact.more))}</span>{meter}</dd></div>"
        )
    return f'<dl class="facts">{"".join(parts)}</dl>'


def beside(facts: Iterable[Fact], top: str, checked: str, per_token_s: float) -> str:
    """The first screen: numbers, the short ranking (HTML), and how well they were checked.

    Args:
        facts: numbers.
        top: the short ranking as HTML.
        checked: how well such numbers were checked.
        per_token_s: seconds of a token, by which answers are compared.
    """
    known = (
        f'<p class="checked"><a href="#{CHECKED}" data-view="{CHECKED}">Checked.</a> {escape(unbroken(checked))}</p>'
    )
    return f'<div class="front" data-per-token="{per_token_s:.9g}">{facts_html(facts)}{top}{known}</div>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the short ranking."""

    rank: str
    label: str
    time: str
    share: float
    """Of the longest time shown, 0 to 1."""
    colour: str


def top_html(lines: Iterable[Line], title: str, more: str) -> str:
    """The short ranking; ``more`` is HTML below it."""
    items = "".join(
        f'<li><span>{escape(line.rank)}</span><b>{escape(line.label)}</b><span class="n">{escape(line.time)}</span>'
        f'<span class="bar"><i style="width: {line.share:.1%}; background: {line.colour}"></i></span></li>'
        for line in lines
    )
    return f'<div class="ways"><p class="top-title">{escape(title)}</p><ol class="top">{items}</ol>{more}</div>'


def front_html(advice: Advice, more: str = "") -> str:
    """The numbers of what is recommended, and the top of the ranking; nothing where nothing can run."""
    best = advice.recommended or next(iter(advice.candidates), None)
    if best is None:
        return ""
    top = top_html(_top(advice), "Fastest ways, forward and backward", more)
    per_token_s = best.total_s / advice.scenario.num_tokens
    return beside(_facts(advice, best), top, checked_text(advice.scenario), per_token_s)


def _facts(advice: Advice, best: Candidate) -> list[Fact]:
    scenario = advice.scenario
    limit = cluster_of(scenario).gpu.memory_bytes
    ties = len({one.scenario.strategy for one in advice.tied})
    clear = best.probability_best >= CLEAR or len(advice.tied) == 1
    sure = "clear" if clear else f"close, {ties} tie" if ties > 1 else "settings tie"
    return [
        Fact(
            name="Time, one layer",
            value=f"{ms_text(best.total_s)} ms",
            more=f"90 %: {interval_text(best.total_s_low, best.total_s_high)} ms",
        ),
        Fact(
            name="Speed",
            value=f"{short_count(scenario.num_tokens / best.total_s)} tokens/s",
            more=f"{best.tflops_per_gpu:,.0f} TFLOP/s a GPU",
        ),
        Fact(
            name="Memory",
            value=format_bytes(best.peak_memory_bytes),
            more=f"of {format_bytes(limit)}, fullest GPU",
            share=best.peak_memory_bytes / limit,
        ),
        Fact(name="Choice", value=sure, more=f"fastest with probability {percent_text(best.probability_best)}"),
    ]


def _top(advice: Advice) -> list[Line]:
    """The recommended way first, then the fastest ones of other strategies."""
    best = advice.recommended or advice.candidates[0]
    shown = [best]
    for one in advice.candidates:
        if all(one.scenario.strategy != other.scenario.strategy for other in shown):
            shown.append(one)
    shown = shown[:TOP]
    longest, fastest = max(one.total_s for one in shown), advice.candidates[0]
    lines = []
    for place, one in enumerate(shown, 1):
        ties = len(advice.tied) > 1 and inseparable(one.draws_s, fastest.draws_s)
        later = one.total_s / best.total_s - 1
        more = "" if one is best or abs(later) < 0.005 else f" {later:+.0%}".replace("%", " %")
        lines.append(
            Line(
                rank="1=" if ties else str(place),
                label=strategy_label(one.scenario),
                time=f"{ms_text(one.total_s)} ms{more}",
                share=one.total_s / longest,
                colour=strategy_colour(str(one.scenario.strategy)),
            )
        )
    return lines


@cache
def _checked() -> dict[str, dict[str, dict[str, Any]]]:
    path = Path(__file__).parent.with_name("data").joinpath("checked.json")
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))["attention"]
    return found


def checked_text(scenario: Scenario) -> str:
    """How well predictions of attention on such machines have been checked, as ``docs/checked.py`` sums it up."""
    cluster = cluster_of(scenario)
    rows = _checked().get(cluster.gpu.name.split()[-1].lower(), {})
    size = "one" if scenario.gpus == 1 else "node" if cluster.num_nodes == 1 else "nodes"
    row = rows.get(size)
    if row is None:
        return f"No run on {cluster.gpu.name} was compared: an estimate from GPUs that were measured."
    where = {"one": "one GPU", "node": f"{row['gpus']} GPUs or fewer of one node", "nodes": "emulated nodes"}[size]
    far = "; real networks between nodes were not measured here" if size == "nodes" else ""
    return (
        f"{row['runs']} runs on {where} of {cluster.gpu.name.split()[-1].upper()} that no fit has seen were "
        f"{percent_text(row['mean_error'])} off on average, worst {percent_text(row['worst_error'])}{far}."
    )


def parts_of(parts_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a critical path by what it is called in words."""
    found: dict[str, float] = {}
    for model, seconds in parts_s.items():
        name = next((said for begins, (said, _) in PARTS.items() if model.startswith(begins)), model)
        found[name] = found.get(name, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def path_text(best: Candidate) -> str:
    """The critical path in words."""
    parts = parts_of(_parts(best))
    total = sum(parts.values())
    large = {name: seconds / total for name, seconds in parts.items() if seconds >= 0.005 * total}
    shares = ", ".join(f"{percent_text(share)} {name}" for name, share in large.items())
    return (
        f"Whiskers: 90 % interval. What decides the time of {strategy_label(best.scenario)}, along its critical path: "
        f"{shares}. For {percent_text(best.exposed_share)} of it the slowest GPU computes nothing: it communicates or "
        "waits."
    )


def _parts(one: Candidate) -> dict[str, float]:
    """Seconds of both passes by cost model."""
    forward, backward = one.forward.parts_s, one.backward.parts_s
    return {name: forward.get(name, 0.0) + backward.get(name, 0.0) for name in {**forward, **backward}}


def why(candidates: Sequence[Candidate]) -> Figure:
    """Where the time of some ways goes: a bar for each, with its 90 % interval."""
    labels = [bar_label(strategy_label(one.scenario)) for one in candidates]
    parts = [parts_of(_parts(one)) for one in candidates]
    colours = dict(PARTS.values())
    names = [name for name in colours if any(name in of for of in parts)]
    names += sorted({name for of in parts for name in of} - set(names))
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "x": [of.get(name, 0.0) * MS_PER_S for of in parts],
            "width": 0.6,
            "marker": {"color": colours.get(name, "#64748b")},
            "hovertemplate": "%{y}: " + name + " %{x:.3g} ms<extra></extra>",
        }
        for name in names
    ]
    data[-1]["error_x"] = {
        "type": "data",
        "symmetric": False,
        "array": [(one.total_s_high - one.total_s) * MS_PER_S for one in candidates],
        "arrayminus": [(one.total_s - one.total_s_low) * MS_PER_S for one in candidates],
        "thickness": 1.6,
        "width": 5,
    }
    widest = max(one.total_s_high for one in candidates) * MS_PER_S
    axes = {
        "yaxis": {"autorange": "reversed", "automargin": True},
        "xaxis": titled("time [ms]", range=[0, widest * 1.05], tickangle=0),
    }
    layout = house(170 + rows_height(labels, 40), top=95) | axes | {"barmode": "stack"}
    return {"data": data, "layout": layout}
