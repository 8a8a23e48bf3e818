"""Ranks of tests: a script in a process of its own plans every case, and its forks are the ranks, on gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_script(name, *arguments, timeout_s, ahead=()):
    """Runs a script of this folder, with folders whose modules come before installed ones, and gives the number that
    it prints last."""
    paths = os.pathsep.join(map(str, (HERE.parent, HERE, *ahead)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(HERE / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split()[-1])


def fork_ranks(work, num_ranks, cases):
    """Calls ``work(node, num_ranks, cases)`` on every rank.

    Rank 0 serves the store on a socket that is open before the ranks are: a server in the process that forks has a
    thread, whose locks a fork may copy while they are held, and then that rank waits for ever.
    """
    import torch

    with socket.create_server(("127.0.0.1", 0)) as door:
        torch.multiprocessing.start_processes(
            _rank_main, (work, num_ranks, door, cases), nprocs=num_ranks, start_method="fork"
        )


def _rank_main(rank, work, num_ranks, door, cases):
    import torch.distributed as dist

    from cpsim.real.run.node import Node

    host, port = door.getsockname()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    store = None
    if rank == 0:  # serves the others for as long as it lives
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
    with Node(cpu=True) as node:
        work(node, num_ranks, cases)
    del store
