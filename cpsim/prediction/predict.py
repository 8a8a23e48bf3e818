"""Predictions: a scenario in, times with intervals out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.gpu import Gpu, find_gpu, gpu_of_driver
from cpsim.case.load import ScenarioLike, as_scenario
from cpsim.case.resolve import flops_of, model_of, notes_of
from cpsim.case.scenario import Scenario
from cpsim.case.workload import LATENT, Workload
from cpsim.errors import CpsimError, InfeasibleError, MachineError
from cpsim.models import sparse
from cpsim.models.cost_models import GROUPS
from cpsim.models.feasible import LATENT_SIGMA
from cpsim.models.gemm import FP8_SIGMA, GROUPED_SIGMA
from cpsim.models.profile import Profile
from cpsim.models.uncertainty import Draws, Floats, draws_of, seed_of
from cpsim.prediction.case import Case, resolve
from cpsim.prediction.passes import PassResult, TooSlowError, least_backward_s, run_pass
from cpsim.prediction.results import Change, Column, Infeasible, Prediction, prediction_columns, refused
from cpsim.prediction.step.costs import PARTS
from cpsim.prediction.step.step import Step
from cpsim.prediction.step_changes import would_fit
from cpsim.prediction.steps import StepCase
from cpsim.runtime.processes import DIED, Progress, mapped, one_by_one
from cpsim.schedule.schedule import Pass
from cpsim.units import MS_PER_S

TOO_LARGE: Final = "expected a schedule that fits into this machine's memory; give fewer documents or GPUs"
HOST_BOUND: Final = 0.2
"""Share of the time from which on hosts are spoken of."""
QUICK_HOST: Final = 1.3
"""Standard deviations by which a fast host is faster than the mean one: one of ten is."""
CHUNK: Final = 8
"""Scenarios that a worker process takes at a time."""


def predict(case: ScenarioLike) -> Prediction:
    """Predict one case.

    Args:
        case: a scenario with a strategy, its fields, or the file that holds it.

    Returns:
        the time of the slowest rank with its 90 % interval, and the timelines that it was read from.

    Raises:
        ScenarioError: it has no strategy, or asks for something that is not there.
        InfeasibleError: the strategy cannot run it; the message says why.
        ProfileError: there are no costs for its GPU or kernel.

    Examples:
        >>> case = {"gpus": 4, "cluster": "h200-4", "tokens_per_gpu": 8192, "heads": 32, "kv_heads": 8}
        >>> answer = predict(case | {"strategy": "zigzag_ring"})
        >>> answer.time_s_low < answer.time_s < answer.time_s_high
        True
    """
    return _predict_scenario(as_scenario(case))


def _predict_scenario(scenario: Scenario, timelines: bool = True) -> Prediction:
    case = resolve(scenario)
    scenario = case.scenario
    if scenario.model is None or scenario.part == "layer":
        return prediction_of(case, timelines=timelines)
    steps = StepCase(scenario, case.cluster, case.profile)
    parallel, strategy = steps.parallel(), str(scenario.strategy)
    step = steps.simulate(parallel, strategy, scenario.knobs)
    changes = () if step.fits else would_fit(steps, parallel, strategy, scenario.knobs)
    return step_prediction(case, step, changes)


def predict_many(
    scenarios: Sequence[Scenario | CpsimError],
    jobs: int | None = None,
    progress: Progress | None = None,
    *,
    timelines: bool = True,
) -> list[Prediction | Infeasible | CpsimError]:
    """Predict many scenarios, on several processes; a bad one never loses the others.

    Args:
        scenarios: scenarios, or the errors that stand in their place.
        jobs: processes; None uses all cores.
        progress: called after every chunk.
        timelines: whether predictions have any, which hold every op; those of several processes have none.

    Returns:
        one entry per scenario, in order.
    """
    chunks = [scenarios[i : i + CHUNK] for i in range(0, len(scenarios), CHUNK)]
    ask = partial(_chunk, timelines=timelines and min(jobs or os.cpu_count() or 1, len(chunks)) == 1)

    def count(done: int, _: int) -> None:
        if progress:
            progress(min(done * CHUNK, len(scenarios)), len(scenarios))

    results = mapped(ask, chunks, jobs, count, _died)
    return [entry for chunk in results for entry in chunk]


def sweep(
    cases: Iterable[ScenarioLike | CpsimError], jobs: int | None = 1, progress: Progress | None = None
) -> dict[str, Column]:
    """Predict many cases into columns, one row per case, in order; a bad one never loses the others.

    Args:
        cases: cases with a strategy, or the errors that stand in their place, as ``grid`` and ``load_scenarios``
            make them.
        jobs: processes; None uses all cores. Scripts that ask for several need ``if __name__ == "__main__"``.
        progress: called after every chunk.

    Returns:
        Columns of equal length, numpy arrays that ``pandas.DataFrame`` and ``polars.DataFrame`` take as they are:
        the case (``strategy``, ``knobs``, ``gpus``, ``tokens`` ...), what is predicted in SI units (``time_s``,
        ``time_s_low``, ``time_s_high``, ``tflops_per_gpu``, ``exposed_comm_s``, ``bytes_sent_per_gpu``,
        ``peak_memory_bytes``, ``planning_s``; of training steps ``tokens_per_s_per_gpu`` and ``mfu``), ``kind``
        (``cannot``, ``not_measured``, ``does_not_fit``, or empty) and ``error``. Where there is an error, numbers are
        NaN; of a case that cannot be read, ``gpus`` and ``tokens`` are 0 and words are empty.

    Examples:
        >>> from cpsim.case.load import grid
        >>> case = {"gpus": 4, "cluster": "h200-4", "tokens_per_gpu": 8192, "heads": 32, "kv_heads": 8}
        >>> columns = sweep(grid(case, {"strategy": ["ring", "zigzag_ring"], "mask": ["full", "causal"]}))
        >>> columns["mask"].tolist()
        ['full', 'causal', 'full', 'causal']
        >>> bool(columns["time_s"].argmin() == 3)
        True
    """
    asked = [_or_error(case) for case in cases]
    return prediction_columns(asked, predict_many(asked, jobs, progress, timelines=False))


def _or_error(case: ScenarioLike | CpsimError) -> Scenario | CpsimError:
    try:
        return case if isinstance(case, CpsimError) else as_scenario(case)
    except CpsimError as error:
        return error


def _chunk(
    scenarios: Sequence[Scenario | CpsimError], timelines: bool = False
) -> list[Prediction | Infeasible | CpsimError]:
    return [attempt(s, timelines=timelines) for s in scenarios]


def _died(scenarios: Sequence[Scenario | CpsimError]) -> list[Prediction | Infeasible | CpsimError]:
    """Answers to scenarios one of which ends the process that predicts it."""
    return one_by_one(_chunk, scenarios, lambda _: MachineError(DIED))


def attempt(scenario: Scenario | CpsimError, *, timelines: bool = False) -> Prediction | Infeasible | CpsimError:
    """The answer to one scenario of many, or what is wrong with it: nothing that happens to one loses the others."""
    if isinstance(scenario, CpsimError):
        return scenario
    try:
        return _predict_scenario(scenario, timelines)
    except InfeasibleError as reason:
        return refused(scenario, reason)
    except CpsimError as error:
        return error
    except MemoryError:
        return CpsimError(TOO_LARGE)
    except OSError as error:
        return MachineError(f"{error.filename or 'this machine'}: {error.strerror or error}")
    except Exception as error:  # a mistake of ours
        return CpsimError(f"internal error: {type(error).__name__}: {error}")


def prediction_of(case: Case, *, timelines: bool = True) -> Prediction:
    """The prediction of a resolved case: attention, or a layer around it; with timelines, which hold every op, or not.

    Raises:
        InfeasibleError: the strategy cannot run it; the message says why.
        ProfileError: there are no costs for its kernel.
    """
    return of_passes(case, run_passes(case, timelines=timelines))


def predictions_of(case: Case) -> tuple[Prediction, Prediction, Prediction]:
    """The predictions of the forward pass alone, of the backward pass as it follows, and of both in one window.

    Raises:
        InfeasibleError, ProfileError: as ``prediction_of``.
    """
    forward, backward, both = (
        replace(case, scenario=case.scenario.model_copy(update={"pass_": pass_})) for pass_ in ("fwd", "bwd", "fwd_bwd")
    )
    passes = run_passes(both)
    first, second = ({name: passes[name]} for name in both.scenario.passes)
    drawn = _drawn(both, passes)
    return of_passes(forward, first, drawn), of_passes(backward, second, drawn), of_passes(both, passes, drawn)


def run_passes(case: Case, most_s: float = float("inf"), *, timelines: bool = True) -> dict[Pass, PassResult]:
    """Passes in one window: hosts launch the second as soon as they have launched the first.

    Args:
        case: the case.
        most_s: passes are left out where all would surely take longer than that [s], see ``least_backward_s``, which
            needs timelines.
        timelines: whether they are kept, which hold every op.

    Raises:
        InfeasibleError, ProfileError: as ``prediction_of``.
    """
    case.code.check_kernel(case.scenario.kernel, case.scenario.strategy, case.workload.sinks)
    done, ahead, left = dict[Pass, PassResult](), 0.0, most_s
    for pass_ in case.scenario.passes:
        if done and left < float("inf") and least_backward_s(case, done["fwd"]) > left:
            break
        try:
            done[pass_] = run_pass(case, pass_, ahead, left)
        except TooSlowError:
            break
        if not timelines:
            done[pass_] = done[pass_].without_timelines()
        ahead = max(0.0, done[pass_].time_s - done[pass_].host_s)
        left -= done[pass_].time_s
    return done


def window_s(case: Case, passes: Mapping[Pass, PassResult]) -> float:
    """How long passes take together: ``time_s`` of their prediction [s]."""
    done = list(passes.values())
    busy = sum(p.time_s for p in done)
    if case.scenario.protocol == "streamed":
        busy = max(busy, sum(p.host_s for p in done))
    return busy + done[-1].planning.exposed_s(busy)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Times that passes take where costs are others than the models say, found once for all windows that hold them."""

    draws: Draws
    makespans: Mapping[Pass, Floats]
    """With every draw of the models' errors, ``[NUM_DRAWS]``."""
    on_hosts: Mapping[Pass, Floats]
    """On quick hosts, and where nothing is launched."""


def _drawn(case: Case, passes: Mapping[Pass, PassResult]) -> _Drawn:
    draws, hosts = draws_for(case, list(passes.values())), _hosts(case)
    return _Drawn(
        draws,
        {name: one.makespans(draws) for name, one in passes.items()},
        {name: one.with_hosts(hosts) for name, one in passes.items()},
    )


def of_passes(case: Case, passes: Mapping[Pass, PassResult], drawn: _Drawn | None = None) -> Prediction:
    """The prediction that follows from simulated passes, and from draws where a longer window has made them."""
    scenario, cluster, done = case.scenario, case.cluster, list(passes.values())
    drawn = drawn or _drawn(case, passes)
    parts = {name: sum(p.parts_s[name] for p in done) for name in GROUPS}
    planning, busy, host = done[-1].planning, sum(p.time_s for p in done), 0.0
    if scenario.protocol == "streamed":  # in a steady state the slower of GPUs, with their network, and hosts decides
        host = sum(p.host_s for p in done)
        parts["host"] += max(0.0, host - busy)
        busy = max(busy, host)
    quick, captured = np.maximum(sum(drawn.on_hosts[name] for name in passes), host * _hosts(case)).tolist()
    late = planning.exposed_s(busy)
    makespans = np.maximum(sum(drawn.makespans[name] for name in passes), host * drawn.draws.factor("host"))
    draws = drawn.draws.around(busy + late, makespans * drawn.draws.noise() + late)
    parts["planning"] = late
    notes = (
        *_grades(case),
        *notes_of(scenario),
        *_faults(cluster),
        *(note for p in done for note in p.notes),
        *planning.notes,
        *_network_notes(cluster),
        *_host_notes(case, busy, quick, captured),
    )
    return Prediction(
        scenario=scenario,
        time_s=busy + late,
        time_s_low=float(np.quantile(draws, 0.05)),
        time_s_high=float(np.quantile(draws, 0.95)),
        draws_s=tuple(draws.tolist()),
        tflops_per_gpu=flops_of(scenario, case.workload) / cluster.num_gpus / (busy + late) / 1e12,
        exposed_comm_s=sum(p.exposed_s for p in done),
        host_share=max(0.0, 1 - captured / busy),
        bytes_sent_per_gpu=float(np.sum([p.sent for p in done], axis=0).max()),
        peak_memory_bytes=max(p.memory_bytes for p in done),
        planning_s=planning.seconds,
        parts_s={name: seconds for name, seconds in parts.items() if seconds > 0},
        notes=tuple(dict.fromkeys(notes)),
        timelines={pass_: p.timeline for pass_, p in passes.items() if p.timeline is not None},
    )


def _hosts(case: Case) -> Floats:
    """How many times as long quick hosts take, and those that launch nothing."""
    return np.array([np.exp(-QUICK_HOST * case.profile.sigma["host"]), 0.0])


def _host_notes(case: Case, seconds: float, quick: float, captured: float) -> tuple[str, ...]:
    """How much of the time hosts decide, and what it would be on a fast one and without launches."""
    share = 1 - captured / seconds
    if case.code.captured or share < HOST_BOUND:
        return ()
    known = case.scenario.host is not None or case.cluster.host is not None
    told = "" if known else "; `cpsim calibrate --host` tells how fast this one is"
    on_fast = "" if known else f"{quick * MS_PER_S:.3g} ms on a fast host, "
    return (
        f"host-bound: launches by Python are {share:.0%} of this time; {on_fast}{captured * MS_PER_S:.3g} ms where "
        f"CUDA graphs launch all at once{told}",
    )


def draws_for(case: Case, passes: Sequence[PassResult]) -> Draws:
    """The draws of a prediction: strategies that came to equal schedules get equal ones, and tie."""
    words = f"{case.code.name} {case.scenario.kernel}"
    profile, given = case.profile, case.conditions()
    if given.sparse is not None:
        profile = _of_chosen(profile, given.sparse, given.cluster.gpu, given.kernel)
    elif (given.head_dim, given.value_dim) == LATENT:
        profile = _of_latents(profile, given.kernel)
    return draws_of(
        profile,
        case.cluster,
        case.scenario.kernel,
        captured=case.code.captured,
        layers=case.scenario.model is not None,
        steady=case.scenario.protocol == "streamed",
        seed=seed_of(words, *(outcome.content for one in passes for outcome in one.outcomes)),
    )


def _of_chosen(profile: Profile, workload: Workload, gpu: Gpu, kernel: str) -> Profile:
    """With the uncertainty of kernels of chosen keys in place of that of a dense one."""
    wider = {f"attention {one} {kernel}": sparse.sigma(workload, profile, gpu, one) for one in ("fwd", "bwd")}
    return replace(profile, sigma={**profile.sigma, **wider})


def _of_latents(profile: Profile, kernel: str) -> Profile:
    """With the uncertainty of attention to latents beside that of a kernel."""
    name = f"attention fwd {kernel}"
    return replace(profile, sigma={**profile.sigma, name: float(np.hypot(profile.sigma[name], LATENT_SIGMA))})


def _less_sure(profile: Profile, scenario: Scenario) -> Profile:
    """With the uncertainty of products in FP8 and of those of experts, which follow from others."""
    more = {FP8_SIGMA: scenario.precision not in (None, "bf16"), GROUPED_SIGMA: bool(model_of(scenario).experts)}
    sigma = [profile.sigma["matrix products"], *(each for each, has in more.items() if has)]
    return replace(profile, sigma={**profile.sigma, "matrix products": float(np.linalg.norm(sigma))})


def step_prediction(case: Case, step: Step, changes: Sequence[Change] | None = None) -> Prediction:
    """A simulated training step as a prediction, with its interval; it has no timelines.

    Args:
        case: whose step it is.
        step: what was simulated.
        changes: with which it would fit, where it does not; None where they are not asked for.
    """
    scenario = case.scenario
    label = f"{scenario.strategy} {sorted(scenario.knobs.items())} {scenario.kernel} {scenario.parallel}"
    profile, workload = _less_sure(case.profile, scenario), case.workload
    if workload.sparse is not None:
        profile = _of_chosen(profile, workload, case.cluster.gpu, scenario.kernel)
    drawn = draws_of(
        profile,
        case.cluster,
        scenario.kernel,
        captured=case.code.captured,
        layers=True,
        steady=True,
        seed=seed_of(label),
    )
    draws = drawn.around(step.time_s, drawn.along({name: step.parts[name] for name in PARTS}) * drawn.noise())
    tflops = step.flops / scenario.gpus / step.time_s / 1e12
    too_large = () if step.fits or changes is None else (too_large_text(step, changes),)
    return Prediction(
        scenario=scenario,
        time_s=step.time_s,
        time_s_low=float(np.quantile(draws, 0.05)),
        time_s_high=float(np.quantile(draws, 0.95)),
        draws_s=tuple(draws.tolist()),
        tflops_per_gpu=tflops,
        exposed_comm_s=sum(seconds for name, seconds in step.parts.items() if name.startswith(("coll", "transfer"))),
        host_share=step.parts.get("host", 0.0) / step.time_s,
        bytes_sent_per_gpu=step.sent,
        peak_memory_bytes=step.peak_memory_bytes,
        planning_s=0.0,
        parts_s={name: seconds for name, seconds in step.parts.items() if seconds > 0},
        notes=tuple(
            dict.fromkeys((*too_large, *_grades(case), *notes_of(scenario), *step.notes, *_network_notes(case.cluster)))
        ),
        timelines={},
        memory=asdict(step.fullest),
        gpu_memory_bytes=step.gpu_bytes,
        fits=step.fits,
        would_fit=tuple(changes or ()),
        tokens_per_s_per_gpu=scenario.num_tokens / scenario.gpus / step.time_s,
        mfu=tflops * 1e12 / case.cluster.gpu.peak_flops_per_s,
    )


def too_large_text(step: Step, changes: Sequence[Change]) -> str:
    """What a step that does not fit needs, and what would, in words."""
    if not changes:
        return f"{step.too_large()}; no single change does, and `cpsim advise --step` tries several at once"
    would = (
        f"{one} ({one.needed_bytes / 1e9:.1f} GB, {100 * (one.time_s / step.time_s - 1):+.0f} % time)"
        for one in changes
    )
    return f"{step.too_large()}; what would: {', '.join(would)}"


def _grades(case: Case) -> tuple[str, ...]:
    """What the costs rest on, in words."""
    profile = case.profile
    grade = f"costs on the GPU: profile {profile.name}, {profile.grade}"
    mine, theirs = find_gpu(case.cluster.gpu.name), gpu_of_driver(profile.gpu)
    other = case.cluster.gpu.name != profile.gpu and (theirs is None or mine != theirs)
    if case.cluster.profile is not None and case.scenario.profile is not None and other:
        return (grade, f"profile {profile.name} describes another machine than cluster {case.cluster.name}")
    return (grade,)


def _faults(cluster: Cluster) -> tuple[str, ...]:
    return (f"faults: {', '.join(map(str, cluster.faults))}",) if cluster.faults else ()


def _network_notes(cluster: Cluster) -> tuple[str, ...]:
    fabric = cluster.fabric
    if fabric is None or cluster.num_nodes == 1:
        return ()
    return (f"network between nodes of {cluster.name}: {fabric.grade} ({fabric.source})",)
