"""Predictions before and after a change of the code, compared to the last bit.

    python tests/equality.py write before.json.gz      # on the old code
    python tests/equality.py compare before.json.gz    # on the new code; exits with 1 where anything differs

Scenarios are drawn with a fixed seed over strategies, knobs, masks, documents, kernels, implementations, clusters and
training steps. The file holds them, so ``compare`` asks what was asked then. Only the public functions of ``cpsim``
are called: the script runs beside any version of the package that ``PYTHONPATH`` names.
"""

import argparse
import gzip
import json
import random
import sys
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import cpsim

with suppress(ImportError):  # of older versions, which have it all in the package
    import studies.code  # noqa: F401

SEED = 41
COUNT = 2000
FIELDS = ("time_s", "bytes_sent_per_gpu", "peak_memory_bytes", "exposed_comm_s")

DENSE = ("full", "causal")
DOCUMENTS = ("full_document", "causal_document")
OTHER_MASKS = (
    {"name": "full_sliding_window", "window": 300},
    {"name": "causal_sliding_window", "window": 700},
    {"name": "shared_question", "answers": 3},
    "shared_question_document",
    "causal_blockwise",
    "causal_blockwise_document",
    {"name": "prefix_lm_causal", "prefix": 900},
    {"name": "prefix_lm_document", "seed": 3},
    "block_causal_document",
    {"name": "lambda", "window": 500},
    {"name": "global_sliding", "window": 200},
    {"name": "block_sparse", "block": 512, "density": 0.3},
    {"name": "variable_block_sparse", "density": 0.4},
)
DRAWS = ("pile", "prolong64k", "prolong512k", "magi", "distca_pretrain", "distca_prolong")
ZIGZAG = ({}, {"zigzag": "sequence"}, {"zigzag": "document"})
# Planning time is read from a clock. So many planners hide all of it, and times are the same in every run.
DCP = {"solver": "greedy", "planners": 10**6}
KNOBS = {
    "none": ({},),
    "ulysses": ({}, {"head_groups": 2}),
    "ring": ({},),
    "zigzag_ring": ZIGZAG,
    "striped_ring": ({},),
    "allgather": (
        {},
        {"layout": "contiguous"},
        {"layout": "zigzag", "heads_per_gather": 1},
        {"layout": "document_zigzag", "heads_per_gather": 2},
    ),
    "usp": (
        {},
        {"ulysses": 2},
        {"ulysses": 4, "zigzag": "sequence"},
        {"ulysses": 2, "ring": "basic"},
        {"ulysses": 2, "placement": "context_first"},
    ),
    "loongtrain": (
        {},
        {"ulysses": 2, "inner_ring": 2},
        {"ulysses": 1, "inner_ring": 4},
        {"ulysses": 2, "placement": "context_first", "zigzag": "sequence"},
    ),
    "mesh": ({}, {"keys": 1}, {"keys": 2, "heads_per_gather": 1, "zigzag": "sequence"}),
    "hybrid_cp": ({}, {"tokens_per_rank": 2048}),
    "magi": ({}, {"chunk": 256}, {"stages": 3, "native": True}),
    "dcp": (
        DCP,
        {**DCP, "variant": "paper", "block": 1024},
        {**DCP, "variant": "released", "head_groups": 1, "stages": 2},
    ),
    "distca": ({}, {"variant": "released", "tolerance": 0.1}, {"nano_batches": 1}, {"barriers": True}, {"servers": 1}),
    "wlb": ({}, {"cp": 1}, {"cp": 2}),
    "per_sequence": ({}, {"cp": 1}),
}
CODES = {
    "ring-flash-attn": (("ring", "zigzag_ring", "striped_ring", "allgather"), ("fa2",)),
    "yunchang": (("ulysses", "usp"), ("fa2",)),
    "torch": (("ring", "zigzag_ring", "allgather"), ("sdpa_flash", "cudnn")),
    "transformer-engine": (("ulysses", "zigzag_ring", "allgather", "usp"), ("cudnn", "fa2", "fa3")),
    "transformer-engine-thd": (("usp",), ("fa2",)),
    "longca-bench": (("ring", "zigzag_ring", "ulysses", "usp", "loongtrain", "allgather"), ("fa3",)),
    "magi-attention": (("usp", "loongtrain", "magi", "hybrid_cp"), ("fa3",)),
    "internevo": (("loongtrain",), ("fa2",)),
}
KERNELS = {
    "h200": ("fa4", "fa4", "fa2", "cudnn", "sdpa_flash", "sdpa_math", "flex", "flashinfer", "fa4_sparse"),
    "h100": ("fa4", "fa4", "fa2", "cudnn", "sdpa_flash", "flex", "flashinfer_fa2"),
    "h100-fa3": ("fa3", "fa3", "fa4", "ffa"),
    "b200": ("fa4", "cudnn"),
    "a100": ("fa2",),
}
CLUSTERS = {
    "h200-4": ("h200", (1, 2, 4)),
    "h200-2x2-sockets": ("h200", (2, 4)),
    "dgx-h200": ("h200", (1, 2, 4, 8, 16, 24, 32, 64, 96, 128)),
    "dgx-h100": ("h100", (2, 8, 16, 32, 64, 128)),
    "magi-h100": ("h100-fa3", (8, 16, 32, 64)),
    "dgx-b200": ("b200", (4, 8, 16, 64)),
    "p4de": ("a100", (2, 8, 16, 64)),
}
HEADS = ((32, 8), (32, 8), (64, 8), (16, 16), (8, 1), (40, 8))


def scenarios(count, seed=SEED):
    """Fields of ``count`` scenario files; the first ones are the same for every count."""
    draw = random.Random(seed)
    kinds = (attention, attention, attention, attention, other_mask, other_code, other_code, layer, step)
    return [draw.choice(kinds)(draw) for _ in range(count)]


def answered(count, jobs):
    """Drawn scenarios with their answers, of which a tenth are errors: of all draws nearly half are."""
    cases = scenarios(3 * count)
    left = {True: count // 10, False: count - count // 10}
    entries = []
    for case, found in zip(cases, answers(cases, jobs), strict=True):
        failed = "error" in found
        if left[failed]:
            left[failed] -= 1
            entries.append({"scenario": case, "answer": found})
    return entries


def place(draw, wanted=None):
    """Cluster, GPUs in use, and the kernels that its profile has, one of those wanted among them."""
    name = draw.choice([n for n, (p, _) in CLUSTERS.items() if wanted is None or set(wanted) & set(KERNELS[p])])
    profile, gpus = CLUSTERS[name]
    return {"cluster": name, "gpus": draw.choice(gpus)}, KERNELS[profile]


def packing(draw, gpus, tokens_per_gpu):
    """Documents of a packed sequence: drawn, given by length, or none."""
    tokens = gpus * tokens_per_gpu
    match draw.choice(("draw", "draw", "lengths", "none")):
        case "draw":
            of = {"distribution": draw.choice(DRAWS), "seed": draw.randrange(100), "max_length": tokens}
            return {"documents": of}
        case "lengths":
            chunks = tokens // 512
            cuts = sorted(draw.sample(range(1, chunks), min(chunks - 1, draw.choice((1, 3, 7)))))
            return {"documents": [512 * (b - a) for a, b in zip([0, *cuts], [*cuts, chunks], strict=True)]}
    return {}


def attention(draw):
    """A strategy of our own."""
    where, kernels = place(draw)
    return ours(draw, where, draw.choice(kernels), draw.choice((*DENSE, *DOCUMENTS)))


def other_mask(draw):
    """A strategy of our own under a mask that few kernels run; few tokens, since planning takes long."""
    gpus = draw.choice((1, 2, 4, 8))
    where = {"cluster": draw.choice(("dgx-h200", "dgx-h100")), "gpus": gpus}
    documents = draw.choice(([2048] * gpus, [640, 2048 * gpus - 640]))
    return ours(draw, where, "flex", draw.choice(OTHER_MASKS)) | {"tokens_per_gpu": 2048, "documents": documents}


def ours(draw, where, kernel, mask):
    strategy = "none" if where["gpus"] == 1 else draw.choice([name for name in KNOBS if name != "none"])
    return {"strategy": strategy, "knobs": draw.choice(KNOBS[strategy]), "kernel": kernel} | {
        **where,
        **sizes(draw, where["gpus"], mask),
        "dtype": draw.choice(("bf16",) * 8 + ("fp16", "fp32")),
        "pass": draw.choice(("fwd", "bwd", "fwd_bwd")),
        "protocol": draw.choice(("synced", "streamed")),
    }


def sizes(draw, gpus, mask):
    """Tokens, documents, heads and mask."""
    tokens_per_gpu = draw.choice((1024, 2048, 4096, 8192))
    heads, kv_heads = draw.choice(HEADS)
    documents = packing(draw, gpus, tokens_per_gpu) if mask not in DENSE else {}
    return {"tokens_per_gpu": tokens_per_gpu, "mask": mask, "heads": heads, "kv_heads": kv_heads, **documents} | {
        "head_dim": draw.choice((64, 128, 128, 128, 256))
    }


def other_code(draw):
    """A strategy as somebody else's code runs it."""
    code = draw.choice(list(CODES))
    strategies, kernels = CODES[code]
    where, known = place(draw, kernels)
    mask = draw.choice((*DENSE, "causal", *DOCUMENTS))
    strategy = draw.choice(strategies)
    knobs = {} if code in ("transformer-engine", "transformer-engine-thd") else draw.choice(KNOBS[strategy])
    return {"implementation": code, "strategy": strategy, "knobs": knobs, **where} | {
        **sizes(draw, where["gpus"], mask),
        "kernel": draw.choice([kernel for kernel in kernels if kernel in known]),
        "pass": draw.choice(("fwd", "bwd", "fwd_bwd")),
        "protocol": draw.choice(("synced", "streamed")),
    }


def layer(draw):
    """One layer of a model on all GPUs."""
    gpus = draw.choice((2, 4, 8, 16, 32))
    strategy = draw.choice(("distca", "wlb", "per_sequence", "zigzag_ring", "ulysses", "allgather"))
    tokens_per_gpu = draw.choice((2048, 4096, 8192))
    return {"part": "layer", "model": draw.choice(("llama3-8b", "llama3-70b")), "strategy": strategy} | {
        "knobs": draw.choice(KNOBS[strategy]),
        "cluster": "dgx-h200" if gpus > 4 else "h200-4",
        "gpus": gpus,
        "tokens_per_gpu": tokens_per_gpu,
        "mask": draw.choice(DOCUMENTS),
        **packing(draw, gpus, tokens_per_gpu),
        "kernel": draw.choice(("fa2", "fa4")),
        "pass": draw.choice(("fwd", "bwd", "fwd_bwd")),
        "protocol": draw.choice(("synced", "streamed")),
    }


def step(draw):
    """A whole training step."""
    tp, cp, pp, dp = (draw.choice(degrees) for degrees in ((1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2)))
    strategy = "none" if cp == 1 else draw.choice(("zigzag_ring", "allgather", "ulysses", "usp", "distca", "wlb"))
    context, sequences = draw.choice((8192, 16384, 32768)), dp * draw.choice((1, 2, 4))
    parallel = {
        "recompute": draw.choice(("none", "mlp", "full")),
        "schedule": draw.choice(("1f1b", "same_phase")),
        "gradients": draw.choice(("none", "exposed", "overlapped")),
        "optimizer": draw.choice((True, False)),
    }
    return {"model": draw.choice(("llama3-8b", "llama-34b", "llama3-70b")), "strategy": strategy} | {
        "knobs": draw.choice(KNOBS[strategy]),
        "cluster": draw.choice(("dgx-h200", "dgx-h100")),
        "gpus": tp * cp * pp * dp,
        "tokens": context * sequences,
        "context": context,
        "documents": {"distribution": draw.choice(DRAWS), "seed": draw.randrange(100), "max_length": context},
        "mask": "causal_document",
        "kernel": "fa2",
        "parallel": {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "microbatches": sequences // dp, **parallel},
    }


def answer(scenario):
    """Numbers of a prediction as exact hexadecimal floats, or the kind and the text of the error."""
    try:
        prediction = cpsim.predict(scenario)
    except Exception as error:  # any other change of the code shows, too
        return {"error": type(error).__name__, "text": str(error)}
    numbers = {name: float(getattr(prediction, name)).hex() for name in FIELDS}
    return numbers | {f"parts_s.{name}": float(seconds).hex() for name, seconds in prediction.parts_s.items()}


def answers(cases, jobs):
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(answer, cases, chunksize=8))


def store(path, entries):
    with opened(path, "w") as file:
        json.dump(entries, file)


def load(path):
    with opened(path, "r") as file:
        return json.load(file)


def opened(path, mode):
    return gzip.open(path, f"{mode}t") if path.suffix == ".gz" else path.open(mode)


def difference(before, after):
    """Relative difference of two hexadecimal floats; a number that is missing counts as 0."""
    a, b = float.fromhex(before or "0x0p0"), float.fromhex(after or "0x0p0")
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def differences(before, after):
    """What differs between two answers: (field, relative difference); errors differ by their kind."""
    if "error" in before or "error" in after:
        kinds = [entry.get("error", "an answer") for entry in (before, after)]
        return [] if kinds[0] == kinds[1] else [(f"{kinds[0]} -> {kinds[1]}", float("inf"))]
    found = ((name, difference(before.get(name), after.get(name))) for name in sorted({*before, *after}))
    return [(name, by) for name, by in found if by]


def report(entries, after):
    """Print how many answers are equal and what differs, worst first; return how many differ."""
    found = defaultdict(list)
    changed = [differences(entry["answer"], now) for entry, now in zip(entries, after, strict=True)]
    for i, several in enumerate(changed):
        for name, by in several:
            found[name, entries[i]["scenario"]["strategy"]].append((by, i))
    different = sum(map(bool, changed))
    print(f"{len(entries) - different} of {len(entries)} answers are equal to the last bit")
    for (name, strategy), several in sorted(found.items(), key=lambda item: -max(item[1])[0]):
        by, i = max(several)
        print(f"{by:9.2e}  {name}, {strategy}: {len(several)} differ, most in scenario {i}")
    if found:
        worst = max(max(several) for several in found.values())[1]
        for what in (entries[worst], {"now": after[worst]}):
            print(json.dumps(what))
    return different


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=COUNT, help="scenarios to write")
    parser.add_argument("--jobs", type=int, help="processes; default: all cores")
    asked = parser.parse_args(arguments)
    if asked.verb == "write":
        entries = answered(asked.count, asked.jobs)
        store(asked.file, entries)
        print(Counter(entry["answer"].get("error", "answers") for entry in entries))
        return 0
    entries = load(asked.file)
    return int(report(entries, answers([entry["scenario"] for entry in entries], asked.jobs)) > 0)


if __name__ == "__main__":
    sys.exit(main())
