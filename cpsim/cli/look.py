"""Commands that list what there is: profiles, clusters, kernels, strategies, masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cpsim.cli.terminal import (
    Json,
    check_writable,
    console,
    print_profiles,
    refuse,
    typed,
)
from cpsim.errors import CpsimError, InfeasibleError, nearest
from cpsim.runtime.streams import say

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario


def profiles(as_json: Json = False) -> None:
    """List the profiles that come with cpsim, and those derived of other GPUs: from which measurements, how good."""
    from cpsim.case.gpu import gpus
    from cpsim.models.profile import load_profile, shipped_profiles

    names = dict.fromkeys((*shipped_profiles(), *gpus()))
    print_profiles([load_profile(name) for name in names], as_json)


def clusters(as_json: Json = False) -> None:
    """List the cluster presets and where their network numbers come from."""
    from cpsim.case.cluster import presets

    if as_json:
        print(json.dumps([cluster.to_dict() for cluster in presets().values()], indent=1))
    else:
        from cpsim.report.tables import clusters_view

        console().print(clusters_view(presets().values()))


def kernels(
    context: typer.Context,
    profile: Annotated[list[str] | None, typer.Option(help="Profile to tabulate; may be repeated.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 128,
    published: Annotated[bool, typer.Option("--published", help="Benchmarks' own calls beside predictions.")] = False,
    as_json: Json = False,
) -> None:
    """List attention kernels: masks, passes and types that they take, TFLOP/s and memory by mask and length."""
    from cpsim.models.profile import load_profile

    if published:
        refuse("kernels: --published has heads of its own", typed(context, "heads", "kv_heads", "head_dim"))
        _published(profile or ["h100", "b200"], as_json)
        return
    from cpsim.prediction.kernel_tables import speeds, support
    from cpsim.report.kernels import kernels_record, kernels_view

    chosen = [load_profile(name) for name in profile or ("h100", "h200")]
    rates = [speed for entry in chosen for speed in speeds(entry, heads, kv_heads, head_dim)]
    if as_json:
        print(json.dumps(kernels_record(support(), rates), indent=1))
    else:
        console().print(kernels_view(support(), rates, f"{heads}:{kv_heads}"))


def _published(profiles: list[str], as_json: bool) -> None:
    from cpsim.models.profile import load_profile
    from cpsim.prediction.kernels_beside import beside, supported
    from cpsim.report.kernels_beside import published_record, published_view

    rows = beside([load_profile(name) for name in profiles])
    if not rows:
        raise CpsimError(f"kernels: no table is published of the GPUs of {', '.join(profiles)}; try h100 or b200")
    if as_json:
        print(json.dumps(published_record(supported(), rows), indent=1))
    else:
        console().print(published_view(supported(), rows))


def strategies(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of a strategy; all are listed where none is given.")] = None,
    gpus: Annotated[int, typer.Option(min=1, max=32, help="GPUs of the case that is drawn.")] = 4,
    documents: Annotated[str | None, typer.Option(help="Lengths in 32nds of the tokens, e.g. 14,9,5,4.")] = None,
    mask: Annotated[str, typer.Option(help="Name of a mask.")] = "causal_document",
    knob: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Setting of the strategy; may be repeated.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    as_json: Json = False,
) -> None:
    """List the strategies and their knobs, or draw what each rank of one holds, computes and sends."""
    from cpsim.report.records import strategy_records

    check_writable(png)
    if name is not None:
        _draw_strategy(name, gpus, documents, mask, knob or [], png, as_json)
        return
    refuse("strategies: all are listed where none is named", typed(context, "gpus", "documents", "mask", "knob", "png"))
    records = strategy_records()
    if as_json:
        print(json.dumps(records, indent=1))
    else:
        from cpsim.report.tables import strategies_view

        console().print(strategies_view(records))


TOKENS_OF_CELL: Final = 256
"""Tokens of a cell of a strategy's picture."""
HEADS_OF_PICTURE: Final = (4, 8, 16, 32, 64)
"""Heads of the case that is drawn: the fewest that the strategy takes."""


def _draw_strategy(
    name: str, gpus: int, documents: str | None, mask: str, knobs: list[str], png: Path | None, as_json: bool
) -> None:
    from dataclasses import replace

    from cpsim.case.cluster import presets
    from cpsim.case.workload import Workload
    from cpsim.masks.names import MASK_NAMES
    from cpsim.report import holdings
    from cpsim.strategies import plan

    lengths = [int(part) if part.isdigit() else 0 for part in (documents or str(holdings.CELLS)).split(",")]
    if min(lengths) < 1 or sum(lengths) != holdings.CELLS:
        raise CpsimError(f"documents: expected lengths that add up to {holdings.CELLS}, got {documents}")
    if mask not in MASK_NAMES:
        raise CpsimError(f"mask: {mask!r} is unknown; {nearest(mask, MASK_NAMES)}")
    given = dict(_setting(entry) for entry in knobs)
    cluster = replace(presets()["dgx-h200"], num_gpus=gpus, gpus_per_node=min(gpus, 8))
    refused: list[InfeasibleError] = []
    for heads in HEADS_OF_PICTURE:
        case = Workload(
            documents=tuple(TOKENS_OF_CELL * length for length in lengths),
            mask=mask,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=128,
            dtype="bf16",
        )
        try:
            schedules = {pass_: plan(name, case, cluster, pass_, given) for pass_ in ("fwd", "bwd")}
            break
        except InfeasibleError as error:
            refused.append(error)
    else:
        raise refused[0]
    said = ", ".join([name, *(f"{key} {value}" for key, value in given.items())])
    heading = f"{said}: {gpus} GPUs, {case.num_tokens:,} tokens, {mask}, {case.num_heads} heads of 128"
    maps = [part(schedules["fwd"], case, TOKENS_OF_CELL) for part in (holdings.computed, holdings.held)]
    found = holdings.shares(schedules, case)
    if as_json:
        print(json.dumps(holdings.holdings_record(heading, found), indent=1))
    else:
        console().print(holdings.holdings_view(heading, found, *maps))
    if png:
        holdings.write_png(png, heading, found, *maps)
        say(f"Picture written to {png}")


def _setting(entry: str) -> tuple[str, Any]:
    from cpsim.units import number_or_text

    key, equals, value = entry.partition("=")
    if not equals:
        raise CpsimError(f"knob: expected K=V, e.g. ulysses=2, got {entry!r}")
    return key, number_or_text(value)


def mask(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of a mask; all are listed where none is given.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Total tokens.")] = 16384,
    option: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Option of the mask; may be repeated.")
    ] = None,
    documents: Annotated[str | None, typer.Option(help="Lengths, e.g. 100,300, or a distribution.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs to ask strategies for.")] = 4,
    cluster: Annotated[str, typer.Option(help="A preset or a cluster file.")] = "dgx-h200",
    png: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file; it opens offline.")] = None,
    as_json: Json = False,
) -> None:
    """Show a mask: picture, exact area, and which strategies, kernels and implementations can run it."""
    from cpsim.case.resolve import cluster_of, workload_of
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

    workload = workload_of(scenario)
    workload.slices()  # what is wrong with its options is said before anything is written
    found = support(workload, cluster_of(scenario))
    if as_json:
        print(json.dumps(masks.mask_record(workload, found), indent=1))
    else:
        console().print(masks.mask_view(workload, found, gpus))
    if png:
        masks.write_png(png, workload)
        say(f"Picture written to {png}")
    if html:
        masks.write_html(html, workload, found)
        say(f"Page written to {html}")


def _mask_scenario(
    name: str, tokens: int, options: list[str], documents: str | None, gpus: int, cluster: str
) -> Scenario:
    """The case of a mask; masks of documents get some where none are given."""
    from cpsim.case.load import scenario_from
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


def reproduce(
    context: typer.Context,
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study's name, e.g. public; --help lists them.")] = "",
) -> None:
    """Predict published runs of others and set them beside what was published; needs a checkout."""
    from cpsim.cli.checkout import studies

    studies()([study, *context.args] if study else ["--help"], prog_name="cpsim reproduce", standalone_mode=False)
