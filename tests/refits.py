"""How far apart two fits are: to the last byte alike where processor and libraries round alike, elsewhere nearly."""

import numpy as np

from cpsim.calibrate.residuals import residuals


def drift(made, shipped, points):
    """By cost model: relative differences between what two profiles predict for measured points."""
    ours, theirs = ({id(row.point): row for row in residuals(p, points)} for p in (made, shipped))
    found = {}
    for point, row in ours.items():
        found.setdefault(row.model, []).append(abs(row.predicted_s / theirs[point].predicted_s - 1))
    return {model: np.array(rows) for model, rows in found.items()}
