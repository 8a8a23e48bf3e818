"""Broken files of every kind: each is one line on stderr or a sane answer; no traceback, no hang, nothing absurd.

Every time the same few examples, and 2,000 scenarios and 2,000 other files where slow tests run, too. Hours on demand
with new examples: `CPSIM_FUZZ_HOURS=2 pytest tests/fuzz -k "broken or large"`; a failure names the file, its mistakes
and the command.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from random import Random
from typing import NamedTuple

import pytest
from calls import Answer, Hang, call
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from kinds import KINDS, OPTIONS, RING, SIZES, Kind
from mutations import YAML_NUMBERS, as_lines, damaged, enlarged, mutated, reworded
from sense import wrong

HOURS = float(os.environ.get("CPSIM_FUZZ_HOURS", "0"))
PROPERTIES = 2 * (len(KINDS) + 3)
"""Among which hours are divided: kinds, options, batches and sizes, each with few and with many examples."""
FEW = {"scenario": 50, "measurement": 4, "fabric": 10, "grid": 10, "runs": 10}
"""Examples of a kind that is slow, or of which there is much to try."""
MANY = {"scenario": 2000, "measurement": 100, "fabric": 150, "grid": 150}
BATCHED = [tree for tree in KINDS["scenario"].seeds if tree.get("strategy") and "model" not in tree]
NUMBERS = count()
"""Files have names of their own, since clusters and profiles are read once."""


def run_examples(example: Callable[[Random], None], examples: int) -> None:
    """Runs a property on so many draws that are always the same, or on new ones for a share of the hours asked."""
    how = {"deadline": None, "database": None, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}
    draws = st.randoms(use_true_random=True, note_method_calls=False)
    if not HOURS:
        settings(max_examples=examples, derandomize=True, **how)(given(draws)(example))()
        return
    end = time.monotonic() + 3600 * HOURS / PROPERTIES
    while time.monotonic() < end:
        seed(random.getrandbits(64))(settings(max_examples=200, **how)(given(draws)(example)))()


class Broken(NamedTuple):
    """A broken file."""

    suffix: str
    content: bytes
    case: int
    """Number of the scenario that names it."""
    command: int
    why: str
    """Why it must be refused; empty where it may be accepted."""
    mistakes: list[str]


def broken(rng: Random, kind: Kind) -> Broken:
    """A broken file of a kind."""
    suffix, tree = rng.choice(list(kind.suffixes)), rng.choice(kind.seeds)
    write = kind.suffixes[suffix]
    case, command = rng.randrange(max(1, len(kind.cases))), rng.randrange(len(kind.commands))
    if not isinstance(tree, str) and rng.random() < 0.7:
        tree, mistakes = mutated(rng, tree)
        return Broken(suffix, write(tree), case, command, kind.odd(tree), mistakes)
    if rng.random() < 0.03:
        other = KINDS[rng.choice(list(KINDS))]
        return Broken(suffix, next(iter(other.suffixes.values()))(other.seeds[0]), case, command, "", ["another kind"])
    content, mistakes = write(tree), []
    for _ in range(rng.choice([1, 1, 2])):
        content, mistake = damaged(rng, content)
        mistakes.append(mistake)
    why = kind.odd(content.decode("utf-8", "replace")) if isinstance(tree, str) else ""
    return Broken(suffix, content, case, command, why, mistakes)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A folder with files that no reader may wait for, in which everything is compiled."""
    path = tmp_path_factory.mktemp("fuzz")
    os.mkfifo(path / "pipe")
    (path / "binary").write_bytes(bytes(range(256)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for kind in (kind for kind in KINDS.values() if kind.many):
            for _, commands in seeds(kind):
                for command in commands:
                    call(command, limited=False)
        yield path


def seeds(kind: Kind) -> Iterator[tuple[object, Iterator[list[str]]]]:
    """Some twenty valid files of a kind, and the commands that read each; every one writes the scenario it asks for."""
    suffix = next(iter(kind.suffixes))
    for tree in kind.seeds[:: 1 + len(kind.seeds) // 20]:
        file = f"{next(NUMBERS)}{suffix}"
        with open(file, "wb") as stream:
            stream.write(kind.suffixes[suffix](tree))
        yield tree, (asked(kind, file, case, 0) for case in range(max(1, len(kind.cases))))


def asked(kind: Kind, name: str, case: int, command: int) -> list[str]:
    """The command for a file; writes the scenario that names it."""
    words = {"FILE": name, "CASE": f"case-{name}.json"}
    if kind.cases:
        fields = {key: name if value == "FILE" else value for key, value in kind.cases[case].items()}
        with open(words["CASE"], "w") as file:
            json.dump(fields, file)
    return [words.get(word, word.replace("OUT", f"out-{name}")) for word in kind.commands[command]]


def several(content: bytes) -> bool:
    """Whether a file begins like a list, so that it may hold several questions."""
    return content.lstrip()[:1] in (b"[", b"-")


def check(kind: Kind, example: Broken) -> None:
    """Asks for a broken file.

    Raises:
        AssertionError: the answer is no line for the user and not sane, or nonsense was accepted.
    """
    name = f"{next(NUMBERS)}{example.suffix}"
    with open(name, "wb") as file:
        file.write(example.content)
    command = asked(kind, name, example.case, example.command)
    many = kind.many or several(example.content)
    answer = checked(command, example.mistakes, many=many, most_tflops=kind.most_tflops)
    assert not (example.why and answer.status == 0), f"accepted: {example.why}, {example.mistakes}"


def checked(command: list[str], mistakes: list[str], *, many: bool = False, most_tflops: float = 2300) -> Answer:
    """The answer to a command; errors name it and the mistakes that were made in its files."""
    try:
        answer = call(command)
        found = wrong(answer, many=many, most_tflops=most_tflops)
        assert not found, found
    except (Exception, Hang) as error:
        error.add_note(f"cpsim {' '.join(command)} in {os.getcwd()}: {'; '.join(mistakes)}")
        raise
    return answer


@pytest.mark.parametrize("name", KINDS)
def test_seeds_are_valid_files(name):
    """Nine in ten are answered; a few committed cases ask for what their kernel cannot run."""
    kind, answers = KINDS[name], []
    for tree, commands in seeds(kind):
        assert not kind.odd(tree)
        found = [call(command) for command in commands]
        assert not any(wrong(answer, many=kind.many, most_tflops=kind.most_tflops) for answer in found)
        answers.append(min(answer.status for answer in found))
    print(answers)
    assert answers.count(0) >= 0.9 * len(answers), answers


@pytest.mark.parametrize("name", KINDS)
def test_a_few_broken_files(name):
    kind = KINDS[name]
    run_examples(lambda rng: check(kind, broken(rng, kind)), FEW.get(name, 25))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_2000_broken_scenarios_and_2000_broken_files_of_other_kinds(name):
    kind = KINDS[name]
    run_examples(lambda rng: check(kind, broken(rng, kind)), MANY.get(name, 300))


def check_options(rng: Random) -> None:
    words, mistake = reworded(rng, rng.choice(OPTIONS))
    with open("ring.json", "w") as file:
        json.dump(RING, file)
    checked(words, [mistake])


@pytest.mark.parametrize("examples", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_broken_options(examples):
    run_examples(check_options, examples)


def check_batch(rng: Random) -> None:
    """Damages one line of three; the others must be answered as if they stood alone."""
    good = [as_lines(tree).strip() for tree in rng.sample(BATCHED, 3)]
    at = rng.randrange(3)
    bad, mistake = damaged(rng, good[at])
    lines = [*good[:at], bad.replace(b"\n", b" "), *good[at + 1 :]]
    name = f"{next(NUMBERS)}.jsonl"
    with open(name, "wb") as file:
        file.write(b"\n".join(lines))
    answers = checked(["predict", name, "--json", "--jobs", "1"], [mistake], many=True).out.splitlines()
    if not lines[at].strip():
        answers.insert(at, "")
    assert len(answers) == 3, mistake
    for line, answer in zip([*good[:at], None, *good[at + 1 :]], answers, strict=True):
        assert line is None or answer == alone(line), mistake


@cache
def alone(line: bytes) -> str:
    """The answer to one scenario."""
    with open("alone.jsonl", "wb") as file:
        file.write(line)
    return call(["predict", "alone.jsonl", "--json"]).out.strip()


@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_a_broken_line_never_loses_the_others(examples):
    run_examples(check_batch, examples)


@pytest.mark.parametrize(("text", "values"), YAML_NUMBERS.items())
def test_numbers_of_yaml_are_read_as_yaml_1_2_does_or_refused(text, values):
    with open(name := f"{next(NUMBERS)}.yaml", "w") as file:
        file.write(f"gpus: 4\ncluster: h200-4\ntokens: {text}\nheads: 8\nkv_heads: 2\nstrategy: ring\n")
    answer = checked(["predict", name, "--json"], [text])
    assert answer.status == 2 or json.loads(answer.out)["scenario"]["tokens"] in values


@pytest.mark.parametrize("size", SIZES)
def test_absurd_sizes_are_answered_or_refused_at_once(size):
    with open(name := f"{next(NUMBERS)}.json", "w") as file:
        json.dump(RING | SIZES[size], file)
    for command in (["predict"], ["advise"], ["advise", "--step"]):
        begun = time.process_time()
        checked([*command, name, "--json"], [size])
        assert time.process_time() - begun < 3, command


def check_large(rng: Random) -> None:
    tree, mistakes = enlarged(rng, rng.choice(KINDS["scenario"].seeds))
    with open(name := f"{next(NUMBERS)}.json", "w") as file:
        json.dump(tree, file)
    checked([rng.choice(["predict", "predict", "advise"]), name, "--json"], mistakes)


@pytest.mark.parametrize("examples", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_large_cases_are_answered_or_refused_within_limits(examples):
    run_examples(check_large, examples)
