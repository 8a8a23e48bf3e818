"""Published logs of nccl-tests against the law of collectives, clusters left out one at a time."""
