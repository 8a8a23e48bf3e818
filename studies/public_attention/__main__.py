"""``python -m studies.public_attention``: published rows beside today's predictions and those committed first.

``--predict`` writes the predictions and compares nothing.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from studies.public_attention.compare import FILES, PREDICTED, Compared, committed, compared, predict_all


def line(name: str, found: list[Compared]) -> str:
    """Mean, sign, worst and coverage."""
    errors = np.array([one.error for one in found])
    worst = errors[np.argmax(np.abs(errors))]
    inside = np.mean([one.inside for one in found])
    mean = f"{np.abs(errors).mean():6.1%} {errors.mean():+6.1%} {worst:+6.1%}"
    return f"{name:34} {len(found):3}  {mean}  inside {inside:.0%}"


def main() -> None:
    """Prints the tables."""
    today = predict_all()
    if "--predict" in sys.argv[1:]:
        PREDICTED.write_text("".join(json.dumps(one) + "\n" for one in today), encoding="utf-8")
        return
    for when, predictions in (("today", today), ("committed first", committed())):
        found, left = compared(predictions)
        print(f"{when}\n{'':34} rows   mean   sign  worst")
        for file in FILES:
            of_file = [one for one in found if one.row.file == file]
            clusters = {one.row.scenario["cluster"] for one in of_file if one.row.scenario}
            for cluster in sorted(clusters):
                mine = [one for one in of_file if one.row.scenario and one.row.scenario["cluster"] == cluster]
                print(line(f"{file.removesuffix('.csv')}, {cluster.split('/')[-1].removesuffix('.yaml')}", mine))
        for reason, count in left.items():
            print(f"  {count:3} not compared: {reason}")
        print()


if __name__ == "__main__":
    main()
