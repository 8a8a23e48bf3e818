"""Published runs: readers, what scenarios say of rows, how well they are predicted, and the command."""

import csv
import json
from dataclasses import replace
from statistics import mean

import pytest
from targets import check
from test_cli import cpsim, one_line

from cpsim.cli import checkout
from cpsim.errors import CpsimError
from studies import published_lines
from studies.public.allocator import GROW, Allocator, last_reads, reserved_bytes
from studies.public.findings import finding_lines, finding_of
from studies.public.ledger import LEDGER, bars, changed, committed, ledger, scores, site_floors, table
from studies.public.own import steps
from studies.public.predict import predicted
from studies.public.readers import READERS, rows, rows_of
from studies.public.row import TABLES

NAMES = {
    ("torchtitan", "time"): "torchtitan's steps, time, mean",
    ("torchtitan", "memory"): "torchtitan's steps, memory, mean",
    ("automodel", "time"): "Automodel's steps, time, mean",
    ("megatron-bridge", "time"): "Megatron-Bridge's steps, time, mean",
    ("megatron-bridge, experts", "time"): "Megatron-Bridge's experts, time, mean",
    ("megatron-golden", "memory"): "Megatron's golden peaks, mean",
    ("megatron-golden, experts", "memory"): "Megatron's golden peaks of experts, mean",
    ("mlperf", "time"): "MLPerf's steps, time, mean",
    ("mlperf", "memory"): "MLPerf's steps, memory, mean",
    ("simumax", "time"): "SimuMax's steps, time, mean",
    ("simumax", "memory"): "SimuMax's steps, memory, mean",
    ("ring-flash-attn", "time"): "ring-flash-attn's table, mean",
    ("yunchang", "time"): "USP's grids, mean",
}
BARS = {
    "steps, bf16, dense": "published steps in bf16, mean",
    "steps, fp8, dense": "published steps in FP8, mean",
    "steps, experts or fp4": "other published steps, mean",
    "memory": "published memory, mean",
}
MIB = 2**20


@pytest.fixture(scope="module")
def found():
    return ledger()


@pytest.fixture(scope="module")
def every():
    return list(rows())


def test_every_line_is_a_scenario_or_says_why_not(every):
    assert len(every) == sum(len(published_lines(TABLES / reader.file)) for reader in READERS.values()) == 527
    assert all(bool(row.why) != (row.scenario is not None) for row in every)
    assert sum(row.scenario is not None for row in every) >= 250
    assert sum(row.scenario is not None and row.cp > 1 for row in every) >= 60
    assert all(row.source.startswith("github ") for row in every)


def test_what_was_said_before_is_there_for_every_row(every):
    assert {row.key for row in every if row.scenario is not None} <= committed().keys()


def test_tokens_of_a_step_are_those_of_its_published_throughput():
    """Tokens of the scenario over published seconds are the published tokens per second of a GPU."""
    lines = published_lines(TABLES / "torchtitan.csv")
    for row in rows(["torchtitan"]):
        rate = float(lines[int(row.number) - 1]["tokens_per_s_per_gpu"])
        assert row.scenario.num_tokens / row.gpus / row.time_s == pytest.approx(rate, rel=1e-3)


def test_samples_of_a_benchmark_are_its_batch():
    lines = published_lines(TABLES / "mlperf_llama.csv")
    for row in rows(["mlperf"]):
        line = lines[int(row.number) - 1]
        if row.scenario is not None and line["samples_s_median"]:
            batch = row.scenario.num_tokens / 8192
            assert batch == float(line["gbs"])
            assert batch / row.time_s == pytest.approx(float(line["samples_s_median"]), rel=0.025)
            assert row.scenario.parallel.microbatches * row.scenario.parallel.batch == float(line["gbs"]) / float(
                line["dp"]
            )


def test_a_row_added_is_a_row_predicted(tmp_path):
    """A further table of the same kind, with another size, is read and predicted like ours."""
    lines = published_lines(TABLES / "mlperf_llama.csv")
    line = next(x for x in lines if x["model"].startswith("llama2-70b") and x["gpus"] == "64" and x["cp"] == "2.0")
    more = {**line, "gpus": "128", "nodes": "16", "gbs": "16.0", "dp": "16.0", "step_s_from_throughput": "0.6"}
    path = tmp_path / "further.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, line)
        writer.writeheader()
        writer.writerow(more)
    (row,) = rows_of(path)
    assert (row.kind, row.gpus, row.cp, row.key) == ("mlperf", 128, 2, "mlperf further 1")
    answer = json.loads(cpsim("reproduce", "public", "--rows", path, "--json", "--jobs", "1"))
    (one,) = answer["rows"]
    assert one["low"] < one["predicted"] < one["high"]
    assert one["error"] == pytest.approx(one["predicted"] / 0.6 - 1)
    assert one["scenario"]["parallel"]["cp"] == 2


def test_a_table_of_no_kind_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    assert "expected the columns of one of mlperf_llama.csv" in one_line(
        cpsim("reproduce", "public", "--rows", path, status=2)
    )
    path.write_text((TABLES / "mlperf_llama.csv").read_text().replace("8192", "many", 3))
    with pytest.raises(CpsimError, match=r"row 1: cannot be read"):
        list(rows_of(path))
    assert "expected mlperf, torchtitan" in one_line(cpsim("reproduce", "public", "--kind", "mlpref", status=2))


def test_without_a_checkout_there_is_nothing_to_reproduce(tmp_path, monkeypatch):
    monkeypatch.setattr(checkout, "__file__", str(tmp_path / "site" / "cpsim" / "cli" / "checkout.py"))
    monkeypatch.chdir(tmp_path)
    assert "expected a checkout of the repository" in one_line(cpsim("reproduce", "public", status=2))


def test_rows_of_unknown_gpus_are_listed_and_not_dropped(tmp_path):
    text = (TABLES / "ring_flash_attn.csv").read_text().replace("H800", "L40S")
    path = tmp_path / "rings.csv"
    path.write_text(text)
    found = ledger(files=[path], jobs=1)
    assert len(found.compared) == 6
    assert {(one.refusal, one.why) for _, one in found.refused} == {("not measured", "attention on L40S")}
    assert len(found.refused) == 6


def test_sites_with_one_layout_tell_what_nobody_can_be_better_than(every):
    floors = site_floors(row for row in every if row.kind == "mlperf")
    assert len(floors) >= 10
    assert all(0 <= floor < 0.06 for floor in floors.values())
    row = next(row for row in every if row.key in floors)
    pair = [replace(row, time_s=1.0, number="1"), replace(row, time_s=1.1, number="2")]
    assert site_floors(pair)[pair[0].key] == pytest.approx(0.05 / 1.05)


def test_a_few_rows_of_every_kind():
    """One row of each kind is within what the interval or a bar says."""
    for kind in READERS:
        row = next(row for row in rows([kind]) if row.scenario is not None)
        one = predicted(row)
        assert not one.why
        if row.time_s is not None:
            assert one.time_s_low < one.time_s < one.time_s_high
            assert one.time_s == pytest.approx(row.time_s, rel=0.5)
        if row.peak is not None:
            peak = one.reserved_bytes if row.peak.reserved else one.memory_bytes
            assert peak == pytest.approx(row.peak.nbytes, rel=0.5)


@pytest.mark.slow
def test_the_committed_table_is_what_is_predicted(found):
    change = changed(found, LEDGER.read_text(encoding="utf-8"))
    assert (change.moved, change.new, change.gone) == (0, 0, 0), "run: cpsim reproduce public --update"
    assert table(found).count("\n") == LEDGER.read_text(encoding="utf-8").count("\n")


@pytest.mark.slow
@pytest.mark.parametrize(("group", "quantity"), NAMES)
def test_published_runs(found, group, quantity):
    some = [one for one in found.of(quantity) if one.row.group == group]
    assert len(some) >= 2
    check(NAMES[group, quantity], mean(abs(one.error) for one in some))


@pytest.mark.slow
def test_rows_that_are_far_off_are_findings(found):
    far = [one for one in found.compared if one.far]
    assert far
    assert all(finding_of(one) is not None for one in far)
    assert sum(one.far for one in found.compared) == sum(int(x.split()[0]) for x in finding_lines(found.compared))


@pytest.mark.slow
@pytest.mark.parametrize("name", BARS)
def test_bars_of_the_ledger(found, name):
    check(BARS[name], bars(found)[name].mean)


@pytest.mark.slow
def test_signed_error_of_published_times(found):
    check("published times, signed", abs(bars(found)["all times"].signed))


def test_scores_of_groups():
    found = ledger(["ring-flash-attn"], jobs=1)
    by = scores(found.compared, lambda one: one.row.gpu)
    assert by["A100"].rows == 6
    assert by["A100"].mean >= abs(by["A100"].signed)
    assert abs(by["A100"].worst) >= by["A100"].mean


def test_reserved_memory_of_our_own_steps():
    errors = [predicted / reserved - 1 for _, _, reserved, predicted in steps()]
    assert len(errors) >= 20
    check("our FSDP2 steps, reserved memory, mean", mean(map(abs, errors)))


def test_ranges_grow_only_where_no_free_part_is_large_enough():
    memory = Allocator()
    for name, size in (("a", 40), ("b", 40), ("c", 40)):
        memory.take(name, size * MIB)
    assert memory.reserved == 120 * MIB
    memory.give("a")
    memory.take("d", 30 * MIB)  # fits where a was, and leaves 10
    memory.take("e", 10 * MIB)
    assert memory.reserved == 120 * MIB
    memory.give("b")
    memory.give("e")  # 10 and 40 are neighbours
    memory.take("f", 50 * MIB)
    assert memory.reserved == 120 * MIB
    memory.take("g", MIB + 1)
    assert memory.reserved == 120 * MIB + GROW
    memory.take("h", 40 * MIB, "gather")  # another stream
    assert memory.reserved == 160 * MIB + GROW


def test_segments_that_do_not_grow_leave_what_is_too_small_unused():
    memory = Allocator(expandable=False)
    memory.take("a", 40 * MIB)
    memory.give("a")
    memory.take("b", 60 * MIB)  # no neighbour of the free 40
    memory.take("c", 3 * MIB)
    assert memory.reserved == 100 * MIB
    memory.take("d", 38 * MIB)
    assert memory.reserved == 138 * MIB
    memory.take("e", 36 * MIB)  # beside c
    assert memory.reserved == 138 * MIB
    memory.take("f", 2 * MIB)
    assert memory.reserved == 138 * MIB + GROW


def test_a_hole_too_small_for_the_next_tensor_is_reserved_beside_it():
    """bf16 and fp32 logits leave a hole in which one gradient fits, but not two."""
    from cpsim.prediction.step.program import Node

    nodes = (
        Node(None, (), {"half": 200 * MIB}),
        Node(None, ("half",), {"full": 400 * MIB}),
        Node(None, ("full",), {"kept": 400 * MIB}),
        Node(None, (), {"first": 400 * MIB}),
        Node(None, ("first", "kept"), {"second": 400 * MIB}),
    )
    assert [sorted(names) for names in last_reads(nodes)] == [[], ["half"], ["full"], [], ["first", "kept", "second"]]
    assert reserved_bytes(nodes, [], 0) == 1400 * MIB
