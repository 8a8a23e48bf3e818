"""Commands answer the same to the last byte: whatever the hash seed, the number of processes and the order."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parent.parent
CASE = {"gpus": 4, "cluster": "h200-4", "tokens": 16384, "heads": 16, "kv_heads": 4}
DRAWN = {"mask": "causal_document", "documents": {"distribution": "prolong64k", "seed": 3}}
STRATEGIES = (
    "ring",
    "zigzag_ring",
    "striped_ring",
    "ulysses",
    "allgather",
    "usp",
    "mesh",
    "hybrid_cp",
    "magi",
    "distca",
    "wlb",
)
LINES = [
    *(CASE | {"strategy": name} for name in STRATEGIES),
    *(CASE | DRAWN | {"strategy": name, "pass": "fwd"} for name in STRATEGIES),
    CASE | {"strategy": "usp", "gpus": 16, "cluster": "dgx-h100"},
    CASE | {"strategy": "nothing"},
    CASE | {"gpus": 3},
    CASE | {"strategy": "zigzag_ring", "profile": "missing.json"},
]
GRID = {"base": {key: CASE[key] for key in ("cluster", "heads", "kv_heads")}}
GRID["grid"] = {"strategy": ["usp", "magi"], "gpus": [2, 3, 4], "tokens_per_gpu": [1024, 2048]}
RUNS = ROOT / "data" / "runs" / "h200x4-1122b" / "h200-emulated-again-b.jsonl"
NOT_COMPARED = re.compile(r"cpsim: compiling its engines.*\n|(?<=predicted in )[0-9.]+ s")
"""How long things took."""

ASKED = """
import contextlib, io, sys
from cpsim.cli.app import main
for line in sys.stdin.read().split("\\n"):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["cpsim", *line.split("\\t")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            status = end.code
    print(sys.argv[1:], status, out.getvalue(), err.getvalue())
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "case.json").write_text(json.dumps(CASE | DRAWN))
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (folder / "reversed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in reversed(LINES)))
    (folder / "grid.json").write_text(json.dumps(GRID))
    return folder


def commands(inputs, out, jobs):
    """Quick ones of every kind."""
    lines, case = inputs / "lines.jsonl", inputs / "case.json"
    return [
        *(
            [name, *shown]
            for name in ("clusters", "profiles", "kernels", "strategies", "mask")
            for shown in ([], ["--json"])
        ),
        [
            "mask",
            "shared_question_document",
            "--tokens",
            "4096",
            "--png",
            out / "mask.png",
            "--html",
            out / "mask.html",
        ],
        ["mask", "block_sparse", "--tokens", "4096", "--json"],
        ["predict", lines, "--jobs", jobs],
        ["predict", lines, "--jobs", jobs, "--json", "--out", out / "lines.jsonl"],
        ["predict", inputs / "reversed.jsonl", "--jobs", jobs, "--out", out / "reversed.jsonl"],
        ["sweep", lines, "--jobs", jobs, "--out", out / "swept.jsonl"],
        ["sweep", inputs / "grid.json", "--jobs", jobs, "--out", out / "grid"],
        ["trace", case, "--strategy", "magi", "--out", out / "trace.json.gz"],
        ["advise", case],
        ["advise", case, "--json"],
        ["validate", RUNS, "--json", "--html", out / "runs.html"],
        ["fit", "missing.jsonl", "--out", out / "profile.json"],
    ]


def answers(inputs, out, seed, jobs):
    """What all commands say, and what they write."""
    out.mkdir()
    given = "\n".join("\t".join(map(str, words)) for words in commands(inputs, out, jobs))
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, "-c", ASKED],
        input=given,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=ROOT,
    )
    said = NOT_COMPARED.sub("", done.stdout.replace(str(out), "OUT").replace(f"'{jobs}'", "JOBS"))
    files = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    rows = sorted(map(str, pq.read_table(out / "grid").to_pylist()))
    return said, files, rows


def test_every_command_answers_the_same_whatever_the_hash_seed_and_the_number_of_processes(inputs, tmp_path):
    first, second = (answers(inputs, tmp_path / str(jobs), seed, jobs) for seed, jobs in ((1, 1), (4242, 2)))
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert first[2] == second[2]
    assert len(first[2]) == 12
    assert len(first[1]) == 7
    assert "Traceback" not in first[0]
    assert "internal error" not in first[0]
    lines = first[1]["lines.jsonl"].splitlines()
    assert first[1]["swept.jsonl"].splitlines() == lines
    answered = [(json.loads(line)["scenario"], line) for line in lines[: len(LINES) - 3]]
    backwards = [(json.loads(line)["scenario"], line) for line in first[1]["reversed.jsonl"].splitlines()[3:]]
    assert backwards[::-1] == answered
