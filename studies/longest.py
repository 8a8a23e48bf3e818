"""The longest sequences that fit, as Arctic Long Sequence Training (ALST) finds them, beside those that cpsim predicts;
and what chunks of the MLP cost.

    python -m studies.longest            # prints both tables
    python -m studies.longest --update   # writes them into docs/long-sequences.md

Llama-3.1-8B on nodes of eight H100 with 80 GB in Transformers, ZeRO-3, optimizer on the host, FlashAttention-2, layers
computed again. What each feature is worth is said by recipes of ArcticTraining (projects/sequence-parallelism,
run-h100-*.yml, ``max_length``), the last lines by the abstract of the paper (Bekman et al., 2506.13996). Nothing is
fitted to them.

Differs: FSDP2 stands for ZeRO-3, whose parts of weights and gradients it has in fp32; a step without an optimizer
stands for one on the host; so many chunks of the loss stand for Liger's fused loss, and Transformers' norms and SwiGLU
for Liger's. The recipe for one GPU has its weights on the host, too, which steps do not say.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import predict
from cpsim.prediction.steps import StepCase

PAGE: Final = Path(__file__).parent.parent / "docs" / "long-sequences.md"
MARKS: Final = ("<!-- longest -->\n", "<!-- end of longest -->")
COST_MARKS: Final = ("<!-- cost -->\n", "<!-- end of cost -->")
MODEL: Final = "llama3.1-8b"
STEP: Final = 1000
"""Tokens of a GPU by which lengths differ."""
LOSS_CHUNKS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is switched on, and the longest sequence that it trains."""

    what: str
    tokens: int
    """Published."""
    gpus: int = 8
    ulysses: bool = True
    loss: bool = True
    """Whether loss and logits run in chunks."""
    mlp: bool = False
    """Whether the MLP does: as many chunks as tokens of a GPU are times the elements of the hidden state."""
    offload: bool = False
    """Whether what goes into layers waits on the host."""

    def case(self, per_gpu: int) -> dict[str, Any]:
        """A scenario of so many tokens on each GPU."""
        parallel: dict[str, Any] = {"sharding": "fsdp", "recompute": "full", "optimizer": False}
        parallel |= {"cp": self.gpus} if self.ulysses else {"dp": self.gpus}
        parallel |= {"loss_chunks": LOSS_CHUNKS} if self.loss else {}
        parallel |= {"mlp_chunks": -(-per_gpu // MODELS[MODEL].hidden)} if self.mlp else {}
        return {
            "cluster": "dgx-h100",
            "gpus": self.gpus,
            "tokens_per_gpu": per_gpu,
            "model": MODEL,
            "framework": "huggingface",
            "implementation": "yunchang" if self.ulysses else "cpsim",
            "strategy": "ulysses" if self.ulysses else "none",
            "kernel": "fa2",
            "parallel": parallel,
            **({"offload": "activations"} if self.offload else {}),
        }

    def fits(self, per_gpu: int) -> bool:
        """Whether so many tokens on each GPU do."""
        case = resolve(scenario_from(self.case(per_gpu)))
        steps = StepCase(case.scenario, case.cluster, case.profile)
        return steps.simulate(steps.parallel(), str(case.scenario.strategy), {}).fits

    def longest(self) -> int:
        """Tokens of the longest sequence that is predicted to fit."""
        low, high = 1, 2
        while self.fits(high * STEP):
            low, high = high, 2 * high
        while high - low > max(1, low // 100):
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle * STEP) else (low, middle)
        return low * STEP * (self.gpus if self.ulysses else 1)


RECIPES: Final = (
    Recipe(what="each GPU its own sequence", tokens=32_000, ulysses=False, loss=False),
    Recipe(what="loss in chunks", tokens=160_000, ulysses=False),
    Recipe(what="loss in chunks, Ulysses", tokens=1_100_000),
    Recipe(what="the same, MLP in chunks", tokens=1_200_000, mlp=True),
    Recipe(what="the same, inputs of layers on the host, MLP whole", tokens=2_400_000, offload=True),
    Recipe(what="all of these", tokens=3_700_000, mlp=True, offload=True),
)


def rows() -> Iterator[str]:
    """Lines of the table."""
    yield "| GPUs | what is switched on | published [tokens] | predicted [tokens] | off by |"
    yield "| ---: | --- | ---: | ---: | ---: |"
    for recipe in RECIPES:
        found = recipe.longest()
        error = found / recipe.tokens - 1
        yield f"| {recipe.gpus} | {recipe.what} | {recipe.tokens:,} | {found:,} | {error:+.0%} |"


COST: Final = ((16_384, (1, 4, 16, 64)), (131_072, (1, 8, 32, 128)))
"""Tokens of a GPU, and chunks of the MLP."""


def costs() -> Iterator[str]:
    """Lines of the table of what chunks cost."""
    yield "| tokens of a GPU | mlp_chunks | seconds | longer by | memory [GB] |"
    yield "| ---: | ---: | ---: | ---: | ---: |"
    for tokens, chunks in COST:
        whole_s = 0.0
        for count in chunks:
            case = Recipe(what="", tokens=0).case(tokens)
            found = predict(case | {"parallel": {**case["parallel"], "mlp_chunks": count}})
            whole_s = whole_s or found.time_s
            memory = f"{found.needed_bytes / 1e9:.1f}"
            yield f"| {tokens:,} | {count} | {found.time_s:.1f} | {found.time_s / whole_s - 1:.1%} | {memory} |"


def main() -> None:
    """Prints both tables, or writes them."""
    text = PAGE.read_text(encoding="utf-8")
    for lines, (begin, end) in ((rows(), MARKS), (costs(), COST_MARKS)):
        table = "\n".join(lines) + "\n"
        if "--update" not in sys.argv[1:]:
            print(table)
        before, rest = text.split(begin)
        text = before + begin + table + end + rest.split(end)[1]
    if "--update" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
