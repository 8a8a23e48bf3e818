"""Writes docs/gpus.md: the GPUs that ship, and how wrong costs of a GPU are that nobody measured.

    python docs/gpus.py

Takes a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from cpsim.case.gpu import Gpu, gpus  # noqa: E402
from cpsim.models.derive import sustained_flops  # noqa: E402
from cpsim.models.profile import how_known, load_profile  # noqa: E402
from studies.left_out import APART, Row, products_of, rows, table_of  # noqa: E402

PAGE = ROOT / "docs" / "gpus.md"
BAR = 0.08


def described() -> str:
    """The GPUs that ship, as a table."""
    lines = [
        "| name | SMs | GHz | bf16, long products [TFLOP/s] | memory [GB] | [TB/s] | port [GB/s] | power [W] | costs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, gpus().values())])


def _line(gpu: Gpu) -> str:
    port = f"{gpu.port_bytes_per_s / 1e9:.0f} {'PCIe' if gpu.nvlink_bytes_per_s is None else ''}".strip()
    rates = f"{gpu.peak_flops_per_s / 1e12:.0f}, {sustained_flops(gpu) / 1e12:.0f}"
    memory = f"{gpu.memory_bytes / 1e9:.0f} | {gpu.memory_bandwidth_bytes_per_s / 1e12:.2f}"
    first = f"`{gpu.name}` | {gpu.num_sms} | {gpu.clock_hz / 1e9:.2f}"
    return f"| {first} | {rates} | {memory} | {port} | {gpu.power_w:.0f} | {how_known(gpu)} |"


def uncertain() -> str:
    """Half-widths of 90 % intervals of every GPU's costs."""
    lines = ["| GPU | attention kernels | products | memory-bound ops |", "|---|---|---|---|"]
    for name in gpus():
        sigma = load_profile(name).sigma
        kernels = [1.645 * s for m, s in sigma.items() if m.startswith("attention") and not m.endswith("between GPUs")]
        others = [1.645 * sigma[model] for model in ("matrix products", "memory-bound")]
        each = " | ".join(f"{half:.0%}" for half in others)
        lines.append(f"| `{name}` | {min(kernels):.0%} to {max(kernels):.0%} | {each} |".replace("%", " %"))
    return "\n".join(lines)


def sources() -> str:
    """Where the numbers of each GPU come from."""
    return "\n".join(f"- `{gpu.name}`: {gpu.source}" for gpu in gpus().values())


def worst(found: list[Row]) -> str:
    """What misses the bar."""
    missed = [row for row in found if row.mean_absolute > BAR and row.key not in APART]
    named = [f"{r.gpu} {r.model} ({r.table}) {r.mean_absolute:.0%}" for r in missed]
    return ", ".join(named).replace("%", " %")


def page() -> str:
    """The whole page."""
    found = list(rows(list(gpus())))
    compared = [row for row in found if row.key not in APART]
    calls = sum(row.points for row in compared)
    inside = sum(row.points * row.covered for row in compared) / calls
    return f"""# GPUs

Written by `python docs/gpus.py`.

A GPU is a description: SMs, clocks, tensor rates, memory, links, power limit (`cpsim/data/gpus.json`). Two were
measured here as a whole, of others kernels are published, and of the rest there is a data sheet. Costs that nobody
measured are derived from the GPUs most alike; `cpsim/models/derive.py` says how.

{described()}

Name one as a cluster: `cluster: l40s` is one node of eight of them, of 72 for `gb200` and `gb300`. Or name it in a
cluster file of your own, as it is or with fields changed:

```yaml
name: mine
gpus_per_node: 8
gpu: {{name: h100, power_w: 500}}
```

A GPU that is not here takes `name`, `memory_bytes`, `num_sms`, `peak_flops_per_s` and `memory_bandwidth_bytes_per_s`;
`architecture`, `boost_clock_hz`, `power_w` and `nvlink_bytes_per_s` make its costs better. With `pcie_bytes_per_s` and
no `nvlink_bytes_per_s` its node has PCIe only; with neither, NVLink as measured on H200. Letters may have any case.
`profile: data-sheet` derives costs by the description of the cluster's GPU.

## How sure that is

Half of a 90 % interval, for one call:

{uncertain()}

## Every GPU from the others

`python -m studies.left_out` leaves a GPU out: its profiles, and for products what its long ones reach. Errors are
logarithmic, positive where predictions are too slow. Of {calls:,} calls {100 * inside:.0f} % are inside their 90 %
interval.

{table_of(found)}

Means above {100 * BAR:.0f} %: {worst(found)}.

- GB200's products in FP8 were timed after 10,000 warm-ups and are a fifth slower than the best that others publish.
- On H20, whose tensor cores alone are slower, short calls of head dimension 64 hide more of their softmax than on H100.
- Some memory-bound ops of layers were compiled differently on H100 and on H200.

cuDNN of 9.17 and later is other code on Blackwell, 8 to 18 % faster: B200's table is of 9.10 and 9.13, those of GB200
and GB300 of 9.17 to 9.22, and each is predicted from GPUs with the same.

{products_of(list(gpus()))}

## Sources

{sources()}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
