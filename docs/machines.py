"""Writes docs/machines.md: errors on machines that were not looked at, and how often intervals hold there.

    python docs/machines.py

For every machine of `data/manifest.yaml` that ran something, its own measurements of hosts and of sustained load are
left out of the profile, its runs are predicted, and the width of intervals is set by the runs of all other machines.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from statistics import geometric_mean, mean, median
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from cpsim.calibrate.fit import current, fit_sustained, usable, with_enough_calls  # noqa: E402
from cpsim.calibrate.fit_host import fit_elementwise, fit_hosts, host_spread  # noqa: E402
from cpsim.calibrate.measurement import load  # noqa: E402
from cpsim.calibrate.recipes import DATA, manifest, measurements, points_file, stand_in  # noqa: E402
from cpsim.calibrate.residuals import large, residuals  # noqa: E402
from cpsim.case.resolve import cluster_of  # noqa: E402
from cpsim.case.scenario import Scenario  # noqa: E402
from cpsim.models.attention.discrepancy import NONE  # noqa: E402
from cpsim.models.host_speed import load_host  # noqa: E402
from cpsim.models.profile import Profile, load_profile, save_profile  # noqa: E402
from cpsim.models.uncertainty import WIDER  # noqa: E402
from cpsim.prediction.compare import Comparison, Pair, chances_of, compare, grouped, predict_runs  # noqa: E402
from cpsim.prediction.runs import holds_runs, load_runs  # noqa: E402

PAGE: Final = Path(__file__).with_name("machines.md")
HOSTS: Final = ROOT / "studies" / "windows" / "hosts"
COVERAGE: Final = 0.9
HOST_BOUND: Final = 0.15
"""Half of an interval, in logarithms and before it is widened, from which on a host decides."""
FEWEST: Final = 8
"""Runs of a machine that has a row of its own."""

INTRODUCTION: Final = """# On machines that were not looked at

Written by `python docs/machines.py`. Each machine that ran something is left out in turn: what it measured of its own
host and of kernels under seconds of load is taken out of the profile, and its runs are predicted. Fits of kernels, and
of the network inside a node, are those of all machines: they are fitted to thousands of single calls, of which one
machine has few. No parameter is fitted to runs.

Errors are predicted over measured time, less one, of runs on one node; *sign* is their mean. *Half-width* is half of
the 90 % interval, the median. One number is taken from runs, and moves no estimate: `WIDER` of
`cpsim/models/uncertainty.py`, by which intervals are wider than the errors of parts make them, in logarithms. *Inside*
says how many runs of a machine lie in the interval if that number is set by the other machines: {scales}.
*Slower* says how many took longer than the interval; it reaches further to this side in a steady state, where limiters
swing within a second.

*Host-bound* are other people's codes where launches decide; *back to back* is protocol `streamed`.
"""
OF_HOSTS: Final = """## With the pace of hosts

Other people's code on the machines on which `cpsim calibrate --host` ran, with field `host` set to what it found there
(the mean where it ran several times), and without. It takes ten seconds, while the pace of a machine's hosts drifts: by
`python -m studies.windows.speed` it differs by 14 % from minute to minute, and the same case by 13 % from launch to
launch.

| time | runs | machines | mean error | sign | inside | without: mean error | sign | inside |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
OF_CHOICES: Final = """## The best of several strategies

Ways to compute the same thing on one machine, by our executor or by other people's code. *Regret* is how much longer
the chosen way took than the fastest one. *Stated* is the chosen way's P(best), *was best* how often it was, where ties
do not count. *Brier score* is the mean square of P(best) less 1 of the best way and less 0 of all others; a *guess*
gives all ways of a choice the same.

| choices of | choices | right or tied | regret | stated | was best | Brier score | of a guess |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
OF_CHANCES: Final = """## How often what was called best with so much probability was the best

All ways of all choices, by P(best).

| P(best) | ways | stated | was best |
| --- | --- | --- | --- |"""
OF_DISCREPANCY: Final = """## Kernels with the Gaussian process and without

Kernels are priced by [physics](models.md#attention-kernels), and by a
[Gaussian process](models.md#remaining-error-of-the-attention-model) of what it leaves over of single calls. *Without*
it the same physics stands alone. No fit saw these calls or runs, nor any call of the machines of the first row.

| what | number | mean error | sign | without it | sign |
| --- | --- | --- | --- | --- | --- |"""
UNSEEN: Final = ("h200-documents.jsonl", "h200-documents-2.jsonl", "h200-unseen.jsonl", "h200-unseen-256.jsonl")
"""Attention calls of three H200 that no fit reads."""
OF_KERNELS: Final = "our executor, 1 ms and more", "other people's code, from 10 ms up"
"""Regimes in which kernels decide."""
STEPS: Final = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0)
"""Ends of the rows of P(best)."""


@dataclass(frozen=True)
class Held:
    """A run of a machine that was left out."""

    machine: str
    pair: Pair

    @property
    def _sides(self) -> tuple[float, float]:
        p = self.pair.predicted
        return math.log(p.time_s / p.time_s_low) / WIDER, math.log(p.time_s_high / p.time_s) / WIDER

    @property
    def half_width(self) -> float:
        """Of the interval before it is widened, in logarithms."""
        return sum(self._sides) / 2

    @property
    def is_late(self) -> bool:
        """It took longer than predicted."""
        return self.pair.error < 0

    @property
    def score(self) -> float:
        """How much wider the interval must be to hold the run."""
        late = math.log(self.pair.run.time_s / self.pair.predicted.time_s)
        return abs(late) / max(self._sides[self.is_late], 1e-9)

    @property
    def is_inside(self) -> bool:
        """It is in the interval as it is shown."""
        return self.score <= WIDER

    @property
    def length(self) -> str:
        """How long it took, and its protocol."""
        seconds = self.pair.run.time_s
        long = "from 10 ms up" if seconds >= 1e-2 else "1 to 10 ms" if seconds >= 1e-3 else "shorter than 1 ms"
        return f"{long}{self.steady}"

    @property
    def steady(self) -> str:
        """What names of rows end with."""
        return ", back to back" * (self.pair.scenario.protocol == "streamed")

    @property
    def regime(self) -> str:
        """The row that it belongs to."""
        scenario, seconds = self.pair.scenario, self.pair.run.time_s
        if scenario.is_step:
            return "whole steps of few layers"
        if not is_others(scenario):
            return "our executor" + (", shorter than 1 ms" if seconds < 1e-3 else ", 1 ms and more")
        if self.half_width >= HOST_BOUND:
            return f"other people's code, host-bound{self.steady}"
        return f"other people's code, {'from 10 ms up' if seconds >= 1e-2 else 'shorter than 10 ms'}{self.steady}"


def is_others(scenario: Scenario) -> bool:
    """Whether it is attention of other people's code."""
    return scenario.implementation != "cpsim" and not scenario.is_step


@cache
def profile_without(name: str, machine: str) -> Profile:
    """A shipped profile without what one machine says of hosts and of seconds of load."""
    shipped, base, points = load_profile(name), stand_in(name), manifest()["points"]
    of = {Path(path).name: about.get("machine") for path, about in points.items()}
    others = [m for m in measurements(name) if of[m.source] != machine or not (m.of("host") or m.of("sustained"))]
    everything = current(others, shipped.gpu)
    chosen = with_enough_calls([p for p in everything if usable(p)], base)
    host = fit_hosts(chosen, fit_elementwise(chosen, base), base)
    launches = {**shipped.host.launch_s, **host.launch_s}  # calls that only this machine timed stay
    sustained, of_load = fit_sustained(everything)
    between, within = host_spread(others)
    return replace(
        shipped,
        host=replace(shipped.host, launch_s=launches),
        sustained={**shipped.sustained, **sustained},
        sigma={**shipped.sigma, "host": between, "host thread": within, "sustained": of_load},
    )


def physics(profile: Profile) -> Profile:
    """A profile without the Gaussian processes of its kernels."""
    alone = {
        key: params.everywhere(lambda each: replace(each, discrepancy=NONE))
        for key, params in profile.attention.items()
    }
    return replace(profile, attention=alone)


def pace(machine: str, profile: Profile) -> float | None:
    """How much longer launches take on a machine than a profile says, by what `cpsim calibrate --host` found there;
    None where it did not run."""
    files = [*HOSTS.glob(f"{machine}-*.json")] or [*(DATA / "runs" / machine).glob("host.json")]
    return geometric_mean([load_host(str(file)).factor(profile.host)[0] for file in files]) if files else None


def held_out(change: Callable[[Profile], Profile] = lambda profile: profile, *, paced: bool = False) -> list[Held]:
    """All runs on one node, each predicted without its machine, by profiles with a change; if paced, those of other
    people's code on machines whose hosts were timed, with what that found."""
    files, found = manifest()["runs"], list[Held]()
    by_machine = grouped(
        [name for name, about in files.items() if "left_out" not in about and holds_runs(DATA / name)],
        lambda name: files[name]["machine"],
    )
    with TemporaryDirectory() as folder:
        for machine, names in by_machine.items():
            runs = [run for name in names for run in load_runs(DATA / name)]
            runs = [run for run in runs if run.scenario.part is None and cluster_of(run.scenario).num_nodes == 1]
            for profile, mine in grouped(runs, lambda run: cluster_of(run.scenario).profile).items():
                path, made = Path(folder) / f"{machine}-{profile}.json", change(profile_without(str(profile), machine))
                save_profile(made, path)
                told: dict[str, object] = {"profile": str(path)}
                if paced:
                    told["host"] = pace(machine, made)
                    mine = [run for run in mine if told["host"] and is_others(run.scenario)]
                asked = [replace(run, scenario=run.scenario.model_copy(update=told)) for run in mine]
                found += [Held(machine, pair) for pair in compare(predict_runs(asked), asked).pairs]
    return found


def scale_of(runs: Sequence[Held]) -> float:
    """By how much intervals must be wider so that they hold as many runs as they promise."""
    return float(np.quantile([run.score for run in runs], COVERAGE))


def row(name: str, runs: Sequence[Held], scales: dict[str, float]) -> str:
    """One line of a table."""
    errors = [run.pair.error for run in runs]
    inside = mean(run.score <= scales[run.machine] for run in runs)
    slower = mean(run.is_late and run.score > scales[run.machine] for run in runs)
    half = median(math.exp(run.half_width * scales[run.machine]) - 1 for run in runs)
    cells = [f"{mean(map(abs, errors)):.1%}", f"{mean(errors):+.1%}", f"{inside:.0%}", f"{slower:.0%}", f"{half:.1%}"]
    return f"| {name} | {len(runs)} | {' | '.join(cells)} |".replace("%", " %")


def page(runs: Sequence[Held], alone: Sequence[Held], paced: Sequence[Held]) -> str:
    """The page, from all runs, as they are predicted, as physics alone predicts them, and with paces of hosts."""
    machines = sorted({run.machine for run in runs})
    scales = {machine: scale_of([run for run in runs if run.machine != machine]) for machine in machines}
    head = [
        "| {} | runs | mean error | sign | inside | slower | half-width |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    between = f"{min(scales.values()):.2f} to {max(scales.values()):.2f}, all together {scale_of(runs):.2f}"
    lines = [INTRODUCTION.format(scales=between), head[0].format("regime"), head[1]]
    lines += [row(name, mine, scales) for name, mine in sorted(grouped(runs, lambda run: run.regime).items())]
    theirs = [run for run in runs if is_others(run.pair.scenario)]
    lines += ["", "## Other people's code, machine by machine", "", head[0].format("machine"), head[1]]
    by_machine = grouped(theirs, lambda run: run.machine)
    lines += [row(name, by_machine[name], scales) for name in machines if len(by_machine.get(name, ())) >= FEWEST]
    return "\n".join([*lines, "", *hosts(runs, paced), "", *choices(runs), "", *discrepancy(runs, alone)]) + "\n"


def hosts(runs: Sequence[Held], paced: Sequence[Held]) -> list[str]:
    """What timing a machine's hosts is worth."""
    lines, without = [OF_HOSTS], {(run.machine, run.pair.run.samples_s): run for run in runs}
    for name, mine in sorted(grouped(paced, lambda run: run.length).items()):
        cells = [f"{len({run.machine for run in mine})}"]
        for each in (mine, [without[run.machine, run.pair.run.samples_s] for run in mine]):
            errors, inside = [run.pair.error for run in each], mean(run.is_inside for run in each)
            cells += [f"{mean(map(abs, errors)):.1%}", f"{mean(errors):+.1%}", f"{inside:.0%}"]
        lines.append(f"| {name} | {len(mine)} | {' | '.join(cells)} |".replace("%", " %"))
    return lines


def choices(runs: Sequence[Held]) -> list[str]:
    """How often the strategy that is predicted to be the fastest is, and how often it is said to be, in groups of cases
    that differ in nothing else."""
    lines, everything = [OF_CHOICES], list[tuple[float, bool]]()
    for name, mine in sorted(grouped(runs, lambda run: run.regime.split(",")[0] + run.steady).items()):
        of_machine = grouped(mine, lambda run: run.machine).values()
        found = [c for held in of_machine for c in Comparison(pairs=tuple(h.pair for h in held)).choices()]
        if found:
            chances = [choice.chances() for choice in found]
            of_all, first = (chances_of(each) for each in (list(chain(*chances)), [each[0] for each in chances]))
            guess = chances_of([(1 / len(each), was) for each in chances for _, was in each])
            right, regret = mean(c.is_right or c.is_tied for c in found), mean(c.regret for c in found)
            cells = [f"{right:.0%}", f"{regret:.1%}", f"{first.stated:.0%}", f"{first.was:.0%}"]
            scores = f"{of_all.brier:.3f} | {guess.brier:.3f}"
            lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} | {scores} |".replace("%", " %"))
            everything += chain(*chances)
    lines += ["", OF_CHANCES]
    for low, high in pairwise(STEPS):
        of = chances_of([(p, was) for p, was in everything if low <= p < high or p == high == 1])
        lines.append(f"| {low:.0%} to {high:.0%} | {of.num} | {of.stated:.1%} | {of.was:.1%} |".replace("%", " %"))
    return lines


def discrepancy(runs: Sequence[Held], alone: Sequence[Held]) -> list[str]:
    """What the Gaussian processes of kernels are worth, for single calls and for runs."""
    profile = load_profile("h200")
    points = [p for name in UNSEEN for p in load(points_file(name)).of("attention") if usable(p)]

    def errors(which: Profile, runs: Sequence[Held]) -> dict[str, list[float]]:
        rows = [row for row in residuals(which, points) if large(row.point)]
        long = [run for run in runs if run.regime.startswith(OF_KERNELS)]
        found = {"calls of kernels, three H200": [row.predicted_s / row.measured_s - 1 for row in rows]}
        return found | {name: [run.pair.error for run in mine] for name, mine in sorted(grouped(long, of_gpu).items())}

    lines, without = [OF_DISCREPANCY], errors(physics(profile), alone)
    for name, mine in errors(profile, runs).items():
        cells = [f"{mean(map(abs, each)):.1%} | {mean(each):+.1%}" for each in (mine, without[name])]
        lines.append(f"| {name} | {len(mine)} | {' | '.join(cells)} |".replace("%", " %"))
    return lines


def of_gpu(run: Held) -> str:
    """The regime of a run, and its GPU."""
    return f"{run.regime}, {cluster_of(run.pair.scenario).gpu.name.upper()}"


if __name__ == "__main__":
    PAGE.write_text(page(held_out(), held_out(physics), held_out(paced=True)), encoding="utf-8")
