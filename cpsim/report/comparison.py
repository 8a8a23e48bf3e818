"""Predictions beside measurements, as rows for every kind of output, as tables for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.case.resolve import cluster_of
from cpsim.prediction.compare import LONG_S, Choice, Comparison, Pair, errors_of, grouped
from cpsim.report.fitted import table
from cpsim.report.words import interval_text, mask_text, ms_text, percent_text, signed_percent, strategy_label
from cpsim.units import format_count

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario

REGRET: Final = 0.02
SHOWN: Final = 20
"""Cases of a terminal table, worst first."""

Rows = list[tuple[str, ...]]
ERRORS_HEAD: Final = ("who", "1 ms or more", "mean", "bias", "worst", "shorter", "mean", "bias", "worst", "in range")
CASES_HEAD: Final = ("who", "case", "error", "predicted ms", "90 % range", "measured ms")
CHOICES_HEAD: Final = (
    "choices among",
    "groups",
    "right",
    "or tied",
    f"regret ≤ {REGRET:.0%}".replace("%", " %"),
    "mean",
    "worst",
)
REGRETS_HEAD: Final = ("predicted best", "measured best", "case", "regret")


def who_text(scenario: Scenario) -> str:
    """Implementation and strategy."""
    return f"{scenario.implementation} {strategy_label(scenario)}"


def short_case(scenario: Scenario) -> str:
    """The rest of a case in a few words."""
    cluster = cluster_of(scenario)
    words = [
        f"{format_count(scenario.num_tokens // scenario.gpus)} x {scenario.gpus}",
        mask_text(scenario),
        f"{scenario.heads}:{scenario.kv_heads}",
        scenario.kernel,
    ]
    words += ["compiled"] if scenario.compile else []
    words += [scenario.pass_] if scenario.pass_ != "fwd_bwd" else []
    words += [scenario.protocol] if scenario.protocol != "synced" else []
    words += [cluster.name] if scenario.gpus > cluster.gpus_per_node else []
    return " ".join(words)


def error_rows(pairs: Sequence[Pair]) -> Rows:
    """Errors of all, of every implementation, and of every strategy of it; long and short cases apart."""
    rows = [_errors("all", pairs)] if pairs else []
    by_name = grouped(pairs, lambda pair: pair.scenario.implementation)
    for name, theirs in sorted(by_name.items()):
        rows.append(_errors(name, theirs))
        of_strategy = grouped(theirs, lambda pair: pair.scenario.strategy)
        rows += [_errors(f"{name} {strategy}", some) for strategy, some in sorted(of_strategy.items())]
    return rows


def _errors(who: str, pairs: Sequence[Pair]) -> tuple[str, ...]:
    cells = [who]
    for wanted in (True, False):
        some = [pair for pair in pairs if pair.is_long is wanted]
        if some:
            errors = errors_of(some)
            signed = [signed_percent(errors.bias), signed_percent(errors.worst)]
            cells += [str(errors.num), _percent(errors.mean_absolute), *signed]
        else:
            cells += ["0", "", "", ""]
    return (*cells, percent_text(errors_of(pairs).covered))


def case_rows(pairs: Iterable[Pair]) -> Rows:
    """Cases in the given order."""
    return [
        (
            who_text(pair.scenario),
            short_case(pair.scenario),
            signed_percent(pair.error),
            ms_text(pair.predicted.time_s),
            interval_text(pair.predicted.time_s_low, pair.predicted.time_s_high),
            ms_text(pair.run.time_s),
        )
        for pair in pairs
    ]


def choice_rows(comparison: Comparison) -> Rows:
    """How often the predicted best is the measured best, among everything and within every implementation."""
    names = sorted({pair.scenario.implementation for pair in comparison.pairs})
    asked = [("all implementations", comparison.choices())] if len(names) > 1 else []
    asked += [(name, comparison.choices(name)) for name in names]
    return [
        (
            name,
            str(len(choices)),
            percent_text(sum(c.is_right for c in choices) / len(choices)),
            percent_text(sum(c.is_tied for c in choices) / len(choices)),
            percent_text(sum(c.regret <= REGRET for c in choices) / len(choices)),
            _percent(sum(c.regret for c in choices) / len(choices)),
            _percent(choices[0].regret),
        )
        for name, choices in asked
        if choices
    ]


def regret_rows(choices: Iterable[Choice]) -> Rows:
    """Choices whose predicted best is not the measured best, largest regret first."""
    return [
        (
            who_text(choice.pairs[0].scenario),
            who_text(choice.best.scenario),
            short_case(choice.best.scenario),
            _percent(choice.regret),
        )
        for choice in choices
        if not choice.is_right
    ]


def headline(comparison: Comparison) -> str:
    """The comparison in one sentence."""
    if not comparison.pairs:
        return "No case is both predicted and measured."
    parts = []
    for wanted, name in ((True, f"of {LONG_S * 1e3:g} ms or more"), (False, "shorter")):
        some = [pair for pair in comparison.pairs if pair.is_long is wanted]
        if some:
            errors = errors_of(some)
            mean, bias = _percent(errors.mean_absolute), signed_percent(errors.bias)
            cases = "case" if errors.num == 1 else "cases"
            parts.append(f"mean error {mean} (bias {bias}) in {errors.num} {cases} {name}")
    covered = percent_text(errors_of(comparison.pairs).covered)
    return f"{'; '.join(parts)}; {covered} of all inside their 90 % interval.".capitalize()


def comparison_view(comparison: Comparison, num_cases: int = SHOWN) -> RenderableType:
    """Summary, choices, then cases worst first, and what could not be compared."""
    parts: list[RenderableType] = [Text(headline(comparison), style="bold"), Text()]
    choices = comparison.choices()
    for head, rows, num_text in (
        (ERRORS_HEAD, error_rows(comparison.pairs), 1),
        (CHOICES_HEAD, choice_rows(comparison), 1),
        (REGRETS_HEAD, regret_rows(choices)[:num_cases], 3),
        (CASES_HEAD, case_rows(comparison.pairs[:num_cases]), 2),
    ):
        if rows:
            made = table(*((name, "left" if i < num_text else "right") for i, name in enumerate(head)))
            for row in rows:
                made.add_row(*map(Text, row))
            parts += [made, Text()]
    if len(comparison.pairs) > num_cases:
        parts.append(Text(f"{len(comparison.pairs) - num_cases} more cases: see --html or --json", style="dim"))
    return Group(*parts)


def left_out(comparison: Comparison) -> list[str]:
    """Cases without a comparison, one line each."""
    entries = (*comparison.failed, *comparison.unmatched)
    return [f"{who_text(scenario)}, {short_case(scenario)}: {why}" for scenario, why in entries]


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """What ``cpsim validate --json`` prints; errors are predicted over measured, less one."""
    named = grouped(comparison.pairs, lambda p: (p.scenario.implementation, p.scenario.strategy, p.is_long))
    return {
        "num_pairs": len(comparison.pairs),
        "errors": [
            {"implementation": name, "strategy": strategy, "min_1_ms": is_long, **asdict(errors_of(pairs))}
            for (name, strategy, is_long), pairs in named.items()
        ],
        "choices": [
            {
                "regret": choice.regret,
                "is_right": choice.is_right,
                "is_tied": choice.is_tied,
                "predicted_best": choice.pairs[0].scenario.to_dict(),
                "measured_best": choice.best.scenario.to_dict(),
            }
            for choice in comparison.choices()
        ],
        "cases": [
            {
                "scenario": pair.scenario.to_dict(),
                "error": pair.error,
                "is_covered": pair.is_covered,
                "predicted_s": pair.predicted.time_s,
                "predicted_s_low": pair.predicted.time_s_low,
                "predicted_s_high": pair.predicted.time_s_high,
                "measured_s": pair.run.time_s,
            }
            for pair in comparison.pairs
        ],
        "failed": [{"scenario": s.to_dict(), "reason": why} for s, why in comparison.failed],
        "unmatched": [{"scenario": s.to_dict(), "reason": why} for s, why in comparison.unmatched],
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
