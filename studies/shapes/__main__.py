"""`python -m studies.shapes`: see the package."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from cpsim.calibrate.measurement import Point, load
from cpsim.calibrate.residuals import measured, predicted_attention
from cpsim.models.profile import load_profile
from studies.shapes.calls import calls, calls_of_both
from studies.shapes.published import errors

HERE: Final = Path(__file__).parent
GPUS: Final = ("h100", "h200")
SHORT_S: Final = 1e-3
"""Shorter calls are listed apart."""


SETS: Final = {"": calls, "-both": calls_of_both}
"""Ends of the names of files, and what they hold."""


def write_calls() -> None:
    """calls.jsonl and calls-both.jsonl: what is measured."""
    for end, made in SETS.items():
        lines = [json.dumps({"kernel": kernel, **_given(shape.parameters())}) for kernel, shape in made()]
        (HERE / f"calls{end}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{len(lines)} calls")


def _given(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != "area"}


def write_predictions(end: str) -> None:
    """predicted-GPU.jsonl: seconds of both passes of every call of one set, without a pause between calls."""
    points = list(_rows(f"calls{end}.jsonl"))
    for gpu in GPUS:
        seconds = [_predicted(gpu, [point | {"pass": pass_} for point in points]) for pass_ in ("fwd", "bwd")]
        lines = [
            json.dumps({**point, "pass": pass_, "predicted_s": round(one, 9)})
            for point, both in zip(points, zip(*seconds, strict=True), strict=True)
            for pass_, one in zip(("fwd", "bwd"), both, strict=True)
        ]
        (HERE / f"predicted-{gpu}{end}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _predicted(gpu: str, points: list[Point]) -> list[float]:
    """Seconds that today's models give to points of any kernels."""
    profile, found = load_profile(gpu), np.empty(len(points))
    for key in {(point["kernel"], point["pass"]) for point in points}:
        mine = [i for i, point in enumerate(points) if (point["kernel"], point["pass"]) == key]
        found[mine] = predicted_attention(profile.attention[key], [points[i] for i in mine])
    return [float(one) for one in found]


def compare(path: str) -> None:
    """Prints errors by kernel, pass and kind: of what was predicted before, and of today's models."""
    file = load(path)
    points = [point for point in file.points if point["op"] == "attention"]
    gpu = next(name for name in GPUS if name.upper() in file.header["gpu"])
    before = {_identity(row): row["predicted_s"] for end in SETS for row in _rows(f"predicted-{gpu}{end}.jsonl")}
    seconds, today = measured(points), np.array(_predicted(gpu, points))
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for point, real, now in zip(points, seconds, today, strict=True):
        kind = f"{point['kernel']} {point['pass']} {point['head_dim']} {point['family']}"
        group = f"{kind}{', shorter than 1 ms' if real < SHORT_S else ''}"
        groups[group].append((before[_identity(point)] / real - 1, now / real - 1))
        if "-v" in sys.argv:
            window, lens = point.get("window"), f"{point['q_lens']} on {point['k_lens']}"
            heads = f"{point['num_heads']}:{point['num_kv_heads']}"
            then = groups[group][-1][0]
            print(
                f"{kind} {lens} {heads} {window}: {real * 1e3:.3f} ms, before {then:+.1%}, today {now / real - 1:+.1%}"
            )
    for group, found in sorted(groups.items()):
        (then, now), (sign_then, sign_now) = np.abs(found).mean(axis=0), np.mean(found, axis=0)
        print(f"{group}: {len(found)} calls, before {then:.1%} ({sign_then:+.1%}), today {now:.1%} ({sign_now:+.1%})")


def _rows(name: str) -> Iterator[dict[str, Any]]:
    return map(json.loads, (HERE / name).read_text(encoding="utf-8").splitlines())


def _identity(point: Point) -> str:
    names = ("kernel", "pass", "num_heads", "num_kv_heads", "head_dim", "value_dim", "q_lens", "k_lens", "window")
    return json.dumps([*(point.get(name) for name in names), point["varlen"]])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["calls"]:
            write_calls()
        case ["say", *end] if len(end) < 2 and {*end} <= {*SETS}:
            write_predictions(*end or ("",))
        case ["compare", path, *_]:
            compare(path)
        case ["published"]:
            for name, found in errors().items():
                print(f"{name}: {len(found)} rows, {np.abs(found).mean():.1%} ({np.mean(found):+.1%})")
        case other:
            sys.exit(
                f"studies.shapes: expected calls, say, compare FILE or published, got {' '.join(other) or 'nothing'}"
            )
