"""Tables for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cpsim.prediction.results import REFUSALS, Infeasible, Prediction, Refusal, refusal
from cpsim.report.caveats import caveats
from cpsim.report.fitted import Column, Fitted, table
from cpsim.report.words import (
    case_text,
    cut_text,
    documents_text,
    interval_text,
    ms_text,
    numbers_of,
    percent_text,
    recommendation,
    strategy_label,
)
from cpsim.units import format_bytes, format_count

if TYPE_CHECKING:
    from cpsim.case.cluster import Cluster
    from cpsim.case.scenario import Scenario
    from cpsim.errors import CpsimError
    from cpsim.models.profile import Profile
    from cpsim.prediction.results import Advice


COLUMNS: Final = (
    Column("#", worth=9),
    Column("strategy", "left", worth=9, breaks=True),
    Column("fwd ms", worth=3),
    Column("bwd ms", worth=2),
    Column("total ms", worth=9),
    Column("90 % range", worth=8),
    Column("TFLOP/s", worth=4),
    Column("exposed", worth=1),
    Column("memory", worth=6),
    Column("P(best)", worth=7),
)
"""Of candidates."""


def advice_view(advice: Advice) -> RenderableType:
    """Recommendation, case, ranked candidates, what cannot run and why, notes."""
    parts: list[RenderableType] = [
        Text(recommendation(advice), style=_style(advice)),
        Text(),
        _case(advice.scenario),
        Text(),
    ]
    if advice.candidates:
        parts += [_candidates(advice), Text()]
    if advice.infeasible:
        parts += [_infeasible(advice.infeasible), Text()]
    return Group(*parts, *notes_view(advice.notes))


def _style(advice: Advice) -> str:
    """Of a recommendation: plain answers, estimates, none."""
    return "bold red" if not advice.candidates else "bold yellow" if advice.stands_in else "bold green"


def _case(scenario: Scenario) -> RenderableType:
    return Text(f"{case_text(scenario)}; {documents_text(scenario)}", style="dim")


def _candidates(advice: Advice) -> Fitted:
    tied, best, rows = advice.tied, advice.recommended, []
    for rank, one in enumerate(advice.distinct, start=1):
        mark = "=" if len(tied) > 1 and any(one is other for other in tied) else ""
        alike = [f"= {strategy_label(other.scenario)}" for other in advice.alike(one)]
        name = "\n".join([strategy_label(one.scenario), *alike])
        rows.append((f"{rank}{mark}", name, *numbers_of(one)))
    return Fitted(COLUMNS, rows, ["green" if one is best else "" for one in advice.distinct])


def _infeasible(entries: Sequence[Infeasible]) -> RenderableType:
    return refusals_view([(entry.kind, strategy_label(entry.scenario), entry.reason) for entry in entries])


def refusals_view(entries: Sequence[tuple[Refusal | None, str, str]]) -> RenderableType:
    """A table for each kind of refusal: what is refused, and why.

    Args:
        entries: kind, what, and reason.
    """
    tables: list[RenderableType] = []
    for kind, words in REFUSALS.items():
        made = table((words, "left"), ("why", "left"))
        for of_kind, what, reason in entries:
            if of_kind == kind:
                made.add_row(what, Text(reason), style="dim")
        tables += [made, Text()] if made.rows else []
    return Group(*tables[:-1])


def notes_view(notes: Iterable[str]) -> list[RenderableType]:
    """What a reader must know, by what it changes; nothing where there is nothing."""
    lines = Table.grid(padding=(0, 2))
    for subject, some in caveats(notes).items():
        for i, line in enumerate(some):
            lines.add_row("" if i else Text(f"• {subject}", no_wrap=True), Text(line), style="yellow")
    return [Text("Know this before you rely on it", style="bold yellow"), lines] if lines.rows else []


def prediction_view(results: Sequence[Prediction | Infeasible | CpsimError]) -> RenderableType:
    """One prediction in full, or many in a table, then the notes of all."""
    notes = dict.fromkeys(note for result in results if isinstance(result, Prediction) for note in result.notes)
    if len(results) == 1 and isinstance(results[0], Prediction):
        return Group(_one(results[0]), Text(), *notes_view(notes))
    return Group(_many(results), Text(), *notes_view(notes))


def _one(result: Prediction) -> RenderableType:
    interval = interval_text(result.time_s_low, result.time_s_high)
    facts = table(("", "left"), ("", "left"))
    facts.show_header = False
    facts.add_row("time", Text(f"{ms_text(result.time_s)} ms   90 %: {interval} ms", style="bold green"))
    rate = f"{result.tflops_per_gpu:,.0f} TFLOP/s per GPU"
    if result.tokens_per_s_per_gpu is not None and result.mfu is not None:
        rate += f", {percent_text(result.mfu)} of its peak (MFU)"
        facts.add_row("throughput", f"{result.tokens_per_s_per_gpu:,.0f} tokens/s per GPU")
    facts.add_row("rate", rate)
    facts.add_row("exposed communication", f"{ms_text(result.exposed_comm_s)} ms")
    facts.add_row("sent by the busiest GPU", format_bytes(result.bytes_sent_per_gpu))
    facts.add_row("memory" if result.memory else "peak memory", _memory(result))
    for name, nbytes in result.memory.items():
        if nbytes:
            facts.add_row(f"  {name}", Text(_bar(format_bytes(nbytes), nbytes / result.needed_bytes), style="dim"))
    if result.planning_s:
        charged = result.parts_s.get("planning", 0.0)
        shown = f"{ms_text(charged)} ms of it charged" if charged else "hidden"
        facts.add_row("planning a batch, one core", f"{result.planning_s:.2g} s, {shown}")
    if result.memory:
        facts.add_row("time by part", "")
    total = sum(result.parts_s.values()) or 1.0
    for name, seconds in sorted(result.parts_s.items(), key=lambda part: -part[1]):
        facts.add_row(f"  {name}", Text(_bar(f"{ms_text(seconds)} ms", seconds / total), style="dim"))
    how = cut_text(result.scenario) if result.scenario.is_step else result.scenario.pass_
    head = Text(f"{strategy_label(result.scenario)}, {how}", style="bold")
    return Group(head, _case(result.scenario), Text(), facts)


def _bar(number: str, share: float) -> str:
    return f"{number:>11} {'█' * round(24 * share)}"


def _memory(result: Prediction) -> Text:
    """What the fullest GPU needs, of a step beside what it has."""
    needed = format_bytes(result.needed_bytes)
    if result.gpu_memory_bytes is None:
        return Text(needed)
    low, high = result.needed_interval
    of = f"{needed} ({low / 1e9:.1f}–{high / 1e9:.1f}) of {format_bytes(result.gpu_memory_bytes)}"
    if not result.fits:
        return Text(f"{of}: does not fit", style="bold red")
    return Text(f"{of}: fits" if high <= result.gpu_memory_bytes else f"{of}: fits, barely")


def _many(results: Sequence[Prediction | Infeasible | CpsimError]) -> Table:
    one_pass = len({r.scenario.pass_ for r in results if isinstance(r, Prediction | Infeasible)}) == 1
    made = table(
        ("#", "right"),
        ("strategy", "left"),
        *(() if one_pass else (("pass", "left"),)),
        ("GPUs", "right"),
        ("tokens", "right"),
        ("ms", "right"),
        ("90 % interval", "right"),
        ("TFLOP/s", "right"),
        ("exposed ms", "right"),
        ("memory", "right"),
    )
    for column in made.columns:
        column.min_width = len("measured") if column.header == "ms" else None
    for number, result in enumerate(results, start=1):
        kind = refusal(result)
        if isinstance(result, Prediction):
            made.add_row(
                str(number),
                *_who(result.scenario, one_pass),
                ms_text(result.time_s),
                interval_text(result.time_s_low, result.time_s_high),
                f"{result.tflops_per_gpu:,.0f}",
                ms_text(result.exposed_comm_s),
                Text(format_bytes(result.needed_bytes) + (", does not fit" if kind else ""), "red" if kind else ""),
            )
            continue
        who = _who(result.scenario, one_pass) if isinstance(result, Infeasible) else ("", "", "", "")[one_pass:]
        answer = REFUSALS[kind] if kind or isinstance(result, Infeasible) else "no answer"
        made.add_row(str(number), *who, Text(answer, style="red"), style="dim")
    return made


def _who(scenario: Scenario, one_pass: bool) -> tuple[str, ...]:
    shown = () if one_pass else (scenario.pass_,)
    return strategy_label(scenario), *shown, str(scenario.gpus), format_count(scenario.num_tokens)


def reasons(results: Sequence[Prediction | Infeasible | CpsimError]) -> list[str]:
    """Why entries have no prediction, one line each."""
    lines = []
    for number, result in enumerate(results, start=1):
        place = f"#{number} " if len(results) > 1 else ""
        if isinstance(result, Infeasible):
            lines.append(f"{place}{strategy_label(result.scenario)}: {result.reason}")
        elif not isinstance(result, Prediction):
            lines.append(f"{place}{result}")
    return lines


def clusters_view(clusters: Iterable[Cluster]) -> RenderableType:
    """Presets: GPUs, network with its grade, profile."""
    made = table(
        ("cluster", "left"),
        ("node", "left"),
        ("NICs", "right"),
        ("GB/s each", "right"),
        ("GB/s a flow", "right"),
        ("µs", "right"),
        ("±", "right"),
        ("grade", "left"),
        ("profile", "left"),
    )
    sources: list[RenderableType] = []
    for cluster in clusters:
        fabric = cluster.fabric
        node = f"{cluster.gpus_per_node} x {cluster.gpu.name}"
        network = ("", "", "", "", "", "one node")
        if fabric is not None:
            network = (
                str(fabric.nics_per_node),
                f"{fabric.nic_bandwidth_bytes_per_s / 1e9:.1f}",
                f"{fabric.flow_bandwidth_bytes_per_s / 1e9:.1f}",
                f"{fabric.latency_s * 1e6:.0f}",
                percent_text(fabric.sigma_log),
                fabric.grade,
            )
            sources.append(Text.assemble((cluster.name, "bold"), f": {fabric.source}", style="dim"))
        made.add_row(Text(cluster.name, style="bold"), node, *network, cluster.profile or Text("none yet", "red"))
    return Group(made, Text(), *sources)


def strategies_view(records: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Strategies with what they do, their knobs and whose code runs them."""
    made = table(("strategy", "left"), ("what it does", "left"), ("knobs", "left"), ("implementations", "left"))
    for record in records:
        lists = (", ".join(record[column]) for column in ("knobs", "implementations"))
        made.add_row(Text(record["strategy"], style="bold"), record["description"], *lists)
    return made


def profile_view(profile: Profile) -> RenderableType:
    """What a profile describes, and its errors on points that were not fitted, worst first."""
    kernels = ", ".join(sorted({kernel for kernel, _ in profile.attention}))
    columns = ("points", "mean", "95 of 100", "worst", "bias", "in their 90 %")
    made = table(("errors on points not fitted", "left"), *((name, "right") for name in columns))
    for row in sorted(profile.held_out, key=lambda row: -row["mean_absolute"]):
        errors = (
            f"{row['mean_absolute']:.1%}",
            f"{row['p95']:.1%}",
            f"{row['worst']:.1%}",
            f"{row['bias']:+.1%}",
            f"{row['covered']:.0%}",
        )
        made.add_row(str(row["model"]), f"{row['points']:,}", *(error.replace("%", " %") for error in errors))
    head = Text.assemble((profile.name, "bold"), f": {profile.gpu}, {profile.grade}; kernels {kernels}")
    if profile.held_out:
        return Group(head, Text(), made, Text())
    kinds = ("attention", "matrix products", "memory-bound")
    sure = [
        (kind, [s for m, s in profile.sigma.items() if m.startswith(kind) and "between" not in m]) for kind in kinds
    ]
    spans = [
        f"{kind} {' to '.join(dict.fromkeys((f'{min(each):.0%}', f'{max(each):.0%}')))}" for kind, each in sure if each
    ]
    return Group(head, Text(f"standard deviations, of left-out GPUs: {', '.join(spans)}".replace("%", " %")), Text())
