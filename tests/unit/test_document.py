from __future__ import annotations

import copy
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dmconfig.document import MAX_BYTES, MAX_DEPTH, MAX_NODES, Document, parse_document, parse_scalar, read_document
from dmconfig.errors import Code, DocumentError, Problem
from dmconfig.paths import ConfigPath, Location
from dmconfig.resolve import as_read
from tests.conftest import document_from, only_problem

SPEC = """\
# a comment first
version: 1
pipeline:            # and one after a key
  source: ./flux

device_map: {unet: cuda:0,  vae: "cuda:1"}
call:
  sizes:
    - 512
    - {width: 64}
"""


def place(document: Document, path: ConfigPath, *, key: bool = False) -> tuple[int, int]:
    location, _ = as_read(document).place(path, key=key)
    assert location is not None
    assert location.file == document.name
    return location.line, location.column


def refusal(text: str) -> Problem:
    with pytest.raises(DocumentError) as caught:
        document_from(text)
    return only_problem(caught.value)


def where(problem: Problem) -> tuple[int, int]:
    assert problem.location is not None
    return problem.location.line, problem.location.column


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (("version",), (2, 1), (2, 10)),
        (("pipeline",), (3, 1), (4, 3)),
        (("pipeline", "source"), (4, 3), (4, 11)),
        (("device_map",), (6, 1), (6, 13)),
        (("device_map", "unet"), (6, 14), (6, 20)),
        (("device_map", "vae"), (6, 29), (6, 34)),
        (("call", "sizes"), (8, 3), (9, 5)),
        (("call", "sizes", 1, "width"), (10, 8), (10, 15)),
    ],
)
def test_locate_key_and_value_as_an_editor_counts(
    path: ConfigPath, key: tuple[int, int], value: tuple[int, int]
) -> None:
    """Lines and columns count from 1, after comments, in blocks, in flow mappings and in lists."""
    document = document_from(SPEC)
    assert place(document, path, key=True) == key
    assert place(document, path) == value


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        (("pipeline", "class"), (3, 1)),  # the key of the mapping it would stand in
        (("device_map", "unet", "execution"), (6, 14)),
        (("components", "vae", "dtype"), (1, 1)),  # nothing of it there: the file
        (("call", "sizes", 7), (8, 3)),
        ((), (1, 1)),
    ],
)
def test_locate_missing_path_is_its_nearest_ancestor(path: ConfigPath, nearest: tuple[int, int]) -> None:
    """What is not in the file is shown where it would stand."""
    assert place(document_from(SPEC), path) == nearest
    assert place(document_from(SPEC), path, key=True) == nearest


def test_locate_item_of_a_list() -> None:
    """An item has a place of its own."""
    assert place(document_from(SPEC), ("call", "sizes", 0)) == (9, 7)


def test_locate_empty_value_is_after_its_colon() -> None:
    """A value that is not written stands where it would be."""
    assert place(document_from("a:\nb: 1\n"), ("a",)) == (1, 3)


def test_data_is_plain_and_keys_are_text() -> None:
    """Keys written as numbers are text, and the order is the file's."""
    data = document_from("0: a\ncuda:1: b\nlist: [1, x]\n1.5: c\ntrue: d\nnull: e\n").data
    assert data == {"0": "a", "cuda:1": "b", "list": [1, "x"], "1.5": "c", "true": "d", "null": "e"}
    assert list(data) == ["0", "cuda:1", "list", "1.5", "true", "null"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("NULL", None),
        ("true", True),
        ("False", False),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("1.5", 1.5),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("1e9", 1e9),
        ("1.5E-3", 0.0015),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("nan", "nan"),
        ("inf", "inf"),
        ("infinity", "infinity"),
        ("tRue", "tRue"),
        ("cuda:0", "cuda:0"),
        ("20GiB", "20GiB"),
        ("80%", "80%"),
        ("1 2", "1 2"),
        ("٣", "٣"),
        ("1\n", "1\n"),
    ],
)
def test_parse_scalar_follows_yaml_12(text: str, value: Any) -> None:
    """Only what YAML 1.2 calls null, a boolean or a number is one; words that Python's float knows are text."""
    parsed = parse_scalar(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_parse_scalar_nan_is_a_number() -> None:
    """Not a number is one, and equals nothing."""
    assert math.isnan(parse_scalar(".nan"))


@pytest.mark.parametrize(
    ("scalar", "kind", "plain"),
    [
        ("yes", "a boolean", "true"),
        ("Yes", "a boolean", "true"),
        ("no", "a boolean", "false"),
        ("NO", "a boolean", "false"),
        ("on", "a boolean", "true"),
        ("off", "a boolean", "false"),
        ("Off", "a boolean", "false"),
        ("0123", "a number", "123 for a number"),
        ("-0123", "a number", "-123 for a number"),
        ("+0123", "a number", "123 for a number"),
        ("1_000", "a number", "1000 for a number"),
        ("0x1F", "a number", "31 for a number"),
        ("-0x1F", "a number", "-31 for a number"),
        ("0b11", "a number", "3 for a number"),
        ("0o17", "a number", "15 for a number"),
        ("00", "a number", None),
        ("12:30", "a number", None),
        ("190:20:30", "a number", None),
        ("1:20.5", "a number", None),
        ("685_230.15", "a number", None),
        ("2001-01-01", "a date", None),
        ("2001-12-14t21:59:43.10-05:00", "a date", None),
        ("=", "a default key", None),
        ("<<", "a merge key", None),
    ],
)
def test_plain_scalar_that_yaml_11_bends_is_refused(scalar: str, kind: str, plain: str | None) -> None:
    """A value that readers of YAML 1.1 and 1.2 take for different things is refused at its place; quoted it is text."""
    problem = refusal(f"version: 1\nvalue: {scalar}\n")
    assert (problem.code, problem.path, where(problem)) == (Code.AMBIGUOUS_SCALAR, ("value",), (2, 8))
    assert problem.what == f"{scalar} is {kind} to some YAML readers and text to others"
    assert problem.fix == f"quote it if text is meant ('{scalar}')" + (f", or write {plain}" if plain else "")
    for quote in "'\"":
        assert document_from(f"value: {quote}{scalar}{quote}\n").data == {"value": scalar}


@pytest.mark.parametrize("key", ["yes", "off", "0123", "12:30", "2001-01-01"])
def test_plain_key_that_yaml_11_bends_is_refused(key: str) -> None:
    """A key is held to the same rule as a value."""
    problem = refusal(f"call:\n  {key}: 1\n")
    assert (problem.code, problem.path, where(problem)) == (Code.AMBIGUOUS_SCALAR, ("call", key), (2, 3))
    assert document_from(f"call:\n  '{key}': 1\n").data == {"call": {key: 1}}


@pytest.mark.parametrize("scalar", ["cuda:0", "cuda:10", "free-2GiB", "1.5GiB", "fp16", "3.11.2", "a:b", "x y", "v1"])
def test_words_of_a_spec_need_no_quotes(scalar: str) -> None:
    """What people write for devices, sizes and names is no trap."""
    assert document_from(f"value: {scalar}\n").data == {"value": scalar}


def test_duplicate_key_is_refused_at_the_second() -> None:
    """The second of two equal keys is the problem, and the first is named."""
    problem = refusal("version: 1\ndevice_map:\n  unet: cuda:0\n  vae: cpu\n  unet: cuda:1\n")
    assert (problem.code, problem.path, where(problem)) == (Code.DUPLICATE_KEY, ("device_map", "unet"), (5, 3))
    assert problem.what == "key 'unet' stands here a second time; first at line 3, column 3"


@pytest.mark.parametrize("text", ["0: a\n'0': b\n", '{a: 1, "a": 2}', "a: 1\na: 1\n"])
def test_duplicate_key_however_written_is_refused(text: str) -> None:
    """Quotes do not make another key, and equal values do not excuse it."""
    assert refusal(text).code is Code.DUPLICATE_KEY


@pytest.mark.parametrize(
    ("text", "position", "what"),
    [
        ("<<: a\n", (1, 5), "<< takes a mapping, or a list of mappings"),
        ("a: 1\nb: !!str 1\n", (2, 4), "tag 'tag:yaml.org,2002:str' is not accepted"),
        ("a: !mine {b: 1}\n", (1, 4), "tag '!mine' is not accepted"),
        ("? [a, b]\n: 1\n", (1, 3), "a key must be a word or a number"),
        ("? {a: b}\n: 1\n", (1, 3), "a key must be a word or a number"),
        ("a: 1\n---\nb: 2\n", (2, 1), "a second document starts here"),
    ],
)
def test_yaml_that_is_not_accepted_is_refused_by_name(text: str, position: tuple[int, int], what: str) -> None:
    """Tags, merge keys, keys that are not words and second documents each have a sentence and a place."""
    problem = refusal(text)
    assert (problem.code, where(problem), problem.what) == (Code.UNSUPPORTED_YAML, position, what)


def test_merge_key_adds_keys_where_they_were_written() -> None:
    """A merged key is located in its anchor, also through a list and a second merge; a key of its own wins."""
    document = document_from(
        "a: &a {x: 1, v: 2}\nb: &b\n  <<: *a\n  z: 3\nc: &c {w: 4, x: 5}\nd:\n  <<: [*b, *c]\n  v: 6\n"
    )
    assert document.data["d"] == {"x": 1, "v": 6, "z": 3, "w": 4}
    assert (
        document.data["d"]
        == yaml.safe_load("a: &a {x: 1, v: 2}\nb: &b {<<: *a, z: 3}\nc: &c {w: 4, x: 5}\nd: {<<: [*b, *c], v: 6}")["d"]
    )
    assert place(document, ("d", "x")) == (1, 11)
    assert place(document, ("d", "x"), key=True) == (1, 8)
    assert place(document, ("d", "z")) == (4, 6)
    assert place(document, ("d", "w")) == (5, 11)
    assert place(document, ("d", "v")) == (8, 6)


def test_merge_key_twice_is_refused() -> None:
    """Which of two merges comes first would be a guess."""
    problem = refusal("a: &a {x: 1}\nb: {<<: *a, <<: *a}\n")
    assert (problem.code, where(problem)) == (Code.DUPLICATE_KEY, (2, 13))


def test_merges_count_as_values_and_are_limited() -> None:
    """Merges of merges that stand for 10^9 mappings are refused, in well under a second."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [" + ", ".join([f"*a{i - 1}"] * 10) + "]}" for i in range(1, 9)]
    start = time.process_time()
    assert refusal("\n".join(lines)).code is Code.TOO_LARGE
    assert time.process_time() - start < 5


def test_number_with_a_bare_exponent_is_a_number() -> None:
    """What YAML 1.2 calls a number is one: a learning rate needs no dot and no sign."""
    assert document_from("eta: 1e-4\nflops: 0.6e12\n").data == {"eta": 1e-4, "flops": 0.6e12}


def test_refused_text_leaves_what_could_be_read() -> None:
    """An error that is not of syntax carries the document, so that its other problems can be told as well."""
    with pytest.raises(DocumentError) as caught:
        document_from("a: off\nb: 1\n")
    assert caught.value.document is not None
    assert caught.value.document.data == {"a": "off", "b": 1}
    with pytest.raises(DocumentError) as caught:
        document_from("a: [\n")
    assert caught.value.document is None


def test_quoted_merge_key_is_a_word() -> None:
    """In quotes << is text, which is for the spec to refuse."""
    assert document_from("'<<': 1\n").data == {"<<": 1}


def test_alias_repeats_its_anchor_with_places_of_the_anchor() -> None:
    """An alias stands for the anchored value; what is below it is located where it was written."""
    document = document_from("a: &vae {dtype: fp16}\nb: *vae\n")
    assert document.data == {"a": {"dtype": "fp16"}, "b": {"dtype": "fp16"}}
    assert place(document, ("b",), key=True) == (2, 1)
    assert place(document, ("b", "dtype")) == (1, 17)


def test_alias_gives_values_of_their_own() -> None:
    """Changing one copy does not change the other: data holds no shared mappings."""
    data = document_from("a: &vae {dtype: fp16}\nb: *vae\n").data
    data["b"]["dtype"] = "fp32"
    assert data["a"] == {"dtype": "fp16"}


def test_alias_without_anchor_is_refused() -> None:
    """An alias of something that is not there, or that comes later, has a place."""
    problem = refusal("a: *later\nb: &later 1\n")
    assert (problem.code, where(problem)) == (Code.SYNTAX, (1, 4))
    assert "*later has no anchor that ends before it" in problem.what


def test_alias_within_its_own_anchor_is_refused() -> None:
    """A value that contains itself would have no end."""
    assert refusal("a: &self [*self]\n").code is Code.SYNTAX


def test_alias_does_not_repeat_the_problems_of_its_anchor() -> None:
    """One bad value is one problem, however often an alias repeats it."""
    assert refusal("a: &x [off]\nb: *x\nc: *x\n").path == ("a", 0)


def test_all_problems_come_together_in_file_order() -> None:
    """A file's problems are told at once, sorted by place."""
    with pytest.raises(DocumentError) as caught:
        document_from("c: off\na: !x 1\na: 0123\nb: &z {k: 1, k: 2}\n")
    found = [(problem.code, where(problem)) for problem in caught.value.problems]
    assert found == [
        (Code.AMBIGUOUS_SCALAR, (1, 4)),
        (Code.UNSUPPORTED_YAML, (2, 4)),
        (Code.DUPLICATE_KEY, (3, 1)),
        (Code.DUPLICATE_KEY, (4, 14)),
    ]


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("a: [1, 2\nb: 3\n", (2, 2)),
        ("a: 1\n b: 2\n", (2, 3)),
        ("a: b: c\n", (1, 5)),
        ("a: 'x\n", (2, 1)),
        ("a: @x\n", (1, 4)),
    ],
)
def test_syntax_error_has_a_place(text: str, position: tuple[int, int]) -> None:
    """A file that is not YAML is refused where the parser stopped."""
    problem = refusal(text)
    assert (problem.code, where(problem)) == (Code.SYNTAX, position)


def test_syntax_error_of_a_tab_says_so() -> None:
    """A tab as indentation is the usual cause, and has a fix."""
    problem = refusal("pipeline:\n\tsource: ./x\n")
    assert (problem.code, where(problem)) == (Code.SYNTAX, (2, 1))
    assert problem.fix == "YAML indents with spaces; replace the tab"


@pytest.mark.parametrize(("character", "name"), [("\x00", "U+0000"), ("\x07", "U+0007"), ("\ufffe", "U+FFFE")])
def test_forbidden_character_is_a_syntax_error_at_its_place(character: str, name: str) -> None:
    """A character YAML forbids is named and placed."""
    problem = refusal(f"a: 1\nb: x{character}\n")
    assert (problem.code, where(problem)) == (Code.SYNTAX, (2, 5))
    assert (problem.what, problem.fix) == (f"the character {name} is not allowed in YAML", "remove it")


def nested(depth: int) -> str:
    """A document whose innermost value is this deep; the root mapping is the first level."""
    return "a: " + "[" * (depth - 2) + "1" + "]" * (depth - 2)


def test_depth_up_to_the_limit_is_read() -> None:
    """The deepest accepted document is read, one level more is refused where it goes too deep."""
    data = document_from(nested(MAX_DEPTH)).data["a"]
    for _ in range(MAX_DEPTH - 2):
        (data,) = data
    assert data == 1
    problem = refusal(nested(MAX_DEPTH + 1))
    assert (problem.code, where(problem)) == (Code.TOO_LARGE, (1, 4 + MAX_DEPTH - 1))


def test_depth_of_many_thousands_is_an_error_not_a_crash() -> None:
    """Brackets without end do not exhaust the stack."""
    assert refusal("a: " + "[" * 100_000).code in {Code.TOO_LARGE, Code.SYNTAX}


def test_depth_through_aliases_is_limited() -> None:
    """Forty short values, each thirty levels around the one before, are a thousand levels deep."""
    around = [f"a{i}: &a{i} " + "[" * 29 + f"*a{i - 1}" + "]" * 29 for i in range(1, 40)]
    assert refusal("\n".join(["a0: &a0 1", *around])).code is Code.TOO_LARGE


def test_nodes_after_aliases_are_limited_and_soon() -> None:
    """Ten lines that stand for 10^9 values are refused, in well under a second."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 9)]
    start = time.process_time()
    problem = refusal("\n".join(lines))
    assert problem.code is Code.TOO_LARGE
    assert str(MAX_NODES) in problem.what
    assert time.process_time() - start < 5


def test_nodes_up_to_the_limit_are_read() -> None:
    """The root and a list are two values; the rest may be items."""
    items = MAX_NODES - 2
    assert len(document_from("a: [" + "1," * items + "]").data["a"]) == items
    assert refusal("a: [" + "1," * (items + 1) + "]").code is Code.TOO_LARGE


def test_number_of_thousands_of_digits_is_an_error_not_a_crash() -> None:
    """A whole number longer than any size is refused at its place; in quotes it is text."""
    problem = refusal("a: -" + "9" * 5000)
    assert (problem.code, problem.path, where(problem)) == (Code.TOO_LARGE, ("a",), (1, 4))
    assert document_from(f"a: '{'9' * 5000}'").data == {"a": "9" * 5000}


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "---\n...\n"])
def test_empty_document_is_none(text: str) -> None:
    """A file with nothing in it is no error here."""
    document = document_from(text)
    assert document.data is None
    assert document.values == {(): Location("spec.yaml", 1, 1)}


def write(folder: Path, content: bytes) -> Path:
    file = folder / "spec.yaml"
    file.write_bytes(content)
    return file


def test_read_document_keeps_the_name_and_the_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locations show the file as the user named it; relative paths in it start in its folder."""
    write(tmp_path, b"a: 1\n")
    monkeypatch.chdir(tmp_path)
    document = read_document("spec.yaml")
    assert (document.name, document.folder) == ("spec.yaml", tmp_path)
    assert str(document.values["a",]) == "spec.yaml:1:4"


def test_read_document_bom_does_not_move_columns(tmp_path: Path) -> None:
    """A byte order mark is not part of the first key."""
    document = read_document(write(tmp_path, b"\xef\xbb\xbfa: 1\n"))
    assert document.data == {"a": 1}
    assert place(document, ("a",), key=True) == (1, 1)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_read_document_line_ends_do_not_matter(tmp_path: Path, end: bytes) -> None:
    """Files of every system have the same data and the same places."""
    document = read_document(write(tmp_path, end.join([b"a: 1", b"# c", b"b:", b"  c: x", b""])))
    assert document.data == {"a": 1, "b": {"c": "x"}}
    assert place(document, ("b", "c")) == (4, 6)


def test_read_document_unicode_counts_characters(tmp_path: Path) -> None:
    """A column is a character, not a byte: letters of two, three and four bytes count as one each."""
    document = read_document(write(tmp_path, 'ключ: {"日🎨": "ж", b: 1}\n'.encode()))
    assert document.data == {"ключ": {"日🎨": "ж", "b": 1}}
    assert place(document, ("ключ", "b"), key=True) == (1, 19)


def test_read_document_not_utf8_says_byte_and_line(tmp_path: Path) -> None:
    """A file in another encoding is refused, with the byte and its line."""
    file = write(tmp_path, "a: 1\nb: caf\xe9\n".encode("latin-1"))
    with pytest.raises(DocumentError) as caught:
        read_document(file)
    problem = only_problem(caught.value)
    assert problem.code is Code.FILE_UNREADABLE
    assert problem.what == f"{file} is not UTF-8 text: byte 0xe9 on line 2"
    assert problem.fix == "save it as UTF-8"


def test_read_document_size_limit_is_exact(tmp_path: Path) -> None:
    """A file of the limit is read, one byte more is refused without being parsed."""
    head = b"a: 1 #"
    assert read_document(write(tmp_path, head + b"x" * (MAX_BYTES - len(head)))).data == {"a": 1}
    with pytest.raises(DocumentError) as caught:
        read_document(write(tmp_path, head + b"x" * (MAX_BYTES - len(head) + 1)))
    assert only_problem(caught.value).code is Code.TOO_LARGE


def test_read_document_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    """A file that is not there, or is a folder, is a problem and no traceback."""
    with pytest.raises(DocumentError) as caught:
        read_document(tmp_path / "none.yaml")
    assert only_problem(caught.value).what == f"there is no file {tmp_path / 'none.yaml'}"
    with pytest.raises(DocumentError) as caught:
        read_document(tmp_path)
    assert only_problem(caught.value).what == f"{tmp_path} is a folder"


def test_parse_document_same_text_same_document() -> None:
    """Reading is a function of the text: nothing is kept between two readings."""
    first = parse_document(SPEC, name="a", folder=Path("/a"))
    before = copy.deepcopy(first.data)
    first.data["version"] = 99
    second = parse_document(SPEC, name="a", folder=Path("/a"))
    assert second.data == before
    assert dict(second.values) == dict(first.values)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(TEXTS, PLAIN, max_size=4), st.sampled_from([True, False, None]))
def test_what_pyyaml_writes_is_read_as_the_same_data(data: dict[str, Any], flow: bool | None) -> None:
    """Whatever plain data another writer of YAML has put into a file, in braces or not, is what we read.

    But for what PyYAML itself reads differently (some line ends), and for y and n, which it does not quote.
    """
    text = yaml.safe_dump(data, default_flow_style=flow, allow_unicode=True)
    assume(yaml.safe_load(text) == data and not re.search(r"(?<![\w'\"])[yYnN](?![\w'\"])", text))
    assert document_from(text).data == data


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("ab:-?[]{},#&*!|>'\"%@` \n\t0.~<=$"), max_size=40))
def test_text_of_nothing_but_punctuation_is_read_or_refused_at_a_place(text: str) -> None:
    """Characters that YAML gives a meaning, in any order, never end in anything but data or a placed problem."""
    problems: tuple[Problem, ...] = ()
    try:
        document_from(text)
    except DocumentError as error:
        problems = error.problems
    assert all(problem.location for problem in problems)
