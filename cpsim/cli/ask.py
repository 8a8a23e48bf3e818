"""Commands that answer a question: predict, trace, sweep, advise, explore."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cpsim.cli.entry import USER_ERROR, exit_code
from cpsim.cli.terminal import (
    Force,
    Jobs,
    Json,
    OneScenario,
    RunFolder,
    Scenarios,
    check_writable,
    console,
    progress_bar,
    refuse,
)
from cpsim.errors import CpsimError, MachineError
from cpsim.runtime.files import write
from cpsim.runtime.interrupts import INTERRUPTED, unwinding
from cpsim.runtime.streams import say

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario
    from cpsim.prediction.question import Question
    from cpsim.prediction.results import Advice, Infeasible, Prediction
    from cpsim.prediction.runs import Run
    from cpsim.prediction.step_advice import Refused

    Results = list[Prediction | Infeasible | CpsimError]

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


def predict(
    file: Scenarios,
    out: Annotated[Path | None, typer.Option(help="Write JSON Lines to this file, in input order.")] = None,
    as_json: Json = False,
    jobs: Jobs = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the one scenario, for Perfetto.")] = None,
    force: Force = False,
) -> None:
    """Predict the time of every scenario in FILE; one bad line never stops the others."""
    del force  # its callback has done it
    check_writable(out, trace)
    scenarios, results = _predict_file(file, jobs, timelines=trace is not None)
    if trace:
        _trace_results(trace, results)
    if out:
        write(out, _lines(scenarios, results))
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
        say(f"Trace written to {path}; open it in ui.perfetto.dev")


def _write_trace(path: Path, prediction: Prediction) -> None:
    """Write the ops of a prediction, if they were simulated one by one."""
    from cpsim.report.trace import write_prediction

    if not prediction.timelines:
        raise CpsimError(
            "trace: expected attention or a layer whose ops are simulated one by one, got a training step or a "
            "ring that continues shorter ones; use `part: layer` or fewer GPUs"
        )
    write_prediction(path, prediction)


def trace(
    file: OneScenario,
    out: Annotated[Path, typer.Option(help="Write the trace to this file; .json, or compressed .json.gz.")],
    strategy: Annotated[
        str | None, typer.Option(help="Strategy to trace; by default that of FILE, or else the best.")
    ] = None,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Write a trace for Perfetto: every rank and stream, arrows between ranks, what links carry."""
    del force  # its callback has done it
    from cpsim.case.load import as_scenario, load_scenario
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
    from cpsim.prediction.advise import advise as ask

    with progress_bar("Trying strategies") as progress:
        candidates = ask(scenario, progress).candidates
    if not candidates:
        raise CpsimError("trace: no strategy can run this case; `cpsim advise` says why")
    best = candidates[0].scenario
    return scenario.model_copy(update={"strategy": best.strategy, "knobs": best.knobs})


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Scenarios, or a grid of them: YAML, JSON, JSON Lines.")],
    out: Annotated[Path, typer.Option(help="Folder of Parquet files; or a .jsonl file, written at the end.")],
    as_json: Json = False,
    jobs: Jobs = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask cluster to use instead of cores.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the folder holds.")] = False,
    force: Force = False,
) -> None:
    """Predict many scenarios, or all combinations of a grid, and say how it went."""
    del force  # its callback has done it
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
        done = run_sweep(
            asked,
            out,
            jobs=jobs,
            scheduler=scheduler,
            resume=resume,
            progress=progress,
            tell=lambda why: say(f"cpsim: {why}"),
        )
    _say_swept(done.num_scenarios, done.num_predicted, time.monotonic() - started, out, as_json)
    num_failed = done.num_scenarios - done.num_predicted
    _print_failures(failures(out, 20) if num_failed else [], num_failed, done.num_scenarios)
    if done.lost:
        number, why = next(iter(done.lost.items()))
        rest = f" (and {len(done.lost) - 1:,} more)" if len(done.lost) > 1 else ""
        raise MachineError(f"sweep: scenario {number}{rest} has no row to rely on: {why}; go on with --resume")
    if done.num_predicted == 0:
        raise typer.Exit(USER_ERROR)


def _sweep_lines(file: Path, out: Path, as_json: bool, jobs: int | None) -> None:
    check_writable(out)
    started = time.monotonic()
    scenarios, results = _predict_file(file, jobs)
    write(out, _lines(scenarios, results))
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


def advise(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A scenario, or your framework's own file; or none, with --model."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="config.json, a name such as llama3.1-8b, or that of a Hugging Face repository.")
    ] = None,
    framework: Annotated[str | None, typer.Option(help="megatron, torchtitan, torch or huggingface.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to train on.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster file, a preset, or h100, h200, b200, a100.")] = None,
    context: Annotated[str | None, typer.Option(help="Tokens of a sequence, e.g. 128k.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a step.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Document lengths: text, .npy, .parquet, .csv histogram, or a distribution.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Another value, e.g. cluster.nic=2x; may be repeated."),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a GPU for an hour.")] = None,
    train: Annotated[str, typer.Option(help="Tokens of the whole training, for days and money.")] = "1T",
    save: Annotated[Path | None, typer.Option(help="Write the case as a scenario to this file.")] = None,
    as_json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a report to this file; it opens offline.")] = None,
    step: Annotated[bool, typer.Option("--step", help="Refuse anything but a whole training step.")] = False,
    runs: RunFolder = None,
    force: Force = False,
) -> None:
    """Recommend how to run a training step or an attention case, with what to paste; say why others cannot run."""
    del force  # its callback has done it
    from cpsim.case.words import tokens_of
    from cpsim.prediction.question import Options, ask

    check_writable(html, save)
    if file is None and model is None:
        raise CpsimError("advise: expected a file, or --model, --gpus and --cluster; see `cpsim advise --help`")
    options = Options(
        file=file,
        model=model,
        framework=framework,
        gpus=gpus,
        cluster=cluster,
        context=context,
        lengths=lengths,
        batch=batch,
        changes=tuple(set_ or ()),
    )
    question, tokens = ask(options), tokens_of(train, "train")
    if save:
        _save(save, question.scenario)
    if step or question.scenario.is_step:
        refuse("advise: reports of training steps show no runs", {"--runs": runs})
        _advise_step(question, tokens, price, as_json, html)
        return
    refuse("advise: attention alone has no price", {"--price": price is not None})
    _advise_attention(question.scenario, as_json, html, runs)


def _save(path: Path, scenario: Scenario) -> None:
    import yaml

    write(path, yaml.safe_dump(scenario.to_dict(), sort_keys=False, default_flow_style=None, width=110))
    say(f"Scenario written to {path}")


def _advise_attention(scenario: Scenario, as_json: bool, html: Path | None, runs: Path | None) -> None:
    from cpsim.prediction.advise import advise as ask
    from cpsim.prediction.runs import runs_in
    from cpsim.report.words import recommendation

    if html is None:
        refuse("advise: only the page of --html shows runs", {"--runs": runs})
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
    if not advice.candidates:
        _end_without(advice.infeasible, "nothing was predicted; the answer says of each strategy why")


def _end_without(refused: Sequence[Infeasible | Refused], why: str) -> NoReturn:
    """Ends a command that could answer nothing; says why where its exit code does not."""
    code = exit_code([reason.kind for reason in refused])
    if code == USER_ERROR:
        say(f"cpsim: advise: {why}")
    raise typer.Exit(code)


def _write_report(html: Path, advice: Advice, measured: list[Run]) -> None:
    from cpsim.report.frontier import predict_cells
    from cpsim.report.html import write_report
    from cpsim.report.lengths import predict_lengths

    with progress_bar("Predicting other lengths") as progress:
        lengths = predict_lengths(advice, progress)
    with progress_bar("Mapping lengths and GPUs") as progress:
        best = predict_cells(advice, progress)
    write_report(html, advice, lengths, best, measured)
    say(f"Report written to {html}")


def _shipped_runs() -> Path | None:
    """Where the repository keeps its runs, in a clone."""
    folder = Path("data/runs")
    return folder if folder.is_dir() else None


def _advise_step(question: Question, tokens: int, price: float | None, as_json: bool, html: Path | None) -> None:
    from cpsim.prediction.predict import predict_many
    from cpsim.prediction.step_advice import advise_step
    from cpsim.report.answer import Answer, answer_record, answer_view
    from cpsim.report.steps import no_degrees

    with progress_bar("Cutting the step") as progress:
        advice = advise_step(question.scenario, progress)
    given = predict_many([question.given], jobs=1)[0] if question.given else None
    answer = Answer(question=question, advice=advice, given=given, tokens=tokens, price=price)
    if as_json:
        print(json.dumps(answer_record(answer), indent=1))
    else:
        console().print(answer_view(answer))
    if html:
        from cpsim.report.step_page import write_step_report

        write_step_report(html, advice)
        say(f"Report written to {html}")
    if not advice.candidates:
        each = "nothing was predicted; the answer says of each way to cut it why"
        _end_without(advice.refused, each if advice.refused else no_degrees(advice))


def explore(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="One scenario to begin with.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8050,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine, the link has a token.")
    ] = "127.0.0.1",
    runs: RunFolder = None,
) -> None:
    """Open a local page in which a case can be changed: ranking, map, timeline, memory, mask, real runs."""
    if find_spec("dash") is None:
        raise CpsimError("explore: needs Dash, which is not installed; pip install '.[explore]'")
    from cpsim.case.load import load_scenario, scenario_from
    from cpsim.explore.server import serving

    start = load_scenario(file) if file else scenario_from(EXPLORED)
    with unwinding(), serving(start, runs or _shipped_runs(), host, port) as server:
        say(f"Explore at {server.link} and stop with Ctrl+C")
        server.serve_forever()
    raise typer.Exit(INTERRUPTED)  # nothing else ends it


def _predict_file(
    file: Path, jobs: int | None, *, timelines: bool = False
) -> tuple[list[Scenario | CpsimError], Results]:
    from cpsim.case.load import load_scenarios
    from cpsim.prediction.predict import predict_many

    scenarios: list[Scenario | CpsimError] = list(load_scenarios(file))
    if not scenarios:
        raise CpsimError(f"{file}: expected at least one scenario, got an empty file")
    with progress_bar("Predicting") as progress:
        return scenarios, predict_many(scenarios, jobs=jobs, progress=progress, timelines=timelines)


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
        say(f"cpsim: {line}")
    if num_failed and num_asked > 1:
        say(f"cpsim: {num_failed:,} of {num_asked:,} scenarios have no prediction")
