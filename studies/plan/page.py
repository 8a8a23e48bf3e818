"""Writes docs/plan.md from the committed results: ``python -m studies.plan --update`` and ``... regret --update``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from studies.plan.compare import DISTRIBUTIONS, MORE, SETTINGS, Row
from studies.plan.regret import BATCHES, LONGER, RANKS, SIZES, Small, Wrong
from studies.plan.report import compare_lines, small_lines, verdicts, wrong_lines

FOLDER: Final = Path(__file__).parent
COMPARED: Final = FOLDER / "compared.json"
REGRET: Final = FOLDER / "regret.json"
PAGE: Final = FOLDER.parents[1] / "docs" / "plan.md"


def read(path: Path) -> Any:
    """A file of results."""
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(lines: list[list[str]]) -> str:
    """Cells as a table, the first line its head."""
    head, *rest = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rest))


def text() -> str:
    """The page."""
    rows = [Row(**row) for row in read(COMPARED)["rows"]]
    small, wrong = ([kind(**row) for row in read(REGRET)[name]] for name, kind in (("small", Small), ("wrong", Wrong)))
    names = {setting.name: setting for setting in SETTINGS}
    settings = "\n".join(
        f"* {name}: {one.model} on {one.cluster}, "
        + "".join(f"{field} {value}, " for field, value in one.fields["parallel"].items())
        + f"{one.tokens_per_rank:,} tokens of a batch and at most {one.most_tokens:,} of a microbatch on a rank"
        for name, one in names.items()
    )
    sources = "\n".join(f"* `{name}`: {source}" for name, source in (DISTRIBUTIONS | MORE).items())
    return TEXT.format(
        compared=markdown(compare_lines(rows)),
        verdicts="\n".join(f"* {line}" for line in verdicts(rows)),
        settings=settings,
        sources=sources,
        small=markdown(small_lines(small)),
        wrong=markdown(wrong_lines(wrong)),
        ranks=RANKS,
        sizes=", ".join(map(str, SIZES)),
        batches=BATCHES,
        longer=LONGER,
    )


def write() -> None:
    """Writes the page, once both results are there."""
    if COMPARED.exists() and REGRET.exists():
        PAGE.write_text(text(), encoding="utf-8")


TEXT: Final = """# Plans of batches

Documents of a global batch differ a hundredfold in length. `cpsim.plan_batch` says which ranks compute which documents
together, with what a document costs on a group of so many GPUs taken from cpsim's predictions:

```python
import cpsim

cluster = cpsim.load_cluster("dgx-h100").with_gpus(64)
fields = {{"parallel": {{"recompute": "full"}}, "most_tokens": 16384}}
plan = cpsim.plan_batch(lengths, cluster, "llama3-8b", **fields)  # 10 ms for 4,096 documents, after the first
plan.time_s, plan.imbalance
plan.megatron().sample_id_groups  # which samples every rank runs, in order
```

The first plan for a model on a cluster predicts a table of prices, which takes seconds: what documents of some lengths
add to a microbatch on groups of each size, and what everything else takes by tokens. Packs of mixed documents that are
simulated as a whole agree with the table within 6 % (`tests/test_plan_batch.py`). A plan then

1. gives every document the smallest group that memory allows and on which it takes no longer than some time, which is
   looked for;
2. places documents on aligned groups, the largest groups first, the longest documents first, each on the group that is
   free first: as sizes divide each other, no rank ever waits for its group before the end;
3. packs documents of a group into microbatches of at most `most_tokens` on a rank (None: what fits into memory);
4. moves single documents as long as the budget lasts, or until no plan can be better. The budget counts documents and
   not seconds: ranks that plan for themselves come to the same plan.

**Megatron-Core** takes `plan.megatron()` in place of what its `BalancedCPScheduler` returns
(`get_groups_and_subsamples`, megatron-core 0.16.1). It runs samples one by one: plan with `pack=False`, or have the
loader concatenate the documents of a sample (`samples`, `cu_seqlens`). Its process groups are those of
`hybrid_context_parallel`. **torchtitan** has one size of groups for a whole run: plan with `group_sizes=[8]`, and
`plan.torchtitan()` gives every data-parallel rank as many packed rows, with positions, as its datasets yield them.

## Compared with other planners

`python -m studies.plan` has every planner plan the same batches, and simulates each microbatch that it asks for by
itself on the ranks of its group. Passes count; sums of gradients and the optimizer, which are the same for all, do not.
Groups run key-value shards around a ring (`zigzag_ring`), as Megatron-Core does where its arguments do not say.

* Megatron-Core: its published rule (a document costs its squared length over its ranks), equal to the package's own
  result in `tests/test_plan_study.py`.
* FlexSP-like (arXiv 2412.01523): documents of like length share a microbatch, whose groups are chosen for the earliest
  end; by bisection in place of its integer program, with cpsim's prices, and the best of up to four microbatches more
  than memory asks for.
* WLB-like (arXiv 2503.17924): documents packed by work on groups of the size that is best for the whole batch.
* DCP, where `--dcp` asks for it: attention of every microbatch placed in blocks on all GPUs by cpsim's own search
  (strategy `dcp`); a batch takes minutes to plan, at 64 GPUs.
* cpsim alone: `plan_batch` with one document for each microbatch, as Megatron-Core runs them.

Models and machines:

{settings}

Documents, drawn from published histograms and cut at 512K tokens:

{sources}

Time over that of Megatron-Core's plan, mean of the batches:

{compared}

{verdicts}

Megatron-Core's rule loses where short documents abound: by squared length they cost nearly nothing, so that many land
on few ranks, although their linear layers take their time; and all ranks wait for each other between rounds. Gains are
smallest where a few documents of 512K tokens are most of the batch: their groups span nodes, where the ring's messages
set the time, and every plan needs them on as many ranks.

## Regret

`python -m studies.plan regret` plans {batches} small batches of each of the three distributions with {sizes} documents
(lengths times {longer}) on {ranks} GPUs, and tries every plan there is, by the same prices. Time over that of the best
plan:

{small}

What wrong prices cost: a batch of every distribution on 64 GPUs planned with one cost model off by the ends of its 90 %
interval, or with all drawn at once; time by right prices over that of the plan with right prices:

{wrong}

Errors that all documents have in common cost nothing. What matters is the price of messages between nodes against that
of kernels, for documents that fit either a node or two: there a measurement of the network is worth most.

## On two GPUs

`data/cases/two-plans.jsonl` holds batches of skewed documents under three planners as attention calls of their groups,
with predictions in `studies/plan/predicted-two-plans.jsonl`, made before any run. On a machine with two GPUs:

```sh
python -m cpsim run data/cases/two-plans.jsonl --gpus 2 --out runs.jsonl
python -m studies.plan.two_gpus compare runs.jsonl
```

26 of 33 have run, on two H200. What the planners save over Megatron-Core's scheduler, from nothing to 38 % of the time,
is within 1.3 points of what was predicted for two H100 (`... compare data/runs/h200x2-1128r/h200-plans.jsonl`).
"""


if __name__ == "__main__":
    write()
