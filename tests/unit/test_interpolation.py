"""Variables in text: the grammar, what is refused, and the types that come out of a file."""

from __future__ import annotations

from typing import Any

import pytest

from dmconfig.errors import Code, ResolveError
from dmconfig.interpolation import InterpolationError, escape, expand
from dmconfig.paths import Location
from dmconfig.resolve import resolve
from tests.conftest import document_from, only_problem

ENVIRON = {"NAME": "fox", "EMPTY": "", "STEPS": "20", "YES": "true", "NO": "no", "DOLLAR": "${NAME}", "LONG": "1" * 65}


@pytest.mark.parametrize(
    ("text", "expanded", "variables"),
    [
        ("plain", "plain", ()),
        ("${NAME}", "fox", ("NAME",)),
        ("a ${NAME} and a ${NAME}", "a fox and a fox", ("NAME",)),
        ("${NAME:-dog}", "fox", ("NAME",)),
        ("${UNSET:-dog}", "dog", ()),
        ("${EMPTY:-dog}", "dog", ()),
        ("${UNSET:-}", "", ()),
        ("${UNSET:-a ${NAME}}!", "a fox!", ("NAME",)),
        ("${UNSET:-${EMPTY:-${STEPS}}}", "20", ("STEPS",)),
        ("${NAME:-${UNSET}}", "fox", ("NAME",)),  # a default that is not needed may need what is not there
        ("${NAME:-${UNSET:?no}}", "fox", ("NAME",)),
        ("${UNSET:-a:b/c}", "a:b/c", ()),
        ("${NAME:?say who}", "fox", ("NAME",)),
        ("$$", "$", ()),
        ("$${NAME}", "${NAME}", ()),
        ("$$$${NAME}", "$${NAME}", ()),
        ("$$${NAME}", "$fox", ("NAME",)),
        ("${UNSET:-$$5}", "$5", ()),
        ("costs $5, or 5$", "costs $5, or 5$", ()),  # no name follows
        ("} ${NAME} }", "} fox }", ("NAME",)),
        ("${DOLLAR}", "${NAME}", ("DOLLAR",)),  # a value is never looked through again
    ],
)
def test_expand_forms(text: str, expanded: str, variables: tuple[str, ...]) -> None:
    """Every form gives its text, and the variables that were used."""
    expansion = expand(text, ENVIRON)
    assert (expansion.text, expansion.variables) == (expanded, variables)


@pytest.mark.parametrize(
    ("text", "what", "why", "fix"),
    [
        ("${UNSET}", "the variable UNSET is not set", "", "set UNSET, or write ${UNSET:-default}"),
        ("${EMPTY}", "the variable EMPTY is empty", "", "set EMPTY, or write ${EMPTY:-default}"),
        (
            "${UNSET:?the root of the models}",
            "the variable UNSET is not set",
            "the root of the models",
            "set UNSET, or",
        ),
        ("${UNSET:-${EMPTY}}", "the variable EMPTY is empty", "", "set EMPTY, or"),
        ("${NAME", "a ${ is never closed", "", "write ${NAME}, ${NAME:-default} or ${NAME:?message}"),
        ("${NAME:-x", "a ${ is never closed", "", "write"),
        ("${NAME:?x", "a ${ is never closed", "", "write"),
        ("${NAME-x}", "${NAME is followed by '-x'", "", "write"),
        ("${NAME:+x}", "${NAME is followed by ':+'", "", "write"),
        ("${a.b}", "${a is followed by '.b'", "", "write"),
        ("${}", "${ is not followed by the name of a variable", "", "write"),
        ("${1}", "${ is not followed by the name of a variable", "", "write"),
        (
            "a $NAME",
            "$NAME is neither a variable nor text",
            "",
            "write ${NAME} for the variable, or $$NAME for the text",
        ),
    ],
)
def test_expand_refuses(text: str, what: str, why: str, fix: str) -> None:
    """What is not set, and what is no form of ours, is told with what to write."""
    with pytest.raises(InterpolationError) as caught:
        expand(text, ENVIRON)
    assert (caught.value.what, caught.value.why) == (what, why)
    assert caught.value.fix.startswith(fix)


def test_expand_takes_long_text_in_its_stride() -> None:
    """A megabyte of dollars or of nested defaults is no way to make it slow, and none to break it."""
    assert expand("$$" * 100_000, {}).text == "$" * 100_000
    assert expand("${A:-" * 200 + "x" + "}" * 200, {}).text == "x"


@pytest.mark.parametrize("text", ["", "$", "$$", "${NAME}", "$NAME", "a $5 b", "}{$", "${NAME:-$$}"])
def test_escape_is_undone_by_expand(text: str) -> None:
    """What is escaped comes back as it was."""
    assert expand(escape(text), ENVIRON).text == text


def data_of(text: str) -> Any:
    """Return what a file with one key ``a`` makes of it."""
    return resolve(document_from(text), environ=ENVIRON).data["a"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: ${STEPS}", 20),
        ("a: ${STEPS}.5", 20.5),
        ("a: '${STEPS}'", "20"),
        ('a: "${STEPS}"', "20"),
        ("a: |\n  ${STEPS}\n", "20\n"),
        ("a: ${YES}", True),
        ("a: ${UNSET:-0.5}", 0.5),
        ("a: ${UNSET:-}", None),
        ("a: '${UNSET:-}'", ""),
        ("a: ${UNSET:-2}GiB", "2GiB"),
        ("a: ${NAME}", "fox"),
        ("a: [1, '${NAME}']", [1, "fox"]),
        ("a: $$5", "$5"),
    ],
)
def test_resolve_variables_are_typed_as_if_written_there(text: str, value: Any) -> None:
    """Unquoted, the result is read like a scalar of the file; quoted, it is text."""
    found = data_of(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("variable", ["NO", "LONG"])
def test_resolve_a_variable_that_readers_would_take_differently_is_refused(variable: str) -> None:
    """What would be refused if written in the file is refused from a variable too, at the place that uses it."""
    with pytest.raises(ResolveError) as caught:
        resolve(document_from(f"a: ${{{variable}}}\n"), environ=ENVIRON)
    problem = only_problem(caught.value)
    assert (problem.path, problem.location) == (("a",), Location("spec.yaml", 1, 4))
    assert problem.why == f"it comes from ${{{variable}}}"
    assert problem.fix == f"quote it if text is meant: '${{{variable}}}'"


def test_resolve_names_the_key_and_the_variable_of_every_failure() -> None:
    """Each failed variable is told at its key and line, all at once."""
    with pytest.raises(ResolveError) as caught:
        resolve(document_from("a: ${UNSET}\nb:\n  c: ['${NOT_HERE:?the root}']\n"), environ=ENVIRON)
    told = [(p.code, p.path, p.what, p.why, p.location.line if p.location else 0) for p in caught.value.problems]
    assert told == [
        (Code.UNSET_VARIABLE, ("a",), "the variable UNSET is not set", "", 1),
        (Code.UNSET_VARIABLE, ("b", "c", 0), "the variable NOT_HERE is not set", "the root", 3),
    ]


def test_resolve_keys_are_taken_as_they_are() -> None:
    """A variable in a key would be ignored, so it is refused."""
    with pytest.raises(ResolveError) as caught:
        resolve(document_from('"a${NAME}": 1\n'), environ=ENVIRON)
    assert only_problem(caught.value).code is Code.BAD_INTERPOLATION


def test_resolve_what_nothing_uses_need_not_be_set() -> None:
    """A value that a stronger layer covers is not looked at."""
    over = document_from("a: 1\n", name="over.yaml")
    assert resolve(document_from("a: ${UNSET}\n"), overlays=[over], environ={}).data == {"a": 1}
