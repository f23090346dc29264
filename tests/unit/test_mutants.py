"""Right specs with one thing wrong: 20,000 mutants, each accepted whole or refused at its place.

Every valid case is changed in one way at a time, at random but the same on every run: a key renamed, a line moved to
another level, a value of another type, something twice, bytes cut off, odd characters. Whatever comes of it, there is
no traceback; a refusal has a code and a place inside the file; and an acceptance drops nothing that was written, by
the word of PyYAML's own composer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmconfig.checked import Checked, check_file, check_profiles
from dmconfig.devices import device_or_none
from dmconfig.errors import Code, DMConfigError, Problem
from dmconfig.paths import lines_of

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    case
    for case in sorted((ROOT / "tests" / "cases" / "valid").glob("*.yaml"))
    if not re.search(r"^(# (overlay|profile|env|set):|extends:)", case.read_text(encoding="utf-8"), re.MULTILINE)
]
"""The right specs that are one file alone."""
PER_FILE = 310

KEYS = (
    "version", "pipeline", "source", "dtype", "torch_dtype", "device_map", "device", "gpu", "max_memory", "reserve",
    "low_memory", "offload", "execution", "call", "components", "unet", "vae", "default", "extends", "profiles", "x",
    "'0'", "cuda:0", "12", "ключ", "null", "off", "<<", "class",
)  # fmt: skip
VALUES = (
    "", "null", "~", "true", "off", "no", "0", "-1", "1.5", "1e9", "0x1F", "0123", "12:30", "1_000", "2001-01-01",
    ".nan", "text", "'quoted'", '"with \\t escape"', "cuda:7", "cpu", "disk", "auto", "balanced", "20GiB", "80%",
    "[]", "{}", "[cuda:0, 1]", "{a: 1}", "[[[[1]]]]", "!!str x", "!append [1]", "!replace {a: 1}", "*nope", "&a x",
    "${HOME}", "${X:-1}", "$X", "${", "- x", "? y", "|", "> z", "@x", "`x`", "%x", "9" * 80, "x: y", "'",
)  # fmt: skip
ODD = (
    "\x00", "\x07", "\x1b[31m", "\x7f", "\x85", "\xa0", "\u00ad", "\u0301", "\u200b", "\u200d", "\u202e", "\u2028",
    "\ufeff", "\ufffe", "\U0001f3a8", "\U000e0041", "\t", "\r", "е",
)  # fmt: skip
RAW = (b"\xff", b"\xfe\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\x80")

_KEY = re.compile(r"(?<=[\s{,])[\w.:'\"]+(?=:(\s|$))", re.MULTILINE)
_VALUE = re.compile(r"(?<=: )[^\s#{\[,}\]][^#{\[,}\]\n]*", re.MULTILINE)


def mutant(text: str, chance: random.Random) -> bytes:
    """Return text with one change."""
    change = chance.choice((
        key_renamed, key_renamed, value_changed, value_changed, value_changed, line_moved, line_moved, line_twice,
        entry_twice, cut_off, odd_character, odd_bytes, character_lost, line_lost,
    ))  # fmt: skip
    return change(text, chance)


def _replaced(text: str, pattern: re.Pattern[str], word: str, chance: random.Random) -> bytes:
    found = [*pattern.finditer(text)]
    if not found:
        return f"{text}{word}\n".encode()
    match = chance.choice(found)
    return f"{text[: match.start()]}{word}{text[match.end() :]}".encode()


def key_renamed(text: str, chance: random.Random) -> bytes:
    """Another key, or the same one misspelt."""
    keys = [match.group() for match in _KEY.finditer(text)]
    old = chance.choice(keys)
    position = chance.randrange(len(old))
    misspelt = old[:position] + chance.choice("abz_") + old[position + chance.randrange(2) :]
    return _replaced(
        text, re.compile(rf"(?<=[\s{{,]){re.escape(old)}(?=:)"), chance.choice((misspelt, chance.choice(KEYS))), chance
    )


def value_changed(text: str, chance: random.Random) -> bytes:
    """A value of any other type in a value's place."""
    return _replaced(text, _VALUE, chance.choice(VALUES), chance)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def line_moved(text: str, chance: random.Random) -> bytes:
    """A line at another level: indented otherwise, or somewhere else."""
    lines = _lines(text)
    line = lines.pop(chance.randrange(len(lines)))
    to = chance.choice((len(lines), chance.randrange(len(lines) + 1)))
    return "".join([*lines[:to], " " * chance.choice((0, 1, 2, 4)) + line.lstrip(" "), *lines[to:]]).encode()


def line_twice(text: str, chance: random.Random) -> bytes:
    """A line twice, next to itself or at the end."""
    lines = _lines(text)
    index = chance.randrange(len(lines))
    to = chance.choice((index, len(lines)))
    return "".join([*lines[:to], lines[index], *lines[to:]]).encode()


def entry_twice(text: str, chance: random.Random) -> bytes:
    """A key with its value twice in one line, in braces or out of them."""
    found = [*re.finditer(r"[\w.:'\"]+: [^\s#{\[,}\]]+", text)]
    if not found:
        return line_twice(text, chance)
    match = chance.choice(found)
    return f"{text[: match.end()]}{chance.choice((', ', ' '))}{match.group()}{text[match.end() :]}".encode()


def cut_off(text: str, chance: random.Random) -> bytes:
    """The file ends early, perhaps within a letter."""
    content = text.encode()
    return content[: chance.randrange(len(content))]


def odd_character(text: str, chance: random.Random) -> bytes:
    """A character that nobody types, anywhere."""
    position = chance.randrange(len(text) + 1)
    return f"{text[:position]}{chance.choice(ODD)}{text[position:]}".encode()


def odd_bytes(text: str, chance: random.Random) -> bytes:
    """Bytes that are no UTF-8."""
    content = text.encode()
    position = chance.randrange(len(content) + 1)
    return content[:position] + chance.choice(RAW) + content[position:]


def character_lost(text: str, chance: random.Random) -> bytes:
    """One character is missing."""
    position = chance.randrange(len(text))
    return f"{text[:position]}{text[position + 1 :]}".encode()


def line_lost(text: str, chance: random.Random) -> bytes:
    """One line is missing."""
    lines = _lines(text)
    lines.pop(chance.randrange(len(lines)))
    return "".join(lines).encode()


# ---------------------------------------------------------------- what must hold of every mutant


def check_place(problem: Problem, content: bytes, file: Path) -> None:
    """A problem has a code and stands at a character of the file, or where a line ends."""
    assert isinstance(problem.code, Code)
    assert problem.what
    assert problem.location is not None, problem
    assert problem.location.file == str(file)
    lines = lines_of(content.decode("utf-8-sig", errors="replace"))
    assert 1 <= problem.location.line <= len(lines), problem
    assert 1 <= problem.location.column <= len(lines[problem.location.line - 1]) + 1, problem


def written(node: yaml.Node | None, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield every scalar of a file with its path, as PyYAML composes it; merge keys are followed as it defines them."""
    if isinstance(node, yaml.MappingNode):
        own = [(key, value) for key, value in node.value if key.tag != "tag:yaml.org,2002:merge"]
        names = [key.value for key, _ in own]
        for key, value in own:
            yield from written(value, (*path, key.value))
        for key, value in node.value:
            for source in (
                (value.value if isinstance(value, yaml.SequenceNode) else [value]) if (key, value) not in own else []
            ):
                for place, text in written(source, path):
                    if place[len(path)] not in names:
                        yield place, text
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from written(item, (*path, index))
    elif node is not None:
        yield path, node.value


def kept(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every scalar of plain data with its path."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, (list, tuple)) else None
    if entries is None:
        yield path, data
        return
    for key, value in entries:
        yield from kept(value, (*path, key))


def check_whole(checked: Checked, content: bytes) -> None:
    """What was accepted has every key and every value that is written, in the data and in the spec."""
    text = content.decode("utf-8-sig")
    root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    leaves = [(path, value) for path, value in written(root) if path[0] not in ("extends", "profiles")]
    data = dict(kept(checked.resolved.data))
    assert sorted(map(str, dict(leaves))) == sorted(map(str, data))
    assert len({path for path, _ in leaves}) == len(leaves)  # PyYAML composes both of two equal keys
    for path, value in leaves:
        if isinstance(data[path], str) and "$" not in value:
            assert data[path] == value
    told = checked.spec.model_dump(by_alias=True, exclude_unset=True, warnings=False)
    for path, _ in leaves:
        inside: Any = told
        for depth, key in enumerate(path):
            if not isinstance(inside, (dict, list, tuple)):
                break  # a value that the models keep as one
            name = device_or_none(key) if path[0] == "max_memory" and depth == 1 else key
            assert name in inside if isinstance(inside, dict) else name < len(inside), path
            inside = inside[name]


def check_mutant(content: bytes, file: Path) -> bool:
    """Check a mutant, and tell whether it is accepted."""
    file.write_bytes(content)
    try:
        checked = check_file(file)
        check_profiles(checked.resolved.profiles, file)
    except DMConfigError as error:
        problems = error.problems
    else:
        check_whole(checked, content)
        return True
    assert problems
    for problem in problems:
        check_place(problem, content, file)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_mutant_is_accepted_whole_or_refused_at_its_place(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 310 mutants of a right spec is one or the other, and some are each."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    text = case.read_bytes().decode().replace("../../../examples", str(ROOT / "examples"))
    file = tmp_path / "mutant.yaml"
    accepted = 0
    for number in range(PER_FILE):
        content = mutant(text, random.Random(f"{case.stem} {number}"))  # noqa: S311 - the same on every run
        try:
            accepted += check_mutant(content, file)
        except Exception as error:
            error.add_note(f"mutant {number} of {case.name}:\n{content!r}")
            raise
    assert 0 < accepted < PER_FILE


@pytest.mark.parametrize("dropped", ["reserve: 1GiB", "call: {seed: 1}", "max_memory: {0: 1GiB}", "device_map: cpu"])
def test_what_is_dropped_would_be_found(dropped: str, tmp_path: Path) -> None:
    """The check of these tests can fail: a line that is in the file and not in what was made of it is found."""
    text = f"version: 1\npipeline: {{source: {ROOT}/examples/digits/pipeline}}\n"
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    checked = check_file(file)
    check_whole(checked, text.encode())
    with pytest.raises(AssertionError):
        check_whole(checked, f"{text}{dropped}\n".encode())


def test_mutants_are_many() -> None:
    """There are at least 20,000."""
    assert PER_FILE * len(CASES) >= 20_000
