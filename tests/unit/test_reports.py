"""Problems as blocks with the line of the file, as lines for editors, as annotations and as SARIF."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmconfig.errors import Code, Edit, Problem
from dmconfig.paths import Location
from dmconfig.reports import github_annotation, problem_blocks, problem_line
from dmconfig.sarif import sarif_log


def problem(file: Path | str, line: int, column: int, length: int, what: str = "it is wrong") -> Problem:
    return Problem(code=Code.BAD_VALUE, what=what, path=("a", "b"), location=Location(str(file), line, column, length))


def block(text: str, line: int, column: int, length: int, folder: Path) -> list[str]:
    """The lines of the block of a problem at a place of a text, without the head and what is said of it."""
    file = folder / "spec.yaml"
    file.write_text(text, encoding="utf-8", newline="")
    (shown,) = problem_blocks([problem(file, line, column, length)])
    head, *lines = shown.splitlines()
    assert head == f"error[DM205 bad-value]: {file}:{line}:{column}"
    assert lines[-2:] == ["  at   a.b", "  what it is wrong"]
    return lines[:-2]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_block_marks_what_stands_at_the_place(end: str, tmp_path: Path) -> None:
    """The line of the file, and a mark as long as the word, whatever ends the lines."""
    text = end.join(["a:", "  b: wrong  # a remark", ""])
    assert block(text, 2, 6, 5, tmp_path) == ["    2 |   b: wrong  # a remark", "      |      ^^^^^"]


@pytest.mark.parametrize(
    ("line", "place", "shown", "mark"),
    [
        ("a: 日本 x", (7, 1), "a: 日本 x", "        ^"),  # a wide letter takes two columns
        ("a: e\u0301 x", (7, 1), "a: e\u0301 x", "     ^"),  # and an accent of its own none
        ("\ta: x", (2, 1), "→a: x", " ^"),
        ("a: \u202ex", (4, 2), "a: \N{REPLACEMENT CHARACTER}x", "   ^^"),
        ("a: \x1b[31mx", (4, 1), "a: \N{REPLACEMENT CHARACTER}[31mx", "   ^"),
        ("a:", (3, 1), "a:", "  ^"),
    ],
)
def test_block_shows_odd_characters_in_their_columns(
    line: str, place: tuple[int, int], shown: str, mark: str, tmp_path: Path
) -> None:
    """The mark is under the place in a terminal, and nothing in a file can move the cursor or turn the writing."""
    assert block(f"{line}\n", 1, *place, tmp_path) == [f"    1 | {shown}", f"      | {mark}"]


def test_block_of_a_long_line_shows_what_is_around_the_place(tmp_path: Path) -> None:
    """Of a line of a thousand letters a screen shows a part, with the mark in it."""
    shown, mark = block("a: " + "x" * 500 + "HERE" + "y" * 500 + "\n", 1, 504, 4, tmp_path)
    assert len(shown) < 120
    assert shown.endswith("yyy...")
    assert shown[mark.index("^") : mark.rindex("^") + 1] == "HERE"


def test_block_hides_secrets(tmp_path: Path) -> None:
    """The line of the file is shown without the token in it."""
    shown, _ = block("token: hf_abcdefghijklmnopqrstuvwxyz\n", 1, 1, 5, tmp_path)
    assert shown == "    1 | token: (secret)"


def test_block_without_a_line_to_show_is_the_plain_text(tmp_path: Path) -> None:
    """A file that is gone, a place that stands for a whole file, and a value from outside have no line."""
    (tmp_path / "spec.yaml").write_text("a: 1\n")
    whole = Problem(code=Code.MISSING_KEY, what="w", location=Location(str(tmp_path / "spec.yaml"), 1, 1))
    gone = problem(tmp_path / "gone.yaml", 1, 1, 1)
    outside = Problem(code=Code.BAD_SIZE, what="w", origin="--set reserve=x")
    for shown in problem_blocks([whole, gone, outside]):
        assert " | " not in shown


def test_line_is_one_line_with_a_place_first() -> None:
    """Editors read file, line and column; a problem from outside the file is at its start."""
    found = Problem(
        code=Code.UNKNOWN_KEY, what="unknown\nkey", path=("gpu",), fix="use x", location=Location("s.yaml", 3, 1)
    )
    assert problem_line(found, "s.yaml") == "s.yaml:3:1: error DM202: gpu: unknown key; use x"
    outside = Problem(code=Code.BAD_SIZE, what="no size", origin="--set reserve=x")
    assert problem_line(outside, "s.yaml") == "s.yaml:1:1: error DM208: --set reserve=x: no size"


def test_github_annotation_escapes_what_would_end_it() -> None:
    """Commas and colons in properties, line ends and percents anywhere, are written as GitHub asks."""
    found = Problem(code=Code.BAD_SIZE, what="50%\nof 'a::b'", location=Location("a,b:c.yaml", 2, 7))
    assert github_annotation(found, "x") == (
        "::error file=a%2Cb%3Ac.yaml,line=2,col=7,title=DM208 bad-size::50%25%0Aof 'a::b'"
    )


def test_sarif_log_has_rules_places_and_fixes() -> None:
    """A run with a rule for each code, and a result for each problem: where it is, and what mends it."""
    place = Location("dir/my spec.yaml", 4, 3, 11)
    edit = Edit(location=place, old="torch_dtype", new="dtype")
    renamed = Problem(
        code=Code.RENAMED_KEY, what="w", path=("pipeline", "torch_dtype"), fix="f", location=place, edits=(edit,)
    )
    outside = Problem(code=Code.BAD_SIZE, what="no size", origin="--set reserve=x")
    log = sarif_log([("dir/my spec.yaml", [renamed]), ("right.yaml", []), ("other.yaml", [renamed, outside])])
    (run,) = log["runs"]
    rules, results = run["tool"]["driver"]["rules"], run["results"]
    assert log["version"] == "2.1.0"
    assert [rule["id"] for rule in rules] == ["DM210", "DM208"]
    assert all(rule["fullDescription"]["text"] and rule["help"]["text"] for rule in rules)
    assert [rules[result["ruleIndex"]]["id"] for result in results] == ["DM210", "DM210", "DM208"]
    assert results[0]["locations"] == [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": "dir/my%20spec.yaml"},
                "region": {"startLine": 4, "startColumn": 3, "endColumn": 14},
            },
            "logicalLocations": [{"fullyQualifiedName": "pipeline.torch_dtype"}],
        }
    ]
    (change,) = results[0]["fixes"][0]["artifactChanges"]
    assert change["replacements"] == [
        {
            "deletedRegion": {"startLine": 4, "startColumn": 3, "endColumn": 14},
            "insertedContent": {"text": "dtype"},
        }
    ]
    assert results[2]["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "other.yaml"}
    assert results[2]["message"]["text"] == "--set reserve=x: no size"
    assert "fixes" not in results[2]


def test_sarif_log_of_right_files_is_a_run_without_results() -> None:
    """Code scanning takes an empty run as: all that was there is mended."""
    (run,) = sarif_log([("right.yaml", [])])["runs"]
    assert (run["results"], run["tool"]["driver"]["rules"]) == ([], [])
