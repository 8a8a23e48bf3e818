"""Commands around a question: compare two cases, begin a file, explain a name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cpsim.cli.network import init_cluster
from cpsim.cli.terminal import Json, check_writable, console, progress_bar
from cpsim.errors import CpsimError
from cpsim.runtime.files import write
from cpsim.runtime.streams import say

init = typer.Typer(help="Begin a file: a cluster, a scenario, or the shape of a model.", no_args_is_help=True)
init.command("cluster")(init_cluster)
SCENARIO = """\
# A case for `cpsim advise`. What is left out is chosen, or assumed and said.
gpus: {gpus}
cluster: {cluster}            # a preset, a cluster file, or a preset with changes: dgx-h100 nic=2x
model: {model}           # a name, that of a repository, or dimensions
framework: {framework}         # megatron, torchtitan, torch, huggingface
seq_len: {context}             # tokens of a sequence
batch: {batch}                 # sequences of a step
# documents: lengths.txt     # lengths in a file, a list, or {{distribution: prolong512k, seed: 42}}
# mask: causal_document      # documents of a sequence do not see each other
# precision: fp8
# parallel: {{tp: 2, cp: 8}}   # what is said here is kept; the rest is searched
"""


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A scenario.")],
    second: Annotated[Path | None, typer.Argument(metavar="[B]", help="Another; or none, with --set.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="What B has instead, e.g. cluster.nic=2x; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Set two cases side by side, each as it is best run: what differs, how much faster one is, and where."""
    from cpsim.case.changes import changed
    from cpsim.case.load import load_scenario, scenario_from
    from cpsim.prediction.sides import sides
    from cpsim.report.sides import sides_record, sides_view

    if second is None and not set_:
        raise CpsimError("compare: expected a second file, or --set field=value")
    a, b = load_scenario(first), load_scenario(second or first)
    b = scenario_from(changed(b.to_dict(), set_ or ()))
    names = str(first), " ".join([str(second or first), *(set_ or ())])
    with progress_bar("Predicting") as progress:
        found = sides(a, b, names, progress)
    if as_json:
        print(json.dumps(sides_record(found), indent=1))
    else:
        console().print(sides_view(found))


@init.command("scenario")
def init_scenario(
    out: Annotated[Path, typer.Argument(help="File to write.")] = Path("case.yaml"),
    model: Annotated[str, typer.Option(help="Its model.")] = "llama3-8b",
    framework: Annotated[str, typer.Option(help="Whose code runs it.")] = "megatron",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs.")] = 64,
    cluster: Annotated[str, typer.Option(help="Its cluster.")] = "dgx-h100",
    context: Annotated[str, typer.Option(help="Tokens of a sequence.")] = "128k",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 32,
) -> None:
    """Write a scenario of a training step with its fields explained."""
    from cpsim.case.files import parse_yaml
    from cpsim.case.load import scenario_from

    text = SCENARIO.format(gpus=gpus, cluster=cluster, model=model, framework=framework, context=context, batch=batch)
    scenario_from(parse_yaml(text, str(out)))  # what cannot be read is not written
    _begin(out, text)


@init.command("model")
def init_model(
    source: Annotated[str, typer.Argument(help="config.json, Megatron's arguments, or a name.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("model.yaml"),
) -> None:
    """Write the dimensions of a model as the field `model` of a scenario takes them."""
    import yaml

    from cpsim.case.model import known_model
    from cpsim.prediction.question import shape_of

    shape = shape_of(source)
    known = known_model(shape) if isinstance(shape, str) else None
    fields = {name: value for name, value in asdict(known.model).items() if value} if known and known.model else shape
    _begin(out, f"# {source}\n" + yaml.safe_dump({"model": fields}, sort_keys=False))


def _begin(out: Path, text: str) -> None:
    """Writes a file that is not there yet."""
    check_writable(out)
    if out.exists():
        raise CpsimError(f"{out}: exists; give another name")
    write(out, text)
    say(f"Written to {out}")


def explain(
    name: Annotated[str | None, typer.Argument(help="A strategy, mask, field, kernel, framework, model ...")] = None,
    as_json: Json = False,
) -> None:
    """Explain a name in a paragraph, strategies with their picture; without a name, list all."""
    from cpsim.report.explain import explain as about
    from cpsim.report.explain import names
    from cpsim.report.sides import explained_view, names_view

    if name is None:
        print(json.dumps(names(), indent=1)) if as_json else console().print(names_view(names()))
        return
    found = about(name)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        console().print(explained_view(found))
