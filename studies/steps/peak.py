"""What a real training step holds on a GPU when its memory is fullest: which lines allocated it.

    torchrun --nproc-per-node 2 -m studies.steps.peak --scenarios cases.jsonl --out peaks.jsonl

Runs every scenario as `cpsim run` does, three times; PyTorch's allocator records the third. A file has one line for a
scenario: bytes at the peak, those that were there before the step began, and the rest by the lines of Python that asked
for them, largest first. Of the first rank.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch

from cpsim.case.load import scenario_from
from cpsim.errors import CpsimError
from cpsim.real.run.node import Node, end_process
from cpsim.real.steps import make

WARMUP: Final = 2
FRAMES: Final = 4
"""Lines of Python that say who allocated."""
SMALL: Final = 8 << 20
"""Bytes of groups that are left out."""


def peak_of(events: list[dict[str, Any]], before: int) -> tuple[int, int, Counter[tuple[str, int]]]:
    """Bytes at the peak, of these what was there before, and the rest by who allocated it and the size of one block.

    Args:
        events: of the allocator, as ``torch.cuda.memory._snapshot`` has them.
        before: bytes that were allocated before the first one.
    """
    live: dict[int, tuple[str, int]] = {}
    old, now, peak = before, before, before
    old_then, at = before, Counter[tuple[str, int]]()
    fullest = _fullest(events, before)
    for i, event in enumerate(events):
        size, address = int(event["size"]), int(event["addr"])
        if event["action"] == "alloc":
            live[address] = _who(event["frames"]), size
            now += size
        elif event["action"] == "free_requested":
            now -= size
            if live.pop(address, None) is None:
                old -= size
        if i == fullest:
            peak, old_then, at = now, old, Counter(live.values())
    return peak, old_then, at


def _fullest(events: list[dict[str, Any]], before: int) -> int:
    """The event after which most is allocated."""
    now, most, where = before, before, -1
    for i, event in enumerate(events):
        now += {"alloc": 1, "free_requested": -1}.get(event["action"], 0) * int(event["size"])
        if now > most:
            most, where = now, i
    return where


def _who(frames: list[dict[str, Any]]) -> str:
    named = [
        f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in frames if str(f["filename"]).endswith(".py")
    ]
    return " < ".join(named[:FRAMES]) or "autograd"


def record(node: Node, case: dict[str, Any]) -> dict[str, Any]:
    """One scenario's line."""
    runner = make(scenario_from(case), node)
    for _ in range(WARMUP):
        runner.launch()
        node.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    runner.launch()
    node.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][node.device.index or 0]
    torch.cuda.memory._record_memory_history(enabled=None)
    peak, old, blocks = peak_of(events, before)
    groups = Counter[str]()
    for (who, size), count in blocks.items():
        groups[f"{count} x {size} {who}"] += count * size
    return {
        "scenario": case,
        "peak": peak,
        "allocated": torch.cuda.max_memory_allocated(),
        "there_before": old,
        "groups": [[name, nbytes] for name, nbytes in groups.most_common() if nbytes >= SMALL],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with Node(cpu=False) as node:
        for line in args.scenarios.read_text(encoding="utf-8").splitlines():
            case = json.loads(line)
            if case["gpus"] != node.size:
                continue
            try:
                found = record(node, case)
            except (CpsimError, RuntimeError, SystemError) as error:
                found = {"scenario": case, "error": f"{type(error).__name__}: {error}"[:300]}
            if node.rank == 0:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
            gc.collect()
            torch.cuda.empty_cache()
        end_process()


if __name__ == "__main__":
    main()
