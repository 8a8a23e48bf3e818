"""The executor on gloo: every strategy, mask and pass in float64 against dense attention on one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

HERE = Path(__file__).parent


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_schedule_gives_dense_attention_and_its_gradients_on_gloo(num_ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    done = subprocess.run(
        [*command, str(HERE / "executor_worker.py")],
        capture_output=True, text=True, env=environment, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 100
