"""Commands that measure and compare: run, validate, calibrate, fit, fit-fabric, import."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpsim.cli.terminal import (
    Json,
    LogDomain,
    LogNodes,
    LogRanks,
    Scenarios,
    check_writable,
    console,
    part_bars,
    print_profiles,
    progress_bar,
    refuse,
    typed,
)
from cpsim.errors import CpsimError, check_name
from cpsim.runtime.files import write
from cpsim.runtime.interrupts import unwinding
from cpsim.runtime.streams import say

if TYPE_CHECKING:
    from cpsim.calibrate.measurement import Measurements
    from cpsim.case.formats.logs import Observed
    from cpsim.case.scenario import Scenario
    from cpsim.models.profile import Profile

KERNELS = "fa4,fa2,cudnn,sdpa_flash"
FIT_SHARE = 0.3
"""Share of the time of `cpsim calibrate` that the fit gets: for 1,364 points of three minutes it took 41 s on one
machine and more than 150 s on another."""
Base = Annotated[str | None, typer.Option(help="A profile that gives what was not measured.")]


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


def run(
    context: typer.Context,
    file: Scenarios,
    out: Annotated[Path | None, typer.Option(help="Write the runs to this file: JSON Lines.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to use; all where not given.")] = None,
    cpu: Annotated[int | None, typer.Option(min=1, help="Processes on the CPU instead: a try without GPUs.")] = None,
    emulate_nodes: Annotated[int, typer.Option(min=1, help="Nodes that this machine plays, linked by sockets.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0, help="Start no case after so many minutes.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Iterations to measure of every pass, in seconds.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the order in which cases run.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: leave out cases that the file holds.")] = False,
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
    from cpsim.case.load import load_scenarios
    from cpsim.case.resolve import cluster_of
    from cpsim.prediction.case import check_names
    from cpsim.strategies.others import RUN_HERE

    found: list[Scenario] = []
    for scenario in load_scenarios(file):
        try:
            if isinstance(scenario, CpsimError):
                raise scenario
            check_names(scenario)
            check_name("implementation", scenario.implementation, [code.name for code in RUN_HERE])
            nodes = cluster_of(scenario).num_nodes
            if scenario.gpus > num_gpus:
                raise CpsimError(f"gpus: needs {scenario.gpus}, {num_gpus} may be used here")
            if nodes not in (1, num_nodes) and not cpu:
                raise CpsimError(f"cluster: {scenario.cluster} has {nodes} nodes here; say --emulate-nodes {nodes}")
            found.append(scenario)
        except CpsimError as error:
            say(f"cpsim: left out: {error}")
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
        say(f"cpsim: {run.scenario.implementation} {run.scenario.strategy}: {run.error}")


def validate(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Files of runs, and of predictions; without these, runs are predicted now. Or a case, and logs of its "
            "training (torchtitan, Megatron-LM, NeMo, Lightning, Trainer) or traces of torch.profiler."
        ),
    ],
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file; it opens offline.")] = None,
    cases: Annotated[int, typer.Option(min=0, help="Cases to list, worst first.")] = 20,
    cluster: Annotated[str | None, typer.Option(help="With a log: cluster of a framework's file.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="With a log: GPUs of a framework's file.")] = None,
) -> None:
    """Set predictions beside real runs: errors, bias, intervals, and whether the best was the best."""
    from cpsim.prediction.compare import compare, load_predictions, predict_runs
    from cpsim.prediction.runs import holds_runs, load_runs
    from cpsim.report.comparison import comparison_record, comparison_view, left_out

    check_writable(html)
    if observed := _observed(files):
        refuse("validate: logs have no page", {"--html": html})
        _beside(observed, cluster, gpus, as_json)
        return
    refuse("validate: files of runs say their cluster", {"--cluster": cluster, "--gpus": gpus})
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
        say(f"cpsim: not compared: {line}")
    if len(left) > 20:
        say(f"cpsim: and {len(left) - 20} more that could not be compared")
    if html:
        from cpsim.report.comparison_html import write_comparison

        write_comparison(html, comparison)
        say(f"Page written to {html}")


def _observed(files: Sequence[Path]) -> dict[Path, Observed | None]:
    """Files with what those of them observed that are logs or traces; nothing where none is."""
    from cpsim.case.formats.logs import read_observed

    found = {path: read_observed(path) for path in files}
    return found if any(found.values()) else {}


def _beside(files: Mapping[Path, Observed | None], cluster: str | None, gpus: int | None, as_json: bool) -> None:
    """A case beside logs of its training."""
    from cpsim.prediction.predict import predict
    from cpsim.prediction.question import Options, ask
    from cpsim.report.observed import Beside, beside_record, beside_view

    cases = [path for path, one in files.items() if one is None]
    if len(cases) != 1:
        names = ", ".join(map(str, cases)) or "none"
        raise CpsimError(f"validate: expected a case beside the logs, `cpsim validate case.yaml run.log`, got {names}")
    question = ask(Options(file=cases[0], cluster=cluster, gpus=gpus))
    prediction = predict(question.given or question.scenario)
    beside = Beside(prediction=prediction, observed=tuple(one for one in files.values() if one))
    print(json.dumps(beside_record(beside), indent=1)) if as_json else console().print(beside_view(beside))


def calibrate(
    context: typer.Context,
    name: Annotated[str, typer.Option(help="Name of the profile and the cluster, and of their files.")] = "mine",
    out: Annotated[Path, typer.Option(help="Write to this folder.")] = Path(),
    minutes: Annotated[float, typer.Option(min=0.1, help="Time until the profile is written, about.")] = 10.0,
    kernels: Annotated[str, typer.Option(help="Attention kernels; those missing are left out.")] = KERNELS,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to use; all where not given.")] = None,
    cpu: Annotated[int | None, typer.Option(min=1, help="Processes on the CPU instead: a try without GPUs.")] = None,
    host: Annotated[bool, typer.Option("--host", help="Only how fast hosts launch, in 10 s; GPU or not.")] = False,
    base: Base = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: leave out points that the file holds.")] = False,
    commit: Annotated[str, typer.Option(help="Commit of the code, where git is missing.")] = "",
    as_json: Json = False,
) -> None:
    """Measure this node: a measurement file, the profile fitted to it, and a cluster file that names it.

    With --host a file for field `host` of scenarios and clusters: how fast this machine launches.
    """
    if host:
        refuse("calibrate: --host takes ten seconds", typed(context, "minutes", "kernels", "base", "resume", "commit"))
        _calibrate_host(out / f"{name}-host.json", gpus, cpu, as_json)
        return
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
    measuring = minutes * (1 - FIT_SHARE)
    options = Options(command=_said(), num_gpus=num_gpus, cpu=cpu is not None, minutes=measuring, commit=commit)
    with unwinding(), part_bars(measuring) as progress:
        status = measure(measured, options, kernels, progress)
    if status:
        log = measured.with_suffix(".log")
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise CpsimError(f"calibrate: measuring ended early: {last}; see {log}, and go on with --resume")
    _fit_node(measured, base, as_json)


def _calibrate_host(path: Path, gpus: int | None, cpu: int | None, as_json: bool) -> None:
    """Writes a host file; without a GPU what Python alone tells."""
    from cpsim.calibrate.pace import of_processes, usual_processes
    from cpsim.cli.launch import host_pace, local_gpus
    from cpsim.models.host_speed import load_host, save_host
    from cpsim.models.profile import load_profile

    check_writable(path)
    if cpu:
        refuse("calibrate: --cpu uses no GPUs", {"--gpus": gpus})
    available = [] if cpu or find_spec("torch") is None else local_gpus("calibrate")
    if available:
        count = min(gpus or len(available), len(available))
        with unwinding():
            host_pace(path, count)
    else:
        save_host(path, "", of_processes(cpu or gpus or usual_processes()), {})
        say("No GPU was used: the Python part alone tells how fast launches are within some 30 %")
    found = load_host(str(path))
    speeds = {name: found.factor(load_profile(name).host)[0] for name in ("h100", "h200")}
    if as_json:
        print(json.dumps({"out": str(path), "python_s": found.python_s, "factor": speeds}))
        return
    words = ", ".join(f"{factor:.2f} times as long as those of profile {name}" for name, factor in speeds.items())
    print(f"{found.cpu}: launches take {words}\nWritten: {path}; scenarios and clusters name it as host")


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
    say(f"Fitting {len(points.points)} points: {shlex.join(again)}")
    fit(profile, [measured], cluster=cluster, base=base, as_json=as_json)
    say(f"Written: {measured}, {profile} and {cluster}, which scenarios name")


def fit(
    out: Annotated[Path, typer.Option(help="Write the profile to this file; its name is the profile's.")],
    measurements: Annotated[list[Path] | None, typer.Argument(help="Files of raw measurements.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that come with cpsim; --out is a folder.")] = False,
    cluster: Annotated[Path | None, typer.Option(help="Describe the measured node in this cluster file.")] = None,
    base: Base = None,
    gpu: Annotated[
        str | None, typer.Option(help="The measured GPU, for what the base gives: a name, or a cluster file with it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a profile from raw measurements and show its errors on points that the fit did not see."""
    from cpsim.calibrate.fit import fit_profile
    from cpsim.calibrate.measurement import load
    from cpsim.case.cluster import load_cluster
    from cpsim.case.gpu import gpu_of_driver
    from cpsim.models.profile import load_profile, save_profile
    from cpsim.models.standin import StandIn
    from cpsim.report.records import profile_record
    from cpsim.report.tables import profile_view

    if everything == bool(measurements):
        raise CpsimError("fit: expected files of measurements, or --all for the profiles that come with cpsim")
    if everything:
        refuse("fit: --all has bases of its own", {"--base": base, "--gpu": gpu})
        refuse("fit: --all describes no node", {"--cluster": cluster})
        _fit_all(out, as_json)
        return
    if not base:
        refuse("fit: without --base nothing is moved onto a GPU", {"--gpu": gpu})
    check_writable(out, cluster)
    files = [load(path) for path in measurements or ()]
    onto = load_cluster(gpu).gpu if gpu else gpu_of_driver(files[0].header["gpu"])
    stand_in = StandIn.of(load_profile(base), onto) if base else None
    profile = fit_profile(files, out.stem, stand_in)
    save_profile(profile, out)
    if cluster:
        _write_cluster(cluster, files, profile, out)
    if as_json:
        print(json.dumps(profile_record(profile), indent=1))
    else:
        console().print(profile_view(profile))


def _fit_all(folder: Path, as_json: bool) -> None:
    from cpsim.calibrate.recipes import make_profile, manifest

    folder.mkdir(parents=True, exist_ok=True)
    print_profiles([make_profile(name, folder) for name in manifest()["profiles"]], as_json)


def _write_cluster(path: Path, files: Sequence[Measurements], profile: Profile, profile_file: Path) -> None:
    import yaml

    from cpsim.calibrate.node import described

    measured = next((m for m in files if m.of("collective")), files[0])
    same_folder = profile_file.resolve().parent == path.resolve().parent
    node = described(measured, profile, profile_file.name if same_folder else str(profile_file.resolve()))
    fields = {name: value for name, value in node.to_dict().items() if value is not None and name != "num_gpus"}
    write(path, yaml.safe_dump(fields, sort_keys=False))


def import_(
    files: Annotated[list[Path], typer.Argument(help="Logs of nccl-tests; CSV tables of kernels' TFLOP/s.")],
    out: Annotated[Path, typer.Option(help="Write the points to this measurement file.")],
    gpu: Annotated[str | None, typer.Option(help="GPU of a table or log that names none.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads of a table without that column.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key and value heads; as many as query heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Head dimension of a table without that column.")] = 128,
    num_sms: Annotated[int | None, typer.Option(min=1, help="SMs of a GPU that no preset has.")] = None,
    ranks: LogRanks = None,
    nodes: LogNodes = None,
    domain: LogDomain = None,
    as_json: Json = False,
) -> None:
    """Read other people's measurements as points for `cpsim fit` and `cpsim fit-fabric`."""
    from cpsim.calibrate.imports import Table, import_files
    from cpsim.calibrate.measurement import Writer
    from cpsim.calibrate.nccl_logs import Said

    check_writable(out)
    given = Table(gpu=gpu, heads=heads, kv_heads=kv_heads, head_dim=head_dim, num_sms=num_sms)
    said = Said(gpu=gpu, ranks=ranks, nodes=nodes, domain=domain)
    header, points, left, notes = import_files(files, given, _said(), said)
    lines = StringIO()
    writer = Writer(lines, header)
    for point in points:
        writer.add(**point)
    write(out, lines.getvalue())
    kinds = {op: sum(point["op"] == op for point in points) for op in sorted({point["op"] for point in points})}
    if as_json:
        print(json.dumps({"gpu": header["gpu"], "points": kinds, "left_out": left, "notes": notes, "out": str(out)}))
    else:
        counts = ", ".join(f"{count} {op}" for op, count in kinds.items())
        print(f"{header['gpu']}: points {counts}, written to {out}")
    for line in left:
        say(f"cpsim: left out: {line}")
    for line in notes:
        say(f"cpsim: {line}")


def fit_fabric(
    files: Annotated[
        list[Path], typer.Argument(help="Points between nodes: cpsim.real.measure.network --emulate-nodes.")
    ],
    cluster: Annotated[str, typer.Option(help="The cluster whose network this is: a preset or a file.")],
    out: Annotated[Path | None, typer.Option(help="Write the cluster with this network to this file.")] = None,
    sockets: Annotated[bool, typer.Option("--sockets", help="The network is sockets, without RDMA.")] = False,
    transport: Annotated[str | None, typer.Option(help="infiniband, roce, efa, tcpxo, tcpx or ethernet.")] = None,
    as_json: Json = False,
) -> None:
    """Fit the network between nodes, for a cluster file that scenarios can name."""
    from dataclasses import replace

    from cpsim.calibrate.fabric import fit_described, port_of
    from cpsim.calibrate.fabric import fit_fabric as fitted
    from cpsim.calibrate.measurement import load
    from cpsim.case.cluster import load_cluster, with_transport
    from cpsim.report.tables import clusters_view

    check_writable(out)
    known = load_cluster(cluster)
    if transport is not None:
        known = with_transport(known, transport)
    measured = [load(file) for file in files]
    if known.fabric is not None and known.fabric.transport is not None and not sockets:
        fabric = fit_described(measured, known, port_of(known))
    else:
        fabric = fitted(measured, known.fabric.nics_per_node if known.fabric else known.gpus_per_node, sockets)
    whole = replace(known, fabric=fabric)
    if out:
        whole = replace(whole, name=out.stem)
        write(out, json.dumps(whole.to_dict(), indent=1) + "\n")
    if as_json:
        print(json.dumps(whole.to_dict(), indent=1))
    else:
        console().print(clusters_view([whole]))
