"""A real training run beside its prediction, for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.case.formats.logs import EXPOSED, IDLE, REST, Observed
from cpsim.prediction.results import Prediction
from cpsim.report.fitted import table
from cpsim.report.words import cut_text, seconds_text, signed_percent, strategy_label
from cpsim.units import format_bytes

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "matrix products": ("matrix products",),
    "attention": ("attention fwd", "attention bwd"),
    REST: ("elementwise of layers", "memory-bound", "copy", "accumulate", "elementwise", "merge"),
    EXPOSED: ("collective", "transfer", "collective between nodes", "transfer between nodes", "interference"),
    IDLE: ("host", "planning"),
}
"""Parts of a trace, and the cost models that predict them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One prediction and what was observed."""

    prediction: Prediction
    observed: tuple[Observed, ...]

    @property
    def _tokens(self) -> float:
        return self.prediction.scenario.num_tokens / self.prediction.scenario.gpus

    @property
    def measured_s(self) -> float:
        """Seconds of a step; of a log where there is one, since a profiler slows hosts."""
        logs = [one for one in self.observed if not one.busy_s] or list(self.observed)
        return logs[0].seconds(self._tokens)

    @property
    def error(self) -> float:
        """Predicted over measured time, less one."""
        return self.prediction.time_s / self.measured_s - 1

    def parts(self) -> dict[str, tuple[float, float]]:
        """Predicted and measured seconds by part, of a trace; nothing without one."""
        traces = [one for one in self.observed if one.busy_s]
        if not traces:
            return {}
        parts = self.prediction.parts_s
        known = {name: sum(parts.get(model, 0.0) for model in models) for name, models in PARTS.items()}
        return {name: (known[name], traces[0].busy_s.get(name, 0.0)) for name in PARTS}

    def blamed(self) -> str | None:
        """The part that differs most; None without a trace."""
        parts = self.parts()
        return max(parts, key=lambda name: abs(parts[name][0] - parts[name][1]), default=None)


def verdict(found: Beside) -> str:
    """How far off the prediction is, in a sentence or two."""
    p, error = found.prediction, found.error
    inside = "inside" if p.time_s_low <= found.measured_s <= p.time_s_high else "outside"
    text = (
        f"Measured {seconds_text(found.measured_s)} s a step, predicted {seconds_text(p.time_s)} s "
        f"({signed_percent(error)}); the measurement is {inside} the 90 % interval "
        f"{seconds_text(p.time_s_low)}–{seconds_text(p.time_s_high)} s."
    )
    if (name := found.blamed()) is not None:
        predicted, measured = found.parts()[name]
        return f"{text} What differs most is {name}: {_seconds(predicted)} predicted, {_seconds(measured)} measured."
    return f"{text} A log does not say which part differs: give a trace of torch.profiler, too."


def beside_view(found: Beside) -> RenderableType:
    """Predicted beside measured."""
    p, rows = found.prediction, table(("", "left"), ("predicted", "right"), ("measured", "right"), ("error", "right"))
    rows.add_row("step", _seconds(p.time_s), _seconds(found.measured_s), signed_percent(found.error))
    rate = p.scenario.num_tokens / p.scenario.gpus / found.measured_s
    predicted = p.tokens_per_s_per_gpu or p.scenario.num_tokens / p.scenario.gpus / p.time_s
    rows.add_row("tokens/s per GPU", f"{predicted:,.0f}", f"{rate:,.0f}", signed_percent(predicted / rate - 1))
    for one in found.observed:
        if one.memory_bytes:
            off = signed_percent(p.peak_memory_bytes / one.memory_bytes - 1)
            rows.add_row(
                f"memory {one.memory_kind}", format_bytes(p.peak_memory_bytes), format_bytes(one.memory_bytes), off
            )
    for name, (mine, theirs) in found.parts().items():
        rows.add_row(f"  {name}", _seconds(mine), _seconds(theirs), _seconds(mine - theirs, signed=True))
    what = ", ".join(one.what for one in found.observed)
    how = cut_text(p.scenario) if p.scenario.is_step else p.scenario.pass_
    head = Text(f"{what}, beside {strategy_label(p.scenario)}, {how}", style="dim")
    return Group(head, Text(verdict(found), style="bold"), Text(), rows)


def _seconds(seconds: float, *, signed: bool = False) -> str:
    sign = "+" if signed and seconds >= 0 else ""
    return f"{sign}{seconds_text(seconds)} s" if abs(seconds) >= 1 else f"{sign}{seconds * 1e3:.3g} ms"


def beside_record(found: Beside) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "verdict": verdict(found),
        "predicted_s": found.prediction.time_s,
        "measured_s": found.measured_s,
        "error": found.error,
        "inside": found.prediction.time_s_low <= found.measured_s <= found.prediction.time_s_high,
        "memory": [
            {"kind": one.memory_kind, "predicted": found.prediction.peak_memory_bytes, "measured": one.memory_bytes}
            for one in found.observed
            if one.memory_bytes
        ],
        "parts_s": {name: {"predicted": mine, "measured": theirs} for name, (mine, theirs) in found.parts().items()},
        "differs_most": found.blamed(),
    }
