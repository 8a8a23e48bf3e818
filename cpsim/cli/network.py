"""Commands about networks: collectives, init cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpsim.cli.terminal import Json, LogDomain, LogNodes, LogRanks, check_writable, console, refuse
from cpsim.errors import ScenarioError
from cpsim.runtime.files import write
from cpsim.runtime.streams import say

if TYPE_CHECKING:
    from cpsim.calibrate.describe import Found


def collectives(
    cluster: Annotated[str, typer.Option(help="A preset or a cluster file.")],
    gpus: Annotated[int | None, typer.Option(min=2, help="GPUs in use; one node where not given.")] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="all_gather, reduce_scatter, all_to_all, all_reduce or sendrecv; may be repeated."),
    ] = None,
    smallest: Annotated[str, typer.Option("--from", help="Smallest size, e.g. 1M.")] = "1M",
    largest: Annotated[str, typer.Option("--to", help="Largest size, e.g. 8G.")] = "8G",
    profile: Annotated[str | None, typer.Option(help="Profile instead of the cluster's.")] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Log of nccl-tests to compare with; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what nccl-tests would print on a cluster: size, time with its interval, algorithm and bus bandwidth."""
    from cpsim.case.cluster import load_cluster
    from cpsim.prediction import collectives as model
    from cpsim.report.collectives import collectives_record, collectives_view

    known = load_cluster(cluster)
    if against:
        refuse("collectives: the log says which and how many", {"--gpus": gpus is not None, "--kind": bool(kind)})
        answer = model.against(known, _points(against), profile)
    else:
        chosen = [model.kind_named(name) for name in kind or model.TESTS]
        answer = model.collectives(known.with_gpus(gpus) if gpus else known, chosen, _sizes(smallest, largest), profile)
    if as_json:
        print(json.dumps(collectives_record(answer), indent=1))
    else:
        console().print(collectives_view(answer))


def _points(paths: list[Path]) -> list[dict[str, object]]:
    from cpsim.calibrate.nccl_logs import read_nccl_log

    points: list[dict[str, object]] = []
    for path in paths:
        log = read_nccl_log(path)
        for line in log.notes:
            say(f"cpsim: {path}: {line}")
        points += log.points
    return points


def _sizes(smallest: str, largest: str) -> list[int]:
    """Doubling sizes, written as nccl-tests takes them: 8, 64K, 1M, 8G."""
    low, high = (_nbytes(text, name) for text, name in ((smallest, "--from"), (largest, "--to")))
    if low > high:
        raise ScenarioError(f"--from: expected at most --to, got {smallest} and {largest}")
    return [low << k for k in range(60) if low << k <= high]


def _nbytes(text: str, name: str) -> int:
    factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not (digits.isdecimal() and len(digits) < 12 and 1 <= int(digits) * factor <= 2**40):
        raise ScenarioError(f"{name}: expected a size of 1 to 1024G, e.g. 64K, 1M or 8G, got {text!r}")
    return int(digits) * factor


def init_cluster(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Output of nvidia-smi topo -m, ibstat and nccl-tests; none are needed.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Write the cluster file here.")] = Path("my-cluster.yaml"),
    gpu: Annotated[str | None, typer.Option(help="GPU, e.g. h100.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a node.")] = None,
    inside: Annotated[
        str | None, typer.Option(help="Links of a node, e.g. 'nvlink 450 GB/s nvls', 'pcie 32 GB/s'.")
    ] = None,
    nics: Annotated[str | None, typer.Option(help="NICs of a node, e.g. '4 x 200G', or none.")] = None,
    transport: Annotated[str | None, typer.Option(help="infiniband, roce, efa, tcpxo, tcpx or ethernet.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Profile whose kernels are taken; the GPU's where not given.")
    ] = None,
    ranks: LogRanks = None,
    nodes: LogNodes = None,
    domain: LogDomain = None,
    as_json: Json = False,
) -> None:
    """Write a commented cluster file from files and answers to five questions, which options answer, too."""
    from cpsim.calibrate.describe import as_file, described, read_files
    from cpsim.calibrate.nccl_logs import Said

    check_writable(out)
    found = read_files(files or [], Said(gpu=gpu, ranks=ranks, nodes=nodes, domain=domain))
    found = found.known(
        gpu=gpu,
        gpus_per_node=None if gpus_per_node is None else str(gpus_per_node),
        inside=inside,
        nics=nics,
        transport=transport,
        profile=profile,
    )
    found = _asked(found).filled()
    cluster, notes = described(found, out.stem)
    text = as_file(found, cluster, "cpsim init cluster")
    write(out, text)
    if as_json:
        print(json.dumps({"out": str(out), "cluster": cluster.to_dict(), "notes": notes}, indent=1))
    else:
        print(text, end="")
        say(f"cpsim: written to {out}; `cpsim collectives --cluster {out}` says what it means")
    for line in notes:
        say(f"cpsim: {line}")


def _asked(found: Found) -> Found:
    """With answers to what is still open, where somebody is there to give them."""
    from cpsim.calibrate.describe import NONE, QUESTIONS, usual_of

    if not sys.stdin.isatty():
        return found
    for name, question in QUESTIONS.items():
        if getattr(found, name) is None and not (name == "transport" and found.nics in (None, NONE)):
            found = found.known(**{name: str(typer.prompt(question, default=usual_of(found.gpu).get(name), err=True))})
    return found
