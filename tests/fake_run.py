"""`cpsim.real.run` with runners that do nothing but sleep, send, or fail as their case says: knob `fail`."""

import os
import time

import torch.distributed as dist

from cpsim.errors import InfeasibleError
from cpsim.real.run.__main__ import main


class Runner:
    def __init__(self, scenario, pass_, node):
        self.node, self.fail = node, scenario.knobs.get("fail", "")
        self.seconds = {"fwd": 0.002, "bwd": 0.004}[pass_] * (1 + node.rank)
        if self.fail == "set-up":
            raise InfeasibleError("no such thing")
        if self.fail == "memory" and node.rank == 1:
            raise MemoryError("only on one rank")

    def prepare(self):
        pass

    def launch(self):
        if self.fail == "alike":
            raise RuntimeError("all fail alike")
        if self.fail == "one":
            if self.node.rank == 1:
                raise RuntimeError("one fails alone")
            self.node.barrier()
        if self.fail == "hang" and self.node.rank == 1:
            time.sleep(100)
        if self.fail == "crash" and self.node.rank == 1:
            os._exit(9)
        dist.barrier()
        time.sleep(self.seconds)


if __name__ == "__main__":
    main(make=Runner)
