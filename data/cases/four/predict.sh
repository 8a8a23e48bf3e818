#!/bin/sh
# Predictions of the run on four GPUs, made and committed before it; between nodes with the sockets of other machines.
cd "$(dirname "$0")" || exit 1
for cases in cases layers others nodes-2 steps; do
    python -m cpsim predict "$cases.jsonl" --out "predicted-$cases.jsonl"
done
