"""Exchanges of layers with a state beside each other: milliseconds of one layer, both passes, predicted.

python -m studies.recurrent.exchanges

Rows are models, numbers of H100 (8 in a node) that share a sequence, and tokens of each; columns are convolution, scan
and norm without an exchange, and with each. Kernels are measured, networks are those of preset `dgx-h100`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cpsim.case.cluster import load_cluster
from cpsim.case.model import MODELS
from cpsim.errors import InfeasibleError
from cpsim.models.profile import load_profile
from cpsim.prediction.step.recurrent import Scans
from cpsim.strategies.states import EXCHANGES

NAMES: Final = ("qwen3-next-80b-a3b", "nemotron-h-8b")
RANKS: Final = (8, 32)
TOKENS: Final = (2048, 8192, 32768)
ALONE: Final = "alone"


def scans(name: str, ranks: int, exchange: str) -> Scans:
    """Layers of a model on so many ranks."""
    layer = MODELS[name].recurrent
    assert layer is not None
    return Scans(
        layer=layer,
        tp=1,
        cluster=load_cluster("dgx-h100").with_gpus(ranks),
        profile=load_profile("h100"),
        exchange=exchange,  # type: ignore[arg-type]
        mask="causal",
        slowest=1.0,
    )


def seconds(name: str, ranks: int, tokens: int, exchange: str) -> float | None:
    """Of both passes; None where heads do not allow it."""
    alone = exchange == ALONE
    found = scans(name, 1 if alone else ranks, EXCHANGES[0] if alone else exchange)
    try:
        (one,) = found.of([(tokens * found.ranks,)])
    except InfeasibleError:
        return None
    return one.seconds


def table() -> Iterator[str]:
    """Lines of Markdown."""
    names = (ALONE, *EXCHANGES)
    yield "| model | GPUs | tokens of each | " + " | ".join(f"{name} [ms]" for name in names) + " |"
    yield "| --- " * (3 + len(names)) + "|"
    for name in NAMES:
        for ranks in RANKS:
            for tokens in TOKENS:
                times = [seconds(name, ranks, tokens, exchange) for exchange in names]
                best = min(t for t in times[1:] if t is not None)
                cells = [
                    "cannot" if t is None else f"{'**' * (t == best)}{1e3 * t:.2f}{'**' * (t == best)}" for t in times
                ]
                yield f"| {name} | {ranks} | {tokens:,} | " + " | ".join(cells) + " |"


def main() -> None:
    print("\n".join(table()))


if __name__ == "__main__":
    main()
