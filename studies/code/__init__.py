"""Facts of other people's code that cannot run here, which published runs are predicted with.

To import this package adds them to the implementations that scenarios may name. Covered by
tests/test_implementations.py.
"""

from __future__ import annotations

from cpsim.strategies.others import IMPLEMENTATIONS
from studies.code.dcp import DCP
from studies.code.internevo import INTERNEVO
from studies.code.longca_bench import LONGCA_BENCH, MAGI_ATTENTION
from studies.code.transformer_engine import TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_THD

IMPLEMENTATIONS.update(
    {
        code.name: code
        for code in (LONGCA_BENCH, MAGI_ATTENTION, TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_THD, INTERNEVO, DCP)
    }
)
