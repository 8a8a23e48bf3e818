#!/bin/sh
# Predictions of the run on eight GPUs, from profiles measured on four: made and committed before it.
cd "$(dirname "$0")" || exit 1
for cases in cases nodes-2 nodes-4 ring-flash-attn steps; do
    python -m cpsim predict "$cases.jsonl" --out "predicted-$cases.jsonl"
done
