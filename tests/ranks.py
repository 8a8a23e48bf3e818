"""Ranks of tests: a script in a process of its own plans every case, and its forks are the ranks, on gloo."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_script(name, argument, timeout_s, ahead=()):
    """Runs a script of this folder, with folders whose modules come before installed ones, and gives the number that
    it prints last."""
    paths = os.pathsep.join(map(str, (HERE.parent, HERE, *ahead)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(HERE / name), str(argument)],
        capture_output=True, text=True, env=environment, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split()[-1])


def fork_ranks(work, num_ranks, cases):
    """Calls ``work(node, num_ranks, cases)`` on every rank."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(
        _rank_main, (work, num_ranks, store.port, cases), nprocs=num_ranks, start_method="fork"
    )


def _rank_main(rank, work, num_ranks, port, cases):
    from real.node import Node

    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with Node(cpu=True) as node:
        work(node, num_ranks, cases)
