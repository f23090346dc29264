"""Keys moved in the text of a file: exactly, and on random moves in every valid case, without losing anything."""

from __future__ import annotations

import functools
import operator
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmconfig.fixing import fixed
from dmconfig.rearranging import comments_in, moved

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted((ROOT / "tests" / "cases" / "valid").glob("*.yaml"))
MOVES_PER_FILE = 25

TEXT = """\
# a file
version: 1
pipeline:
  source: ./x   # where
  # two lines
  # over it
  device: cuda:0  # the card
torch_dtype: float16 # half
components: {vae: {device: cuda:1, dtype: float32}}  # few
unet:
  # of the unet
  dtype: bfloat16
    # deeper

# the call
call:
  prompt: |
    a
     b
# end
"""


@pytest.mark.parametrize(
    ("path", "target", "left", "new"),
    [
        (
            ("pipeline", "device"), ("device_map",),
            "  # two lines\n  # over it\n  device: cuda:0  # the card\n",
            "# two lines\n# over it\ndevice_map: cuda:0  # the card\n",
        ),
        (
            ("components", "vae", "device"), ("device_map", "vae"),
            "components: {vae: {device: cuda:1, dtype: float32}}  # few\n",
            "components: {vae: {dtype: float32}}  # few\ndevice_map:\n  vae: cuda:1\n",
        ),
        (
            ("unet",), ("dtypes", "unet"),
            "unet:\n  # of the unet\n  dtype: bfloat16\n    # deeper\n",
            "dtypes:\n  unet:\n    # of the unet\n    dtype: bfloat16\n      # deeper\n",
        ),
        (("call", "prompt"), ("prompt",), "call:\n  prompt: |\n    a\n     b\n", "call: {}\nprompt: |\n  a\n   b\n"),
        (
            ("torch_dtype",), ("components", "dtype"),
            "torch_dtype: float16 # half\ncomponents: {vae: {device: cuda:1, dtype: float32}}  # few\n",
            "# half\ncomponents: {vae: {device: cuda:1, dtype: float32}, dtype: float16}  # few\n",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_key_is_moved_with_its_comments(path: Any, target: Any, left: str, new: str, end: str) -> None:
    """Out of one place and into the other, in the form of each, with the line ends of the file."""
    assert left in TEXT
    assert moved(TEXT.replace("\n", end), path, target) == TEXT.replace(left, new).replace("\n", end)


def test_key_goes_behind_the_last_of_a_block() -> None:
    """With the indentation that the others have."""
    after = moved(TEXT, ("torch_dtype",), ("pipeline", "dtype"))
    line = "  device: cuda:0  # the card\n"
    assert after == TEXT.replace("torch_dtype: float16 # half\n", "").replace(line, f"{line}  dtype: float16 # half\n")


def test_value_is_replaced_where_the_key_stands_for_another() -> None:
    """A comment behind the value stays behind it."""
    assert moved("a: 1\non: true  # it\n", ("on",), ("mode",), "quick") == "a: 1\nmode: quick  # it\n"


@pytest.mark.parametrize(
    ("text", "path", "target"),
    [
        ("a: 1\nb: 2\n", ("a",), ("b",)),
        ("a: 1\nb: 2\n", ("a",), ("b", "a")),
        ("a: &x {b: 1}\nc: *x\n", ("a", "b"), ("b",)),
        ("x: &x {b: 1}\na: {<<: *x}\n", ("a", "b"), ("b",)),
        ("a:\n- b: 1\n  c: 2\n", ("a", 0, "b"), ("b",)),
        ("a: {b: 1,\n  c: 2}\n", ("a", "b"), ("b",)),
        ("a: {b: {c: 1}}\nd:\n  e: 1\n", ("d",), ("a", "b", "d")),
        ("{a: 1, b: {c: 2}}\n", ("b", "c"), ("c",)),
        ("a: [\n", ("a",), ("b",)),
        ("a: 1\n", ("b",), ("c",)),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_for_certain_is_not(text: str, path: Any, target: Any) -> None:
    """The target is there, or in what is no mapping; an anchor shares it; lists, and mappings in braces on lines."""
    assert moved(text, path, target) is None


def paths_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every key of a document that is below mappings only."""
    for key, value in data.items() if isinstance(data, dict) else ():
        yield (*path, key)
        yield from paths_in(value, (*path, key))


def leaves(data: Any) -> Counter[str]:
    """Count the scalars of a document, empty collections among them."""
    if isinstance(data, dict) and data:
        return sum(map(leaves, data.values()), Counter())
    if isinstance(data, list) and data:
        return sum(map(leaves, data), Counter())
    return Counter([repr(data)])


class Texts(yaml.BaseLoader):
    """Every scalar as it is written; tags mean nothing."""


Texts.add_multi_constructor("!", lambda loader, _, node: Texts.of(loader, node))  # type: ignore[attr-defined]
Texts.of = staticmethod(  # type: ignore[attr-defined]
    lambda loader, node: (
        loader.construct_sequence(node, deep=True)
        if isinstance(node, yaml.SequenceNode)
        else loader.construct_mapping(node, deep=True)
    )
)


def read(text: str) -> Any:
    """Return what a document says, every scalar as text."""
    return Texts(text).get_single_data()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_random_moves_lose_neither_a_value_nor_a_comment(end: str) -> None:
    """By the word of PyYAML's plainest loader: what was at the one path is at the other, and all else is as it was."""
    chance, done = random.Random(6), 0  # noqa: S311 - the same moves on every run
    for case in CASES:
        text = case.read_text(encoding="utf-8").replace("\n", end)
        before = read(text)
        paths = [*paths_in(before)]
        for _ in range(MOVES_PER_FILE):
            path = chance.choice(paths)
            target = (*chance.choice([(), *paths]), *chance.choice([("new",), ("new", "key"), path[-1:]]))
            after = moved(text, path, target)
            if after is None:
                continue
            done += 1
            data = read(after)
            assert comments_in(after) == comments_in(text)
            assert leaves(data) - leaves(before) in (Counter(), Counter(["{}"]))
            assert leaves(before) - leaves(data) == Counter()
            assert functools.reduce(operator.getitem, target, data) == functools.reduce(operator.getitem, path, before)
    assert done > MOVES_PER_FILE * len(CASES) // 5


WRONG = (
    ("pipeline", "device: cuda:0"),
    ("pipeline", "enable_model_cpu_offload: true"),
    ("pipeline", "max_memory: {cpu: 50GiB}"),
    ("", "torch_dtype: float16"),
    ("", "num_inference_steps: 3"),
    ("", "use_stream: true"),
    ("", "lora: [{source: ./ink.safetensors}]"),
    ("", "text_encoder:\n  # inside\n  torch_dtype: float32\n  device: cpu  # slow"),
    ("", "low_memory: off"),
    ("pipeline", "variant: no"),
)


@pytest.mark.parametrize("section", ["", "  # alone"])
def test_fix_mends_what_is_put_into_a_right_file(section: str, tmp_path: Path) -> None:
    """No value and no comment is lost, the result is a document, and fixing it again has nothing left to do."""
    changed = 0
    for number, (place, lines) in enumerate(WRONG):
        for case in CASES[number :: len(WRONG)]:
            text = _with(case.read_text(encoding="utf-8"), place, lines + section)
            if text is None:
                continue
            file = tmp_path / "spec.yaml"
            file.write_text(text, encoding="utf-8")
            change = fixed(file)
            file.write_text(change.after, encoding="utf-8")
            assert comments_in(change.after) == comments_in(text)
            before, after = leaves(read(text)), leaves(read(change.after))
            assert after.total() >= before.total()
            assert before - after <= Counter(["'true'", "'off'"])
            assert fixed(file).edits == ()
            changed += bool(change.edits)
    assert changed > len(CASES) // 2


def _with(text: str, place: str, lines: str) -> str | None:
    """A right file with lines put at the end of a section, or of the file; None where they are there, in some way."""
    key = re.escape(lines.partition(":")[0])
    if re.search(rf"\b{key}\b|^---", text, re.MULTILINE):
        return None
    if not place:
        return f"{text.rstrip()}\n{lines}\n" if not text.lstrip().startswith("{") else None
    section = re.search(rf"^{place}:\n(?:  +.*\n)+", text, re.MULTILINE)
    flow = re.search(rf"^{place}: {{.*}}", text, re.MULTILINE)
    if section:
        return f"{text[: section.end()]}  {lines}\n{text[section.end() :]}"
    inner = lines.partition("  #")[0]
    return f"{text[: flow.end() - 1]}, {inner}{text[flow.end() - 1 :]}" if flow else None
