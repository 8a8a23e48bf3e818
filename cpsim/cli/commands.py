"""The command line: one short function per verb. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpsim.cli import reproduce as cli_reproduce
from cpsim.cli.terminal import Jobs, Json, check_writable, console, part_bars, progress_bar, refuse, typed
from cpsim.errors import CpsimError
from cpsim.runtime.allocator import keep_freed_memory
from cpsim.runtime.interrupts import INTERRUPTED, unwinding

if TYPE_CHECKING:
    from cpsim.calibrate.measurement import Measurements
    from cpsim.case.scenario import Scenario
    from cpsim.models.profile import Profile
    from cpsim.prediction.results import Advice, Infeasible, Prediction
    from cpsim.prediction.runs import Run

    Results = list[Prediction | Infeasible | CpsimError]

app = typer.Typer(
    help="Predicts which context-parallel attention strategy to run, how long it takes and how sure that is.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_reproduce.app)

USER_ERROR = 2
Scenarios = Annotated[Path, typer.Argument(metavar="FILE", help="Scenarios: YAML, JSON, or JSON Lines.")]
EXPLORED = {
    "gpus": 96,
    "cluster": "dgx-h200",
    "tokens_per_gpu": 8192,
    "mask": "causal_document",
    "heads": 32,
    "kv_heads": 8,
    "documents": {"distribution": "prolong512k", "seed": 42},
}
"""What `cpsim explore` begins with: the example of the README."""
KERNELS = "fa4,fa2,cudnn,sdpa_flash"
Base = Annotated[str | None, typer.Option(help="A profile that gives what was not measured.")]
OneScenario = Annotated[Path, typer.Argument(metavar="FILE", help="One scenario: YAML or JSON.")]
RunFolder = Annotated[Path | None, typer.Option(help="Folder of run files to set predictions beside.")]


def main() -> None:
    """Entry point: user errors are one line on stderr and exit code 2."""
    keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:  # matrices are small, and threads that wait take cores from other processes
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="cpsim", standalone_mode=False)
    except CpsimError as error:
        status = _fail(str(error))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # the reader, e.g. `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except MemoryError:
        status = _fail("expected a case that fits into this machine's memory; give fewer tokens, documents or GPUs")
    except OSError as error:
        status = _fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a wrong option or argument: our own mistake
            raise
        asked = getattr(getattr(error, "ctx", None), "command_path", "cpsim")
        status = _fail(f"{error.format_message()} See `{asked} --help`.") if error.format_message() else USER_ERROR
    sys.exit(status or 0)


def _said() -> str:
    """The command as it was given, for provenance; of absolute paths only the last name."""
    return shlex.join(["cpsim", *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])])


def _machine(command: str, gpus: int | None, cpu: int | None) -> tuple[int, str]:
    """How many GPUs, or processes on a CPU, a command uses, and which."""
    from cpsim.cli.launch import local_gpus

    if cpu:
        refuse(f"{command}: --cpu uses no GPUs", {"--gpus": gpus})
    available = local_gpus(command)
    if cpu:
        return cpu, "cpu"
    if not available:
        raise CpsimError(f"{command}: this machine has no GPU that PyTorch can use; try `--cpu 2`")
    return min(gpus or len(available), len(available)), available[0]


def _fail(message: str) -> int:
    print(f"cpsim: {' '.join(message.split())}", file=sys.stderr)
    return USER_ERROR


@app.command()
def predict(
    file: Scenarios,
    out: Annotated[Path | None, typer.Option(help="Write JSON Lines to this file, in input order.")] = None,
    as_json: Json = False,
    jobs: Jobs = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the one scenario, for Perfetto.")] = None,
) -> None:
    """Predict the time of every scenario in FILE; one bad line never stops the others."""
    check_writable(out, trace)
    scenarios, results = _predict_file(file, jobs)
    if trace:
        _trace_results(trace, results)
    if out:
        out.write_text(_lines(scenarios, results), encoding="utf-8")
    if as_json:
        sys.stdout.write(_lines(scenarios, results))
    elif not out:
        from cpsim.report.tables import prediction_view

        console().print(prediction_view(results))
    _report_failures(results)


def _trace_results(path: Path, results: Results) -> None:
    from cpsim.prediction.results import Prediction

    if len(results) != 1:
        raise CpsimError(f"trace: expected one scenario, got {len(results)}; give it a file of its own")
    if isinstance(results[0], Prediction):
        _write_trace(path, results[0])
        print(f"Trace written to {path}; open it in ui.perfetto.dev", file=sys.stderr)


def _write_trace(path: Path, prediction: Prediction) -> None:
    """Write the ops of a prediction, if they were simulated one by one."""
    from cpsim.report.trace import write_prediction

    if not prediction.timelines:
        raise CpsimError(
            "trace: expected attention or a layer whose ops are simulated one by one, got a training step or a "
            "ring that continues shorter ones; use `part: layer` or fewer GPUs"
        )
    write_prediction(path, prediction)


@app.command()
def trace(
    file: OneScenario,
    out: Annotated[Path, typer.Option(help="Write the trace to this file; .json, or compressed .json.gz.")],
    strategy: Annotated[str | None, typer.Option(help="What to trace, where FILE names no strategy; the best.")] = None,
    as_json: Json = False,
) -> None:
    """Write a trace for Perfetto: every rank and stream, arrows between ranks, what links carry."""
    from cpsim.case.scenario import as_scenario, load_scenario
    from cpsim.prediction.predict import predict as ask

    check_writable(out)
    scenario = load_scenario(file)
    if strategy:
        scenario = as_scenario(scenario.to_dict() | {"strategy": strategy, "knobs": {}})
    if scenario.strategy is None:
        scenario = _best(scenario)
    prediction = ask(scenario)
    _write_trace(out, prediction)
    num_ops = {pass_: len(timeline.schedule) for pass_, timeline in prediction.timelines.items()}
    if as_json:
        fields = {"strategy": scenario.strategy, "knobs": dict(scenario.knobs), "ops": num_ops, "out": str(out)}
        print(json.dumps(fields))
    else:
        from cpsim.report.words import strategy_label

        total = f"{sum(num_ops.values()):,} ops of {strategy_label(scenario)} on {scenario.gpus} GPUs"
        print(f"{total}, written to {out}; open it in ui.perfetto.dev")


def _best(scenario: Scenario) -> Scenario:
    from cpsim.prediction.predict import advise as ask

    with progress_bar("Trying strategies") as progress:
        candidates = ask(scenario, progress).candidates
    if not candidates:
        raise CpsimError("trace: no strategy can run this case; `cpsim advise` says why")
    best = candidates[0].scenario
    return scenario.model_copy(update={"strategy": best.strategy, "knobs": best.knobs})


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Scenarios, or a grid of them: YAML, JSON, JSON Lines.")],
    out: Annotated[Path, typer.Option(help="Folder of Parquet files; or a .jsonl file, written at the end.")],
    as_json: Json = False,
    jobs: Jobs = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask cluster to use instead of cores.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the folder holds.")] = False,
) -> None:
    """Predict many scenarios, or all combinations of a grid, and say how it went."""
    if out.suffix == ".jsonl":
        if scheduler or resume:
            raise CpsimError(f"{out}: --scheduler and --resume need a folder of Parquet files; leave .jsonl out")
        _sweep_lines(file, out, as_json, jobs)
        return
    from cpsim.prediction.sweep import failures, load_sweep, run_sweep

    if out.is_file() or not out.parent.is_dir():
        raise CpsimError(f"{out}: expected a folder, or a name in a folder that exists")
    started, asked = time.monotonic(), load_sweep(file)
    with progress_bar("Predicting") as progress:
        done = run_sweep(asked, out, jobs=jobs, scheduler=scheduler, resume=resume, progress=progress)
    _say_swept(done.num_scenarios, done.num_predicted, time.monotonic() - started, out, as_json)
    _print_failures(failures(out, 20), done.num_scenarios - done.num_predicted, done.num_scenarios)
    if done.num_predicted == 0:
        raise typer.Exit(USER_ERROR)


def _sweep_lines(file: Path, out: Path, as_json: bool, jobs: int | None) -> None:
    check_writable(out)
    started = time.monotonic()
    scenarios, results = _predict_file(file, jobs)
    out.write_text(_lines(scenarios, results), encoding="utf-8")
    summary = _summary(results, time.monotonic() - started)
    _say_swept(summary["num_scenarios"], summary["num_predicted"], summary["duration_s"], out, as_json)
    _report_failures(results)


def _say_swept(num_scenarios: int, num_predicted: int, duration_s: float, out: Path, as_json: bool) -> None:
    if as_json:
        summary = {"num_scenarios": num_scenarios, "num_predicted": num_predicted, "duration_s": duration_s}
        print(json.dumps({**summary, "out": str(out)}))
    else:
        console().print(
            f"{num_predicted:,} of {num_scenarios:,} scenarios predicted in {duration_s:.1f} s, written to {out}",
            highlight=False,
            markup=False,
        )


@app.command()
def advise(
    file: OneScenario,
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a report to this file; it opens offline.")] = None,
    step: Annotated[bool, typer.Option("--step", help="Cut a whole training step: tp, pp, dp, cp, strategy.")] = False,
    runs: RunFolder = None,
) -> None:
    """Rank every strategy that can run the case in FILE, and say why the others cannot."""
    if step:
        refuse("advise: training steps have no page", {"--html": html, "--runs": runs})
        _advise_step(file, as_json)
        return
    from cpsim.case.scenario import load_scenario
    from cpsim.prediction.predict import advise as ask
    from cpsim.prediction.runs import runs_in
    from cpsim.report.words import recommendation

    if html is None:
        refuse("advise: only the page of --html shows runs", {"--runs": runs})
    check_writable(html)
    scenario = load_scenario(file)
    measured = runs_in(runs or _shipped_runs()) if html else []
    with progress_bar("Trying strategies") as progress:
        advice = ask(scenario, progress=progress)
    if as_json:
        from cpsim.report.records import advice_record

        print(json.dumps(advice_record(advice, recommendation(advice)), indent=1))
    else:
        from cpsim.report.tables import advice_view

        console().print(advice_view(advice))
    if html:
        _write_report(html, advice, measured)


def _write_report(html: Path, advice: Advice, measured: list[Run]) -> None:
    from cpsim.report.frontier import predict_cells
    from cpsim.report.html import write_report
    from cpsim.report.lengths import predict_lengths

    with progress_bar("Predicting other lengths") as progress:
        lengths = predict_lengths(advice, progress)
    with progress_bar("Mapping lengths and GPUs") as progress:
        best = predict_cells(advice, progress)
    write_report(html, advice, lengths, best, measured)
    print(f"Report written to {html}", file=sys.stderr)


def _shipped_runs() -> Path | None:
    """Where the repository keeps its runs, in a clone."""
    folder = Path("validation/runs")
    return folder if folder.is_dir() else None


def _advise_step(file: Path, as_json: bool) -> None:
    from cpsim.case.scenario import load_scenario
    from cpsim.prediction.step_advice import advise_step
    from cpsim.report.steps import step_advice_record, step_advice_view

    scenario = load_scenario(file)
    with progress_bar("Cutting the step") as progress:
        advice = advise_step(scenario, progress)
    if as_json:
        print(json.dumps(step_advice_record(advice), indent=1))
    else:
        console().print(step_advice_view(advice))


@app.command()
def explore(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="One scenario to begin with.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8050,
    host: Annotated[str, typer.Option(help="Address to listen on; only requests to it are answered.")] = "127.0.0.1",
    runs: RunFolder = None,
) -> None:
    """Open a local page in which a case can be changed: ranking, map, timeline, memory, mask, real runs."""
    if find_spec("dash") is None:
        raise CpsimError("explore: needs Dash, which is not installed; pip install '.[explore]'")
    from cpsim.case.scenario import load_scenario, scenario_from
    from cpsim.explore.server import serving

    start = load_scenario(file) if file else scenario_from(EXPLORED)
    with unwinding(), serving(start, runs or _shipped_runs(), host, port) as server:
        print(f"Explore at http://{host}:{server.server_port}/ and stop with Ctrl+C", file=sys.stderr, flush=True)
        server.serve_forever()
    raise typer.Exit(INTERRUPTED)  # nothing else ends it


@app.command()
def run(
    context: typer.Context,
    file: Scenarios,
    out: Annotated[Path | None, typer.Option(help="Write the runs to this file: JSON Lines.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to use; all where not given.")] = None,
    cpu: Annotated[int | None, typer.Option(min=1, help="Processes on the CPU instead: a try without GPUs.")] = None,
    emulate_nodes: Annotated[int, typer.Option(min=1, help="Nodes that this machine plays, linked by sockets.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0, help="Start no case after so many minutes.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Iterations to measure of every pass, in seconds.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the order of the cases.")] = 1,
    resume: Annotated[bool, typer.Option(help="Go on: leave out cases that the file holds.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the one scenario instead.")] = None,
    commit: Annotated[str, typer.Option(help="Commit of the code, where git is missing.")] = "",
    as_json: Json = False,
) -> None:
    """Run every scenario in FILE for real, on the GPUs of this machine, and write what they took."""
    from cpsim.cli.launch import Options, launch

    if (out is None) == (trace is None):
        raise CpsimError("run: expected --out FILE for times, or --trace FILE for a trace of one scenario")
    check_writable(out, trace)
    if trace:
        given = typed(context, "resume", "minutes", "seconds", "seed", "commit") | {"--json": as_json}
        refuse("run: --trace times nothing", given)
    num_gpus, _ = _machine("run", gpus, cpu)
    scenarios = _runnable(file, num_gpus, emulate_nodes, cpu is not None)
    if trace and len(scenarios) != 1:
        raise CpsimError(f"trace: expected one scenario, got {len(scenarios)}; give it a file of its own")
    options = Options(
        out=out,
        command=_said(),
        num_gpus=num_gpus,
        cpu=cpu is not None,
        num_nodes=emulate_nodes,
        minutes=minutes,
        seed=seed,
        seconds=seconds,
        resume=resume,
        trace=trace,
        commit=commit,
    )
    with unwinding():
        failed = launch(scenarios, options)
    if failed:
        raise CpsimError(f"run: {failed} of the launches ended early; see above, and go on with --resume")
    if out:
        _show_runs(out, as_json)


def _runnable(file: Path, num_gpus: int, num_nodes: int, cpu: bool) -> list[Scenario]:
    """The scenarios that this machine can run; the others are named on stderr."""
    from cpsim.case.scenario import load_scenarios
    from cpsim.strategies.others import implementation

    found: list[Scenario] = []
    for scenario in load_scenarios(file):
        try:
            if isinstance(scenario, CpsimError):
                raise scenario
            if implementation(scenario.implementation).predicted_only:
                raise CpsimError(f"implementation: {scenario.implementation} can be predicted, not run; use cpsim")
            nodes = scenario.resolve_cluster().num_nodes
            if scenario.gpus > num_gpus:
                raise CpsimError(f"gpus: needs {scenario.gpus}, {num_gpus} may be used here")
            if nodes not in (1, num_nodes) and not cpu:
                raise CpsimError(f"cluster: {scenario.cluster} has {nodes} nodes here; say --emulate-nodes {nodes}")
            found.append(scenario)
        except CpsimError as error:
            print(f"cpsim: left out: {error}", file=sys.stderr)
    if not found:
        raise CpsimError(f"{file}: expected at least one scenario that can run here, got none")
    return found


def _show_runs(out: Path, as_json: bool) -> None:
    from cpsim.prediction.runs import load_runs

    runs = load_runs(out)
    failed = [run for run in runs if run.error is not None]
    if as_json:
        print(json.dumps({"num_runs": len(runs), "num_failed": len(failed), "out": str(out)}))
    else:
        print(f"{len(runs) - len(failed)} of {len(runs)} runs measured, written to {out}")
    for run in failed[:20]:
        print(f"cpsim: {run.scenario.implementation} {run.scenario.strategy}: {run.error}", file=sys.stderr)


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(help="Runs, and predictions; without predictions they are made now.")],
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file; it opens offline.")] = None,
    cases: Annotated[int, typer.Option(min=0, help="Cases to list, worst first.")] = 20,
) -> None:
    """Set predictions beside real runs: errors, bias, intervals, and whether the best was the best."""
    from cpsim.prediction.compare import compare, load_predictions, predict_runs
    from cpsim.prediction.runs import holds_runs, load_runs
    from cpsim.report.comparison import comparison_record, comparison_view, left_out

    check_writable(html)
    measured = [path for path in files if holds_runs(path)] or files[-1:]
    runs = [run for path in measured for run in load_runs(path)]
    predictions = [one for path in files if path not in measured for one in load_predictions(path)]
    if not predictions:
        with progress_bar("Predicting") as progress:
            predictions = predict_runs(runs, progress)
    comparison = compare(predictions, runs)
    if as_json:
        print(json.dumps(comparison_record(comparison), indent=1))
    else:
        console().print(comparison_view(comparison, cases))
    left = left_out(comparison)
    for line in left[:20]:
        print(f"cpsim: not compared: {line}", file=sys.stderr)
    if len(left) > 20:
        print(f"cpsim: and {len(left) - 20} more that could not be compared", file=sys.stderr)
    if html:
        from cpsim.report.comparison_html import write_comparison

        write_comparison(html, comparison)
        print(f"Page written to {html}", file=sys.stderr)


@app.command()
def calibrate(
    name: Annotated[str, typer.Option(help="Of the files to write, of the profile and of the cluster.")] = "mine",
    out: Annotated[Path, typer.Option(help="Write to this folder.")] = Path(),
    minutes: Annotated[float, typer.Option(min=0.1, help="Time to measure, start-up included.")] = 10.0,
    kernels: Annotated[str, typer.Option(help="Attention kernels; those missing are left out.")] = KERNELS,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to use; all where not given.")] = None,
    cpu: Annotated[int | None, typer.Option(min=1, help="Processes on the CPU instead: a try without GPUs.")] = None,
    base: Base = None,
    resume: Annotated[bool, typer.Option(help="Go on: leave out points that the file holds.")] = False,
    commit: Annotated[str, typer.Option(help="Commit of the code, where git is missing.")] = "",
    as_json: Json = False,
) -> None:
    """Measure this node: a measurement file, the profile fitted to it, and a cluster file that names it."""
    from cpsim.calibrate.measurement import check_machine
    from cpsim.cli.launch import Options
    from cpsim.cli.launch import calibrate as measure

    measured = out / f"{name}.jsonl"
    check_writable(measured)
    if measured.exists() and not resume:
        raise CpsimError(f"calibrate: {measured} exists; go on with --resume, or give another --name")
    num_gpus, gpu = _machine("calibrate", gpus, cpu)
    if measured.exists():
        check_machine(measured, gpu, num_gpus)
    options = Options(command=_said(), num_gpus=num_gpus, cpu=cpu is not None, minutes=minutes, commit=commit)
    with unwinding(), part_bars(minutes) as progress:
        status = measure(measured, options, kernels, progress)
    if status:
        log = measured.with_suffix(".log")
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise CpsimError(f"calibrate: measuring ended early: {last}; see {log}, and go on with --resume")
    _fit_node(measured, base, as_json)


def _fit_node(measured: Path, base: str | None, as_json: bool) -> None:
    """Profile and cluster of a calibrated node, beside its measurements."""
    from cpsim.calibrate.measurement import load

    points = load(measured)
    if base is None and not points.of("collective"):
        base = "h100" if "H100" in points.header["gpu"] else "h200"
    profile, cluster = measured.with_suffix(".json"), measured.with_suffix(".yaml")
    again = ["cpsim", "fit", measured.name, *(["--base", base] if base else []), "--out", profile.name]
    again += ["--cluster", cluster.name]
    if find_spec("scipy") is None:
        raise CpsimError(f"calibrate: measured; the fit needs SciPy, which is missing here: {shlex.join(again)}")
    print(f"Fitting {len(points.points)} points: {shlex.join(again)}", file=sys.stderr)
    fit(profile, [measured], cluster=cluster, base=base, as_json=as_json)
    print(f"Written: {measured}, {profile} and {cluster}, which scenarios name", file=sys.stderr)


@app.command()
def fit(
    out: Annotated[Path, typer.Option(help="Write the profile to this file; its name is the profile's.")],
    measurements: Annotated[list[Path] | None, typer.Argument(help="Files of raw measurements.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that come with cpsim; --out is a folder.")] = False,
    cluster: Annotated[Path | None, typer.Option(help="Describe the measured node in this cluster file.")] = None,
    base: Base = None,
    memory_ratio: Annotated[float, typer.Option(min=0.01, help="Memory bandwidth over that of the base.")] = 1.0,
    network_ratio: Annotated[float, typer.Option(min=0.01, help="NVLink bandwidth over that of the base.")] = 1.0,
    sm_ratio: Annotated[float, typer.Option(min=0.01, help="SMs times clock over those of the base.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Fit a profile from raw measurements and show its errors on points that the fit did not see."""
    from cpsim.calibrate.fit import fit_profile
    from cpsim.calibrate.measurement import load
    from cpsim.models.profile import load_profile, save_profile
    from cpsim.models.standin import StandIn
    from cpsim.report.records import profile_record
    from cpsim.report.tables import profile_view

    if everything == bool(measurements):
        raise CpsimError("fit: expected files of measurements, or --all for the profiles that come with cpsim")
    ratios = {"memory_ratio": memory_ratio, "network_ratio": network_ratio, "sm_ratio": sm_ratio}
    scaled = {f"--{name.replace('_', '-')}": ratio != 1 for name, ratio in ratios.items()}
    if everything:
        refuse("fit: --all has bases and ratios of its own", {"--base": base, **scaled})
        refuse("fit: --all describes no node", {"--cluster": cluster})
        _fit_all(out, as_json)
        return
    if not base:
        refuse("fit: without --base there is nothing to scale", scaled)
    check_writable(out, cluster)
    stand_in = StandIn(profile=load_profile(base), **ratios) if base else None
    files = [load(path) for path in measurements or ()]
    profile = fit_profile(files, out.stem, stand_in)
    save_profile(profile, out)
    if cluster:
        _write_cluster(cluster, files, profile, out)
    if as_json:
        print(json.dumps(profile_record(profile), indent=1))
    else:
        console().print(profile_view(profile))


def _fit_all(folder: Path, as_json: bool) -> None:
    from cpsim.calibrate.recipes import make, recipes

    folder.mkdir(parents=True, exist_ok=True)
    _print_profiles([make(name, folder) for name in recipes()], as_json)


def _print_profiles(shown: Sequence[Profile], as_json: bool) -> None:
    from cpsim.report.records import profile_record
    from cpsim.report.tables import profile_view

    if as_json:
        print(json.dumps([profile_record(profile) for profile in shown], indent=1))
        return
    for profile in shown:
        console().print(profile_view(profile))


def _write_cluster(path: Path, files: Sequence[Measurements], profile: Profile, profile_file: Path) -> None:
    import yaml

    from cpsim.calibrate.node import described

    measured = next((m for m in files if m.of("collective")), files[0])
    same_folder = profile_file.resolve().parent == path.resolve().parent
    node = described(measured, profile, profile_file.name if same_folder else str(profile_file.resolve()))
    fields = {name: value for name, value in node.to_dict().items() if value is not None and name != "num_gpus"}
    path.write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="Logs of nccl-tests; CSV tables of kernels' TFLOP/s.")],
    out: Annotated[Path, typer.Option(help="Write the points to this measurement file.")],
    gpu: Annotated[str | None, typer.Option(help="GPU of a table, where it has no column or several.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads of a table without that column.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key and value heads; as many as query heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="The same for the head dimension.")] = 128,
    num_sms: Annotated[int | None, typer.Option(min=1, help="SMs of a GPU that no preset has.")] = None,
    as_json: Json = False,
) -> None:
    """Read other people's measurements as points for `cpsim fit` and `cpsim fit-fabric`."""
    from cpsim.calibrate.imports import Table, import_files
    from cpsim.calibrate.measurement import Writer

    check_writable(out)
    given = Table(gpu=gpu, heads=heads, kv_heads=kv_heads, head_dim=head_dim, num_sms=num_sms)
    header, points, left = import_files(files, given, _said())
    with out.open("w", encoding="utf-8") as file:
        writer = Writer(file, header)
        for point in points:
            writer.add(**point)
    kinds = {op: sum(point["op"] == op for point in points) for op in sorted({point["op"] for point in points})}
    if as_json:
        print(json.dumps({"gpu": header["gpu"], "points": kinds, "left_out": left, "out": str(out)}))
    else:
        counts = ", ".join(f"{count} {op}" for op, count in kinds.items())
        print(f"{header['gpu']}: points {counts}, written to {out}")
    for line in left:
        print(f"cpsim: left out: {line}", file=sys.stderr)


@app.command()
def fit_fabric(
    files: Annotated[
        list[Path], typer.Argument(help="Points between nodes: cpsim.real.measure.network --emulate-nodes.")
    ],
    cluster: Annotated[str, typer.Option(help="The cluster whose network this is: a preset or a file.")],
    out: Annotated[Path | None, typer.Option(help="Write the cluster with this network to this file.")] = None,
    sockets: Annotated[bool, typer.Option(help="The network is sockets, without NICs that read memory.")] = False,
    as_json: Json = False,
) -> None:
    """Fit the network between nodes, for a cluster file that scenarios can name."""
    from dataclasses import replace

    from cpsim.calibrate.fabric import fit_fabric as fitted
    from cpsim.calibrate.measurement import load
    from cpsim.case.cluster import load_cluster
    from cpsim.report.tables import clusters_view

    check_writable(out)
    known = load_cluster(cluster)
    likely = known.fabric.nics_per_node if known.fabric else known.gpus_per_node
    whole = replace(known, fabric=fitted([load(file) for file in files], likely, sockets))
    if out:
        whole = replace(whole, name=out.stem)
        out.write_text(json.dumps(whole.to_dict(), indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(whole.to_dict(), indent=1))
    else:
        console().print(clusters_view([whole]))


@app.command()
def profiles(as_json: Json = False) -> None:
    """List the profiles that come with cpsim: which GPU, from which measurements, how good."""
    from cpsim.models.profile import load_profile, shipped_profiles

    _print_profiles([load_profile(name) for name in shipped_profiles()], as_json)


@app.command()
def clusters(as_json: Json = False) -> None:
    """List the cluster presets and where their network numbers come from."""
    from cpsim.case.cluster import presets

    if as_json:
        print(json.dumps([cluster.to_dict() for cluster in presets().values()], indent=1))
    else:
        from cpsim.report.tables import clusters_view

        console().print(clusters_view(presets().values()))


@app.command()
def kernels(
    profile: Annotated[list[str] | None, typer.Option(help="Profiles to tabulate; h100 and h200.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 128,
    as_json: Json = False,
) -> None:
    """List attention kernels: masks, passes and types that they take, TFLOP/s and memory by mask and length."""
    from cpsim.models.profile import load_profile
    from cpsim.prediction.kernel_tables import speeds, support
    from cpsim.report.kernels import kernels_record, kernels_view

    chosen = [load_profile(name) for name in profile or ("h100", "h200")]
    rates = [speed for entry in chosen for speed in speeds(entry, heads, kv_heads, head_dim)]
    if as_json:
        print(json.dumps(kernels_record(support(), rates), indent=1))
    else:
        console().print(kernels_view(support(), rates, f"{heads}:{kv_heads}"))


@app.command()
def strategies(as_json: Json = False) -> None:
    """List the strategies that can be simulated today, and their knobs."""
    from cpsim.report.records import strategy_records

    records = strategy_records()
    if as_json:
        print(json.dumps(records, indent=1))
    else:
        from cpsim.report.tables import strategies_view

        console().print(strategies_view(records))


@app.command()
def mask(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of a mask; all are listed where none is given.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Total tokens.")] = 16384,
    option: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Of the mask; may be repeated.")] = None,
    documents: Annotated[str | None, typer.Option(help="Lengths, e.g. 100,300, or a distribution.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs to ask strategies for.")] = 4,
    cluster: Annotated[str, typer.Option(help="A preset or a cluster file.")] = "dgx-h200",
    png: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file; it opens offline.")] = None,
    as_json: Json = False,
) -> None:
    """Show a mask: picture, exact area, and which strategies, kernels and implementations can run it."""
    from cpsim.report import masks

    check_writable(png, html)
    if name is None:
        given = typed(context, "tokens", "option", "documents", "gpus", "cluster", "png", "html")
        refuse("mask: all masks are listed where none is named", given)
        records = masks.mask_list()
        print(json.dumps(records, indent=1)) if as_json else console().print(masks.masks_view())
        return
    scenario = _mask_scenario(name, tokens, option or [], documents, gpus, cluster)
    from cpsim.prediction.support import support

    workload = scenario.workload()
    workload.slices()  # what is wrong with its options is said before anything is written
    found = support(workload, scenario.resolve_cluster())
    if as_json:
        print(json.dumps(masks.mask_record(workload, found), indent=1))
    else:
        console().print(masks.mask_view(workload, found, gpus))
    if png:
        masks.write_png(png, workload)
        print(f"Picture written to {png}", file=sys.stderr)
    if html:
        masks.write_html(html, workload, found)
        print(f"Page written to {html}", file=sys.stderr)


def _mask_scenario(
    name: str, tokens: int, options: list[str], documents: str | None, gpus: int, cluster: str
) -> Scenario:
    """The case of a mask; masks of documents get some where none are given."""
    from cpsim.case.scenario import scenario_from
    from cpsim.units import number_or_text

    given: dict[str, Any] = {"name": name}
    for entry in options:
        key, equals, value = entry.partition("=")
        if not equals:
            raise CpsimError(f"option: expected K=V, e.g. window=1024, got {entry!r}")
        given[key] = number_or_text(value)
    if documents is None and name.endswith("_document"):
        documents = "prolong64k"
    fields: dict[str, Any] = {
        "gpus": gpus,
        "cluster": cluster,
        "tokens": tokens,
        "mask": given,
        "heads": 32,
        "kv_heads": 8,
    }
    if documents:
        lengths = [number_or_text(part) for part in documents.split(",")]
        drawn = isinstance(lengths[0], str)
        fields["documents"] = {"distribution": documents} if drawn else lengths
    return scenario_from(fields)


def _predict_file(file: Path, jobs: int | None) -> tuple[list[Scenario | CpsimError], Results]:
    from cpsim.case.scenario import load_scenarios
    from cpsim.prediction.predict import predict_many

    scenarios: list[Scenario | CpsimError] = list(load_scenarios(file))
    if not scenarios:
        raise CpsimError(f"{file}: expected at least one scenario, got an empty file")
    with progress_bar("Predicting") as progress:
        return scenarios, predict_many(scenarios, jobs=jobs, progress=progress)


def _lines(scenarios: Sequence[Scenario | CpsimError], results: Results) -> str:
    """JSON Lines of the answers, in input order."""
    from cpsim.report.records import prediction_record

    pairs = zip(scenarios, results, strict=True)
    return "".join(json.dumps(prediction_record(asked, result)) + "\n" for asked, result in pairs)


def _summary(results: Results, duration_s: float) -> dict[str, Any]:
    from cpsim.prediction.results import Prediction

    num_predicted = sum(isinstance(result, Prediction) for result in results)
    return {"num_scenarios": len(results), "num_predicted": num_predicted, "duration_s": duration_s}


def _report_failures(results: Results) -> None:
    """Say on stderr which scenarios have no prediction; exit code 2 where none has."""
    from cpsim.report.tables import reasons

    lines = reasons(results)
    _print_failures(lines, len(lines), len(results))
    if len(lines) == len(results):
        raise typer.Exit(USER_ERROR)


def _print_failures(lines: Sequence[str], num_failed: int, num_asked: int) -> None:
    for line in lines[:20]:
        print(f"cpsim: {line}", file=sys.stderr)
    if num_failed and num_asked > 1:
        print(f"cpsim: {num_failed:,} of {num_asked:,} scenarios have no prediction", file=sys.stderr)
