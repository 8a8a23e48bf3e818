"""What papers found of later strategies and of sparse attention, beside what cpsim predicts, in one table with reasons.

    python -m studies.later            # prints the table
    python -m studies.later --update   # writes it into docs/strategies.md

Rows are those of `studies.claims`, `studies.sparse`, `studies.tasp` and `studies.longest`: how much faster one way is
than the other, milliseconds, or tokens. Nothing is fitted to them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final

from studies import claims, longest, sparse, tasp

MARKS: Final = ("<!-- later -->\n", "<!-- end of later -->")
CLOSE: Final = 0.2
"""Sizes that are off by less count as right."""
EVEN: Final = 0.03
"""Ratios so near to one have no sign."""


@dataclass(frozen=True, slots=True)
class Row:
    """One finding."""

    paper: str
    what: str
    published: float | None
    """None: which way is faster, and not by how much."""
    predicted: float
    faster: bool | None
    """Whether the paper finds the first way faster; None: it is no comparison of two ways."""
    reason: str = ""
    """Why sizes differ, where they do or would."""

    @property
    def error(self) -> float | None:
        """Relative."""
        return None if self.published is None else self.predicted / self.published - 1

    @property
    def sign(self) -> bool | None:
        """Whether the faster way is predicted to be; None: there is none to tell."""
        if self.faster is None or (self.published is not None and abs(self.published - 1) < EVEN):
            return None
        return (self.predicted > 1) == self.faster

    @property
    def explained(self) -> bool:
        """Whether the size is right or the reason known."""
        return self.error is None or abs(self.error) <= CLOSE or bool(self.reason)


MESH: Final = (
    "the mean over lengths and on a network that the abstract does not name; here of 1, 2 and 4 million tokens. Our "
    "ring sends gradients of keys in fp32, and through one NIC of a node at a time"
)
WHOLE_LAYERS: Final = "time to the first token of whole layers, of which attention is a part: see attention alone below"
BURST: Final = "whole steps beside the best of other systems; here attention alone beside our ring"
NSA: Final = (
    "other kernels: the paper's dense attention is in Triton, 1.6 and 2.3 times as long as flash-attn 2, and it counts "
    "no choosing; three public kernels lie between, see sparse attention"
)
ROUND: Final = "recipes' lengths are round, and twice as long a sequence fits here neither"
TABLE_5: Final = ((0.025, 2.30, 2.08), (0.1, 6.43, 7.46))
"""Shares of new tokens, and milliseconds of attention with keys and with queries sent, of the paper's table 5."""


def of_claims() -> Iterator[Row]:
    """Of strategies beside a ring, or Ulysses."""
    mesh, few_keys, cached, cached_more, burst, *_ = claims.CLAIMS
    ratios = {claim.claim: [_ratio(claim, *case) for case in claim.cases()] for claim in claims.CLAIMS[:5]}
    yield Row(mesh.paper, mesh.shape, 2.9, mean(ratios[mesh.claim]), True, MESH)
    for ratio, tokens in zip(ratios[few_keys.claim], few_keys.tokens, strict=True):
        yield Row(few_keys.paper, f"no cached keys, {tokens // 1024:,}k tokens", None, ratio, False)
    for claim, said in ((cached, (1.14, 1.06, 1.01)), (cached_more, (0.94, 0.93, 0.93))):
        for ratio, published, new in zip(ratios[claim.claim], said, claim.new, strict=True):
            yield Row(cached.paper, f"{100 * new:g} % new tokens", published, ratio, published > 1, WHOLE_LAYERS)
    for new, *both in TABLE_5:
        queries, keys = cached.predicted(cached.tokens[0], new)
        for sent, published, found in zip(("keys", "queries"), both, (keys, queries), strict=True):
            what = f"attention alone, {sent} sent, {100 * new:g} % new tokens [ms]"
            yield Row("pass-Q (2411.01783), table 5", what, published, 1e3 * found.time_s, None)
    yield Row(burst.paper, "1M tokens on 32 A100", 1.19, ratios[burst.claim][-1], True, BURST)


def _ratio(claim: claims.Claim, tokens: int, new: float) -> float:
    this, that = claim.predicted(tokens, new)
    return that.time_s / this.time_s


def of_tasp() -> Iterator[Row]:
    """Of rings on all cycles beside one ring."""
    for one in tasp.PUBLISHED:
        reason, what = "", f"{one.gpus} H100, {one.mask} mask"
        if one.gpus > 8:
            whole = mean(map(tasp.speed_up, tasp.cases(one, tasp.WHOLE)))
            reason = (
                f"a message between two nodes gets half of a NIC here, as MagiAttention's rings show; where it gets "
                f"all, a ring is as much faster: {whole:.2f} times, {whole / one.average - 1:+.0%}"
            )
        predicted = mean(map(tasp.speed_up, tasp.cases(one)))
        yield Row("TASP (2509.26541)", what, one.average, predicted, True, reason)


def of_sparse() -> Iterator[Row]:
    """Of sparse attention beside dense one."""
    for claim in sparse.CLAIMS:
        dense, chosen = claim.predicted()
        reason = NSA if claim.paper.startswith("NSA") else ""
        yield Row(claim.paper, claim.pass_, claim.said, dense / chosen, True, reason)


def of_lengths() -> Iterator[Row]:
    """Tokens of the longest sequence, in thousands."""
    for recipe in longest.RECIPES:
        published, predicted = recipe.tokens / 1e3, recipe.longest() / 1e3
        reason = ROUND if 1 < predicted / published < 2 else ""
        yield Row("ALST (2506.13996)", f"{recipe.what} [1,000 tokens]", published, predicted, None, reason)


def found() -> list[Row]:
    """All rows."""
    return [*of_claims(), *of_tasp(), *of_sparse(), *of_lengths()]


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of the table, of the reasons, and of what they add up to."""
    asked = [row for row in rows if row.error is not None and abs(row.error) > CLOSE]
    reasons = list(dict.fromkeys(row.reason for row in asked if row.reason))
    yield "| paper | what | published | predicted | off by | sign | why |"
    yield "| --- | --- | ---: | ---: | ---: | --- | ---: |"
    for row in rows:
        published = "" if row.published is None else f"{row.published:.4g}"
        error = "" if row.error is None else f"{row.error:+.0%}"
        sign = {True: "right", False: "wrong", None: ""}[row.sign]
        why = f"{reasons.index(row.reason) + 1}" if row in asked and row.reason else ""
        yield f"| {row.paper} | {row.what} | {published} | {row.predicted:.4g} | {error} | {sign} | {why} |"
    signs = [row.sign for row in rows if row.sign is not None]
    sizes = [row for row in rows if row.error is not None]
    yield ""
    yield (
        f"Signs: {sum(signs)} of {len(signs)} right. Sizes: {len(sizes) - len(asked)} of {len(sizes)} within 20 %, and "
        f"of {sum(row.explained for row in asked)} of {len(asked)} others there is a reason:"
    )
    yield ""
    for number, reason in enumerate(reasons, start=1):
        yield f"{number}. {reason}."


def main() -> None:
    """Prints the table, or writes it."""
    table = "\n".join(lines(found())) + "\n"
    if "--update" not in sys.argv[1:]:
        print(table, end="")
        return
    claims.put(table, claims.PAGE, MARKS)


if __name__ == "__main__":
    main()
