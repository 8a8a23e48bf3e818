"""How accurate cpsim means to be: targets of the product, which do not follow results.

A test calls ``check``: a target that is met passes, one that is missed without being listed as missed fails, and one
that is listed as missed is reported as an expected failure with its cause.
"""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Target:
    most: float
    """Largest error, as a share of the measured value."""
    missed: str = ""
    """Why it is missed today; empty where it is met."""


EVENTS = "kernels' times no longer contain what CUDA events cost, and errors that had cancelled no longer do"
FAST_HOST = "22 short passes of ring-flash-attn's zigzag wait for launches, on a host that is faster than the mean"
MOVED_WINDOWS = "windows and values of another size are moved from Hopper's code, of which Blackwell's is another"
DIGITISED = "single figures that were read off a picture; B200's differ by up to a factor of 2 from their neighbours"
SHARES = "between two GPUs NVLink, as measured, reaches less of its port than cards on PCIe do of theirs, as published"
AROUND = "hosts are as slow as means of their launches say, and 32 of 171 ms launch what is around the layers"
ALLOCATES = "of `empty`, an allocation: later ones often take twice as long, first ones do not"
HELD = "not understood"
FEW = "profile a100 rests on few published calls and on ratios of data sheets"
FEW_WAVES = "calls of 0.07 to 0.15 ms, whose blocks fill few waves, are priced 3 to 6 % too fast"
RINGS = "on 8 GPUs, ring_p2p is published at 66 to 80 % of the predicted rate: not understood"
REFIT = (
    "38.2 GB/s since kernels of H100 are priced from its description; the preset keeps 39.0, which lies between that "
    "and 39.7, measured on another cluster"
)
SPLIT = "they follow the split kernel of flash-attn 2, of which single short calls are off by as much"
CACHE = "what merges of short documents find in the L2 cache is not modelled"
MOVED = (
    "memory-bound ops, messages and power of a B200 follow its description since: rows moved by up to 3.8 %, most "
    "towards what was published"
)
GB300 = (
    "GB200 and H100 are 3 % off; GB300, which data sheets give GB200's peak in FP8, takes a fifth less time than that, "
    "at 1,400 instead of 1,200 W"
)
NANO = (
    "four of DistCA's 22 interim runs, whose plans all have large nano-batches, take 1.3 to 1.5 times as long as is "
    "predicted: no cause is proven (studies/distca/pipelines.md); the others are 4 % off"
)
BETWEEN = "an H100 measured here steps 1.86 times as fast along k in FP8, published tables 1.94: 1.9 stands between"
SLOWED = (
    "H20 has a quarter of H100's tensor rate, all else alike: at head dimension 64, of two sequences of 2,048 tokens, "
    "more of the softmax hides behind its tensor cores than on H100, by a share that nothing there tells"
)
LONG_FP8 = (
    "after 10,000 warm-ups GB200 holds 2.9 PFLOP/s in FP8, a fifth less than the best that others publish of it "
    "(stas00/ml-engineering); H100's and H200's two tables are 2 and 6 % apart, and by these it is predicted"
)
SHORT_BATCH = (
    "one of 24 batches, of 10,000 tokens on 8 GPUs, is planned 10 % off the best: moves of single documents end there"
)
TARGETS = {
    "plans of few documents, mean": Target(0.01, SHORT_BATCH),
    "plans of few documents, worst": Target(0.06, SHORT_BATCH),
    "runs, ours, 1 ms or more, mean": Target(0.02),
    "runs, ours, shorter, mean": Target(0.05),
    "runs, ours, by strategy, signed": Target(0.021, CACHE),
    "P(best), chosen way, stated less was": Target(0.05),
    "P(best), Brier score over that of a guess": Target(0.35),
    "ranks, mean": Target(0.015),
    "ranks, shorter than 1 ms, mean": Target(0.02),
    "ranks, later, mean": Target(0.02),
    "ranks, unseen, mean": Target(0.011),
    "ranks, unseen, worst": Target(0.065),
    "ranks, unseen again, mean": Target(0.013, EVENTS),
    "ranks, unseen again, signed": Target(0.005, EVENTS),
    "ranks, unseen again, worst": Target(0.09),
    "ranks, others' code, mean": Target(0.03, FAST_HOST),
    "holds fwd, mean": Target(0.02, HELD),
    "holds fwd, worst": Target(0.10, HELD),
    "holds bwd, mean": Target(0.02, HELD),
    "holds bwd, worst": Target(0.10, HELD),
    "many documents, fa2 fwd, mean": Target(0.022),
    "many documents, fa2 fwd, 95 of 100": Target(0.072),
    "many documents, fa2 bwd, mean": Target(0.01),
    "many documents, fa2 bwd, 95 of 100": Target(0.03),
    "many documents, sdpa_flash fwd, mean": Target(0.023),
    "many documents, sdpa_flash fwd, 95 of 100": Target(0.065),
    "many documents, sdpa_flash bwd, mean": Target(0.01),
    "many documents, sdpa_flash bwd, 95 of 100": Target(0.03, FEW_WAVES),
    "h200-documents-2, fa2 fwd, mean": Target(0.024),
    "h200-documents-2, fa2 bwd, mean": Target(0.01),
    "h200-documents-2, sdpa_flash fwd, mean": Target(0.024),
    "h200-documents-2, sdpa_flash bwd, mean": Target(0.01),
    "h200-unseen, fa2 fwd, mean": Target(0.024),
    "h200-unseen, fa2 bwd, mean": Target(0.011),
    "h200-unseen, cudnn fwd, mean": Target(0.03),
    "h200-unseen, cudnn bwd, mean": Target(0.016),
    "h200-unseen, sdpa_flash fwd, mean": Target(0.024),
    "h200-unseen, sdpa_flash bwd, mean": Target(0.011),
    "h200-unseen-256, cudnn fwd, mean": Target(0.014),
    "h200-unseen-256, cudnn bwd, mean": Target(0.015),
    "h200-unseen-256, sdpa_flash fwd, mean": Target(0.022),
    "h200-unseen-256, sdpa_flash bwd, mean": Target(0.01),
    "published calls held out, mean": Target(0.1, DIGITISED),
    "published calls of flash-attn 2 on H100, mean": Target(0.04),
    "later papers, signs that are wrong": Target(0.1),
    "later strategies, runs, mean": Target(0.03),
    "later strategies, single ranks, mean": Target(0.03),
    "MagiAttention's benchmark, 32 and 64 GPUs, mean": Target(0.055),
    "MagiAttention's benchmark, mean": Target(0.07),
    "MagiAttention's benchmark, worst strategy and mask, mean": Target(0.21, RINGS),
    "magi-h100, NIC, fit over preset": Target(0.02, REFIT),
    "steps whose hosts catch up, over what layers take": Target(0.10, AROUND),
    "first calls, how much less than later ones they take": Target(0.0, ALLOCATES),
    "collectives over PCIe, share of time that their link would add": Target(0.10, SHARES),
    "left-out a100, bwd fa2": Target(0.08),
    "left-out a100, fwd fa2": Target(0.08),
    "left-out a100, matrix products bf16": Target(0.08),
    "left-out a100-pcie, bwd fa2": Target(0.08),
    "left-out a100-pcie, fwd fa2": Target(0.08),
    "left-out a100-pcie, matrix products bf16": Target(0.08),
    "left-out h20, fwd cudnn": Target(0.08, SLOWED),
    "left-out h20, fwd fa2": Target(0.08),
    "left-out h20, fwd fa3": Target(0.08),
    "left-out b200, bwd cudnn": Target(0.08),
    "left-out b200, fwd cudnn": Target(0.08),
    "left-out b200, bwd fa2": Target(0.08),
    "left-out b200, fwd fa2": Target(0.08),
    "left-out b200, bwd fa4": Target(0.08),
    "left-out b200, fwd fa4": Target(0.08),
    "left-out b200, bwd sdpa_flash": Target(0.08),
    "left-out b200, fwd sdpa_flash": Target(0.08),
    "left-out b200, matrix products bf16": Target(0.08),
    "left-out gb200, bwd cudnn": Target(0.08),
    "left-out gb200, fwd cudnn": Target(0.08),
    "left-out gb200, bwd fa4": Target(0.08),
    "left-out gb200, fwd fa4": Target(0.08),
    "left-out gb200, bwd sdpa_flash": Target(0.08),
    "left-out gb200, fwd sdpa_flash": Target(0.08),
    "left-out gb200, matrix products fp8": Target(0.08, LONG_FP8),
    "left-out gb200, fwd cudnn, windows": Target(0.08, MOVED_WINDOWS),
    "left-out gb200, bwd cudnn, windows": Target(0.08),
    "left-out gb200, fwd fa4, windows": Target(0.08, MOVED_WINDOWS),
    "left-out gb200, bwd fa4, windows": Target(0.08, MOVED_WINDOWS),
    "left-out gb200, fwd cudnn, values of another size": Target(0.08, MOVED_WINDOWS),
    "left-out gb200, bwd cudnn, values of another size": Target(0.08, MOVED_WINDOWS),
    "left-out gb200, fwd fa4, values of another size": Target(0.08, MOVED_WINDOWS),
    "left-out gb200, bwd fa4, values of another size": Target(0.08, MOVED_WINDOWS),
    "left-out b200, fwd flash_mask": Target(0.08, DIGITISED),
    "left-out b200, bwd flash_mask": Target(0.08, DIGITISED),
    "left-out gb300, bwd cudnn, windows": Target(0.08),
    "left-out gb300, bwd cudnn": Target(0.08),
    "left-out gb300, fwd cudnn": Target(0.08),
    "left-out gb300, bwd sdpa_flash": Target(0.08),
    "left-out gb300, fwd sdpa_flash": Target(0.08),
    "left-out gb300, matrix products bf16": Target(0.08),
    "Transformer Engine's products in FP8 over bf16": Target(0.01, BETWEEN),
    "A100, flash-attn 2's table, mean": Target(0.035, FEW),
    "A100, flash-attn 2's table, worst": Target(0.11, FEW),
    "torchtitan's steps, time, mean": Target(0.08),
    "torchtitan's steps, memory, mean": Target(0.08),
    "Automodel's steps, time, mean": Target(0.08),
    "Megatron-Bridge's steps, time, mean": Target(0.10, GB300),
    "Megatron's golden peaks, mean": Target(0.05),
    "Megatron's golden peaks of experts, mean": Target(0.05),
    "Megatron-Bridge's experts, time, mean": Target(0.1),
    "our FSDP2 steps, reserved memory, mean": Target(0.08),
    "MLPerf's steps, time, mean": Target(0.10),
    "MLPerf's steps, memory, mean": Target(0.06),
    "SimuMax's steps, time, mean": Target(0.07),
    "SimuMax's steps, memory, mean": Target(0.06),
    "ring-flash-attn's table, mean": Target(0.06),
    "USP's grids, mean": Target(0.10),
    "DistCA's known plan, iteration of short documents": Target(0.02),
    "WLB's pipelined runs, mean": Target(0.08),
    "pipelined runs of known plans, mean": Target(0.08),
    "runs with pipelines of DistCA's study, mean": Target(0.06),
    "runs with pipelines of DistCA's study, signed": Target(0.02, NANO),
    "DistCA's pipelined runs, mean": Target(0.08, NANO),
    "DistCA's pipelined run on 128 GPUs": Target(0.08),
    "published steps in bf16, mean": Target(0.07),
    "published steps in FP8, mean": Target(0.10),
    "other published steps, mean": Target(0.15),
    "published memory, mean": Target(0.06),
    "published times, signed": Target(0.04),
    "MagiAttention's benchmark on B200, documents, mean": Target(
        0.06, "B200's clock, which follows its power limit since, hardly rises where ranks wait: 7 % too slow"
    ),
    "B200 rows, today less said before, over the last digit said": Target(0.51, MOVED),
    "continued rings of others and under windows, single draws": Target(
        0.001, "of 400 draws of errors single ones do not grow along a line: hosts or windows then decide some rounds"
    ),
    "growth of simulations with ops, exponent less 1": Target(
        0.05, "the least of 20 calls finds small schedules in the cache, and those of 100,000 ops and more not"
    ),
    "DCP's published speed-ups outside of their ranges": Target(0.15),
    "DCP's ranges fwd, mean": Target(0.025, EVENTS),
    "DCP's ranges fwd, worst": Target(0.1, SPLIT),
    "DCP's ranges bwd, mean": Target(0.05),
    "DCP's ranges bwd, worst": Target(0.25),
    "clusters left out, all-reduce, mean": Target(0.10),
    "clusters left out, all-gather, mean": Target(0.10),
    "clusters left out, reduce-scatter, mean": Target(0.10),
    "clusters left out, more logs, mean": Target(0.10),
    "clusters left out, undisputed, all-reduce, mean": Target(0.10),
    "clusters left out, undisputed, all-gather, mean": Target(0.10),
}


def check(name, value):
    """Whether a measured error meets its target."""
    target = TARGETS[name]
    if abs(value) <= target.most:
        return
    said = f"{name}: {value:.2%}, target {target.most:.2%}"
    if target.missed:
        pytest.xfail(f"{said}: {target.missed}")
    raise AssertionError(said)
