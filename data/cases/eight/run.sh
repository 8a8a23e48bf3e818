#!/bin/sh
# One run on eight GPUs of one host, ten minutes at most: the network at 2, 4 and 8 ranks, the cases, emulated nodes.
#   sh data/cases/eight/run.sh OUT [FOLDER OF CASES] [--cpu]
# Every part writes its own file in OUT as it goes; what is late is left out. A prediction compiles what planning needs first.
set -u
out=$1 cases=${2:-$(dirname "$0")} cpu=${3:-}
begun=$(date +%s)
mkdir -p "$out"
until_minute() { echo $((begun + $1 * 60)); }
launch() { torchrun --nproc-per-node "${RANKS:-8}" --max-restarts 2 -m "$@"; }

python -m cpsim predict "$cases/cases.jsonl" --out "$out/predictions.jsonl" >"$out/predict.log" 2>&1
[ -n "$cpu" ] || for ranks in 2 4 8; do
    RANKS=$ranks launch cpsim.real.measure.network --minutes 0.4 --parts network --out "$out/network-$ranks.jsonl"
done
launch cpsim.real.run "$cases/cases.jsonl" $cpu --seconds 0.1 --limit 60 --resume --until "$(until_minute 7)" --out "$out/runs.jsonl"
for nodes in 2 4; do
    launch cpsim.real.run "$cases/nodes-$nodes.jsonl" $cpu --emulate-nodes $nodes --seconds 0.1 --limit 60 --resume \
        --until "$(until_minute $((7 + nodes / 2)))" --out "$out/nodes-$nodes.jsonl"
done
