from __future__ import annotations

import re

import pytest

from dmconfig import errors
from dmconfig.errors import Code, DMConfigError, PlanError, Problem, SpecError, nearest, render_problem
from dmconfig.paths import Location

FULL = Problem(
    code=Code.UNKNOWN_COMPONENT,
    what="'text_encodr' is not a component of FluxPipeline",
    path=("components", "text_encodr"),
    why="its components are: text_encoder, vae",
    fix="did you mean 'text_encoder'?",
    location=Location("flux.yaml", 14, 5),
)


def test_render_problem_full_is_a_block() -> None:
    """Place and code first, then path, what, why and fix, one line each."""
    assert render_problem(FULL) == (
        "error[DM302 unknown-component]: flux.yaml:14:5\n"
        "  at   components.text_encodr\n"
        "  what 'text_encodr' is not a component of FluxPipeline\n"
        "  why  its components are: text_encoder, vae\n"
        "  fix  did you mean 'text_encoder'?"
    )


def test_render_problem_leaves_out_what_it_does_not_know() -> None:
    """A problem of what alone is two lines; an origin stands where a place would."""
    assert render_problem(Problem(code=Code.CALL_FAILED, what="it broke")) == (
        "error[DM603 call-failed]\n  what it broke"
    )
    from_outside = Problem(code=Code.BAD_SIZE, what="no size", path=("reserve",), origin="--set reserve=x")
    assert render_problem(from_outside) == ("error[DM208 bad-size]: --set reserve=x\n  at   reserve\n  what no size")


def test_error_holds_all_problems_in_file_order() -> None:
    """Problems are sorted by line and column as numbers; those without a place come first; the text has them all."""

    def at(line: int, column: int) -> Problem:
        return Problem(code=Code.BAD_VALUE, what=f"{line}:{column}", location=Location("f", line, column))

    nowhere = Problem(code=Code.BAD_VALUE, what="nowhere")
    error = SpecError([at(10, 1), at(9, 12), at(9, 2), nowhere])
    assert [problem.what for problem in error.problems] == ["nowhere", "9:2", "9:12", "10:1"]
    assert str(error) == "\n".join(render_problem(problem) for problem in error.problems)


def test_codes_are_unique_and_have_words() -> None:
    """No number is used twice, and the slug is the name in words."""
    assert len({code.value for code in Code}) == len(Code.__members__)
    assert all(re.fullmatch(r"DM\d{3}", code.value) for code in Code)
    assert Code.UNKNOWN_KEY.slug == "unknown-key"
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code.slug) for code in Code)


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("DocumentError", 2),
        ("ResolveError", 2),
        ("SpecError", 2),
        ("SourceError", 2),
        ("MachineError", 2),
        ("PlanError", 3),
        ("BuildError", 4),
        ("DispatchError", 4),
        ("RunError", 4),
    ],
)
def test_exit_codes_are_those_of_the_table(name: str, exit_code: int) -> None:
    """Input 2, plan 3, build, dispatch and call 4; the module's docstring says the same."""
    kind = getattr(errors, name)
    assert issubclass(kind, DMConfigError)
    assert kind.exit_code == exit_code
    assert re.search(rf"{name} +{exit_code} ", errors.__doc__ or "")


def test_plan_error_does_not_change_its_base() -> None:
    """An exit code of its own is of the class alone."""
    assert (PlanError([]).exit_code, DMConfigError([]).exit_code) == (3, 2)


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("text_encodr", ["text_encoder", "text_encoder_2", "vae"], "text_encoder"),
        ("VAE", ["vae", "unet"], "vae"),
        ("eulerdiscretescheduler", ["EulerDiscreteScheduler"], "EulerDiscreteScheduler"),
        ("qqq", ["vae", "unet"], None),
        ("", ["vae"], None),
        ("vae", [], None),
    ],
)
def test_nearest_is_the_closest_word_or_none(word: str, known: list[str], meant: str | None) -> None:
    """Spelling distance finds the word meant, in its own case; nothing close is nothing."""
    assert nearest(word, known) == meant
