"""Breaks files: values inside a tree, numbers inside a text, and the bytes of both."""

import json
import math
import re
from random import Random
from typing import Any

import yaml

Tree = Any
"""Dicts, lists, numbers, texts, booleans and None, as a file holds them."""

NUMBERS = [0, -1, 1, 2, 0.5, -0.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 2**31, 2**63, 10**30, 10**400]
TEXTS = [
    *("", " ", "x", "nan", "-1", "1e9", "8k", "39.7 GB/s", "400 Gb/s", "10 us", "12 parsecs", "null", "true"),
    *("\x1b[31mred", "a\x00b", "two\nlines", "\u202edrawkcab", "\ud800", "ü" * 200, "x" * 100_000, "{}", "[1"),
    *("/dev/zero", "/dev/stdin", "pipe", "binary", ".", "missing.json", "../../../../etc/passwd", "~", "*"),
]
OTHERS = [None, True, False, [], {}, [[]], [None], {"a": {"b": [{}]}}, [1, "x", None], [0] * 1000]


def _deep(depth: int) -> Tree:
    tree: Tree = 1
    for _ in range(depth):
        tree = [tree]
    return tree


JUNK = [*NUMBERS, *NUMBERS, *TEXTS, *OTHERS, _deep(50), _deep(400)]


def mutated(rng: Random, tree: Tree) -> tuple[Tree, list[str]]:
    """A tree with one to three mistakes, and what they are."""
    tree, said = _copy(tree), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        tree, mistake = _mistake(rng, tree)
        said.append(mistake)
    return tree, said


def _copy(tree: Tree) -> Tree:
    match tree:
        case dict():
            return {key: _copy(value) for key, value in tree.items()}
        case list():
            return [_copy(value) for value in tree]
    return tree


def _mistake(rng: Random, tree: Tree) -> tuple[Tree, str]:
    """One mistake, at a value that is reached from the root by turns, so that small sections are not rare."""
    parent, key, node, place = None, None, tree, ""
    while isinstance(node, dict | list) and node and rng.random() < (0.9 if parent is not None else 0.98):
        parent, key = node, rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node, place = parent[key], f"{place}.{key}"
    if parent is None:
        return _value(rng, node), "root"
    changes = ["rename"] if isinstance(parent, dict) else ["twice", "reverse", "empty"]
    change = rng.choice(["value"] * 6 + ["drop", "swap", *changes])
    match change:
        case "value":
            parent[key] = _value(rng, node)
            return tree, f"{place} = {parent[key]!r:.60}"
        case "drop":
            del parent[key]
        case "rename":
            parent[_misspelt(rng, str(key))] = parent.pop(key)
        case "swap":
            other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            parent[key], parent[other] = parent[other], parent[key]
        case "twice":
            parent.insert(key, _copy(node))
        case "reverse":
            parent.reverse()
        case "empty":
            parent.clear()
    return tree, f"{place}: {change}"


def _value(rng: Random, value: Tree) -> Tree:
    """What may stand in the place of a value."""
    if value is None or isinstance(value, bool) or rng.random() < 0.4:
        return rng.choice(JUNK)
    match value:
        case int() | float():
            return scaled(rng, value)
        case str():
            return _misspelt(rng, value)
        case list():
            return rng.choice([value[::-1], value * 2, [value], _turned(value), value[:1]])
    return rng.choice([[value], list(value.values()), list(value), {}, {**value, "x": 1}])


def scaled(rng: Random, value: float) -> float | str:
    """A number of another unit, sign or kind."""
    if rng.random() < 0.3:
        return rng.choice([-value, value + 1, value / 2, value * 2, str(value), value + 0.5])
    power = rng.choice([-1, 1]) * rng.randint(3, 30)
    if isinstance(value, int) and power > 0:
        return value * 10**power
    return float(value) * 10.0**power if abs(value) < 1e270 else value


def _turned(values: list[Any]) -> Tree:
    """Rows as columns; a list as a mapping."""
    if all(isinstance(row, list) for row in values):
        return [list(column) for column in zip(*values, strict=False)]
    return {str(i): value for i, value in enumerate(values)}


def _misspelt(rng: Random, word: str) -> str:
    near = [word.upper(), word + "s", word[:-1], word[1:], word[::-1], word.replace("_", "-"), f" {word}", f"{word}\n"]
    return rng.choice([*near, "gpus", "tokens", "x"])


def reworded(rng: Random, words: list[str]) -> tuple[list[str], str]:
    """A command line with a mistake in what follows the command, and what it is."""
    words, at = list(words), rng.randrange(1, len(words))
    match rng.randrange(4):
        case 0:
            del words[at]
        case 1:
            words.insert(at, rng.choice(["--force", "--jsn", "-x", "--", "", "--tokens", "--option", words[at]]))
        case _:
            junk = [text for text in (*TEXTS, *map(str, NUMBERS)) if "\x00" not in text]
            near = _misspelt(rng, words[at])
            name, equals, _ = words[at].partition("=")
            words[at] = rng.choice([near, name + equals + rng.choice(junk) if equals else rng.choice(junk)])
    return words, f"word {at}"


def enlarged(rng: Random, scenario: Tree) -> tuple[Tree, list[str]]:
    """A scenario with some numbers many times as large, or as small, as they were; and which."""
    tree, said = _copy(scenario), []
    if "tokens" in tree and rng.random() < 0.5:
        tree["documents"] = {"distribution": "pile", "seed": 1, "max_length": 2 ** rng.randrange(14)}
        tree["mask"] = rng.choice(["causal_document", "shared_question_document", "full_sliding_window"])
    if rng.random() < 0.2:
        name, option = rng.choice([("block_sparse", "block"), ("variable_block_sparse", "block"), ("lambda", "window")])
        tree["mask"] = {"name": name, option: 2 ** rng.randrange(10), **({"min_block": 1} if name[0] == "v" else {})}
    if rng.random() < 0.5:
        tree |= {"cluster": "dgx-h200", "gpus": 8 * 2 ** rng.randrange(14), "tokens": 2 ** rng.randrange(10, 30)}
        tree |= {"tokens_per_gpu": None}
        said.append(f"{tree['tokens']} tokens on {tree['gpus']} GPUs")
    places = [
        (section, name)
        for section in (tree, tree.get("knobs"), tree.get("parallel"), tree.get("model"), tree.get("mask"))
        if isinstance(section, dict)
        for name, value in section.items()
        if type(value) is int
    ]
    for section, name in rng.sample(places, min(len(places), rng.choice([1, 1, 2, 3]))):
        section[name] = rng.choice([1, 2, *[section[name] * 2 ** rng.randrange(1, 20)] * 4])
        said.append(f"{name} = {section[name]}")
    return tree, said


# --- texts ---

FRAGMENTS = [
    *(b"\x1b[2J", b"\x00", b"\xff\xfe", b"\xc3", "\u2028".encode(), b"\t", b"&a ", b"*a", b"<<: *a\n", b"!!binary "),
    *(
        b"%YAML 1.1\n---\n",
        b"\n---\n",
        b"\n...\n",
        b'"',
        b"{",
        b"}",
        b"[",
        b",",
        b"\n\n",
        b"#",
        b"=cmd()",
        b";",
        b"inf",
    ),
]
LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
)
WHOLE = [b"", b"\n", b" ", b"\x00" * 1000, b"null", b"[]", b"{}", b"[[]]", LAUGHS.encode()]
ENDS = [b"x" * 10**6, b"\n" * 10**5, b"[" * 10**5, b"\x00", b"\n---\n{}", b","]


def damaged(rng: Random, content: bytes) -> tuple[bytes, str]:
    """A file whose bytes suffered, and how."""
    at, lines = rng.randint(0, len(content)), content.split(b"\n")
    line, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(14):
        case 0:
            return content[:at], f"cut at {at}"
        case 1:
            byte = bytes([rng.randrange(256)])
            return content[:at] + byte + content[at + 1 :], f"byte {at} = {byte!r}"
        case 2:
            return b"\xef\xbb\xbf" + content, "byte order mark"
        case 3:
            end = rng.choice([b"\r\n", b"\r", b"\n\n", b"\x0b", b""])
            return content.replace(b"\n", end), f"lines end with {end!r}"
        case 4 | 5:
            part = rng.choice(FRAGMENTS)
            return content[:at] + part + content[at:], f"{part!r} at {at}"
        case 6:
            return b"\n".join([*lines[:line], *lines[line : line + 1] * 2, *lines[line + 1 :]]), f"line {line} twice"
        case 7:
            return b"\n".join([*lines[:line], *lines[line + 1 :]]), f"without line {line}"
        case 8:
            lines[line], lines[other] = lines[other], lines[line]
            return b"\n".join(lines), f"lines {line} and {other} swapped"
        case 9:
            times = min(rng.choice([2, 100, 10_000]), 1 + 10**6 // (1 + len(content)))
            return b"\n".join([*lines[:line], lines[line] * times, *lines[line + 1 :]]), f"line {line} x {times}"
        case 10:
            name = rng.choice(["utf-16", "utf-32", "utf-7"])
            return content.decode("utf-8", "replace").encode(name), name
        case 11:
            end = rng.choice([*ENDS, content])
            return content + end, f"ends with {end[:20]!r}"
        case 12:
            return rng.choice([*WHOLE, content.swapcase(), rng.randbytes(200)]), "another content"
        case _:
            return _other_number(rng, content)


def _other_number(rng: Random, content: bytes) -> tuple[bytes, str]:
    """One number of a text, written as another one or as something else."""
    found = list(re.finditer(rb"(?<![\w.])-?\d{1,18}(\.\d+)?([eE][-+]?\d{1,2})?(?![\w.])", content))
    if not found:
        return content, "nothing"
    number = rng.choice(found)
    value = float(number[0]) if number[1] or number[2] else int(number[0])
    text = rng.choice([str(scaled(rng, value)), "inf", "nan", "-1", "0", "", "N/A", "1e400", "x", "1,5"])
    return content[: number.start()] + text.encode() + content[number.end() :], f"{number[0]!r} = {text}"


YAML_NUMBERS: dict[str, list[int]] = {
    "010000": [10000],
    "0x1000": [4096],
    "0o10000": [4096],
    "1:08:16": [],
    "1_000": [],
    "0b1000000000000": [],
    "4096.0": [4096],
    "+4096": [4096],
    "4.096e3": [4096],
    "yes": [],
    "2024-01-01": [],
    "!!int '4096'": [4096],
    "!!float 4096": [4096],
    "&a 4096": [4096],
    "*a": [],
    "!!python/object:os.system {}": [],
    "{4096}": [],
}
"""What may stand where a whole number is expected, and as what YAML 1.2 reads it, if as one; all may be refused."""


def as_json(tree: Tree) -> bytes:
    return json.dumps(tree, indent=1).encode()


def as_yaml(tree: Tree) -> bytes:
    try:
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode()
    except (yaml.YAMLError, UnicodeEncodeError, RecursionError):  # what only JSON can write
        return as_json(tree)


def as_lines(tree: Tree) -> bytes:
    rows = tree if isinstance(tree, list) else [tree]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
