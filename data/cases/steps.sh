#!/bin/sh
# Whole steps on all GPUs of a host, ten minutes at most: hosts, ring-flash-attn's table where the folder has it, steps.
#   sh data/cases/steps.sh OUT GPUS FOLDER OF CASES [--cpu]
# Every part writes its own file in OUT as it goes; what is late is left out. Predictions are committed (predict.sh).
set -u
out=$1 gpus=$2 cases=$3 cpu=${4:-}
begun=$(date +%s)
mkdir -p "$out"
run() {
    [ ! -f "$cases/$1.jsonl" ] || torchrun --nproc-per-node "$gpus" --max-restarts 2 -m cpsim.real.run "$cases/$1.jsonl" $cpu \
        --seconds 0.2 --limit 90 --resume --until $((begun + $2)) --out "$out/$1.jsonl" >"$out/$1.log" 2>&1
}

[ -n "$cpu" ] || torchrun --nproc-per-node "$gpus" -m cpsim.real.measure.pace --out "$out/host.json" >"$out/host.log" 2>&1
run ring-flash-attn 70
run steps 570
