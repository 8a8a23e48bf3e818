#!/bin/sh
# One run on four GPUs of one host, ten minutes at most: hosts, sockets between two emulated nodes, cases, sockets again.
#   sh data/cases/four/run.sh OUT [FOLDER OF CASES] [--cpu]
# Every part writes its own file in OUT as it goes; what is late is left out. What runs between nodes is predicted from
# the sockets as measured here, before it runs; predictions of all else are committed (predict.sh).
set -u
out=$1 cases=${2:-$(dirname "$0")} cpu=${3:-}
begun=$(date +%s)
mkdir -p "$out"
until_second() { echo $((begun + $1)); }
launch() { torchrun --nproc-per-node 4 --max-restarts 2 -m "$@"; }
run() {
    name=$1 second=$2
    shift 2
    launch cpsim.real.run "$cases/$name.jsonl" $cpu --seconds 0.1 --limit 60 --resume --until "$(until_second "$second")" "$@" \
        --out "$out/$name.jsonl" >"$out/$name.log" 2>&1
}
sockets() { [ -n "$cpu" ] || launch cpsim.real.measure.network --emulate-nodes 2 --minutes "$1" --out "$out/$2.jsonl" >"$out/$2.log" 2>&1; }

[ -n "$cpu" ] || launch cpsim.real.measure.pace --out "$out/host.json" >"$out/host.log" 2>&1
run others 130
run layers 215
run cases 285
sockets 0.5 sockets-before
mkdir -p "$out/measured"
cp "$cases/nodes-2.jsonl" "$out/measured"
python -m cpsim fit-fabric "$out/sockets-before.jsonl" --sockets --cluster "$cases/h100-2x2-sockets.json" \
    --out "$out/measured/h100-2x2-sockets.json" >"$out/fabric.log" 2>&1
cases=$out/measured
python -m cpsim predict "$cases/nodes-2.jsonl" --out "$out/measured/predicted-nodes-2.jsonl" >"$out/predict.log" 2>&1
run nodes-2 395 --emulate-nodes 2
sockets 0.3 sockets-after
[ -n "$cpu" ] || launch cpsim.real.measure.pace --out "$out/host-after.json" >"$out/host-after.log" 2>&1
