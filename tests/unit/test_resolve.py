from __future__ import annotations

import copy
import enum
import itertools
import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

from dmconfig.errors import Code, ResolveError
from dmconfig.paths import Location
from dmconfig.resolve import Override, Resolved, override_from_text, overrides_from_mapping, resolve
from tests.conftest import document_from, only_problem

TEXT = """\
version: 1
pipeline:
  source: ./flux
device_map:
  unet: cuda:0
components:
  vae:
reserve: 2GiB
"""


def overrides(*assignments: str) -> list[Override]:
    return [override_from_text(assignment) for assignment in assignments]


def resolved(*assignments: str, text: str = TEXT) -> Resolved:
    return resolve(document_from(text), overrides(*assignments))


def refusal(*assignments: str, text: str = TEXT) -> ResolveError:
    with pytest.raises(ResolveError) as caught:
        resolved(*assignments, text=text)
    return caught.value


def test_resolve_without_overrides_is_the_document() -> None:
    """Nothing set, nothing changed."""
    document = document_from(TEXT)
    assert resolve(document).data == document.data


def test_resolve_sets_replaces_and_adds() -> None:
    """An override replaces a value, adds a key, and makes the mappings on the way."""
    data = resolved("reserve=1GiB", "pipeline.dtype=fp16", "call.guidance_scale=3.5").data
    assert data == {
        "version": 1,
        "pipeline": {"source": "./flux", "dtype": "fp16"},
        "device_map": {"unet": "cuda:0"},
        "components": {"vae": None},
        "reserve": "1GiB",
        "call": {"guidance_scale": 3.5},
    }


def test_resolve_below_an_empty_value_makes_a_mapping() -> None:
    """A key without a value is an empty mapping to what is set in it."""
    assert resolved("components.vae.dtype=fp32").data["components"] == {"vae": {"dtype": "fp32"}}
    assert resolved("version=1", text="").data == {"version": 1}


def test_resolve_does_not_change_the_document() -> None:
    """The document is as before, down to its nested mappings."""
    document = document_from(TEXT)
    before = copy.deepcopy(document.data)
    resolve(document, overrides("pipeline.source=./other", "device_map.unet=cpu", "components.vae.dtype=fp16"))
    assert document.data == before


def test_resolve_order_of_overrides_does_not_matter() -> None:
    """Every order gives the same data."""
    claims = overrides("reserve=1GiB", "pipeline.dtype=fp16", "device_map.vae=cpu", "components.vae.dtype=fp32")
    results = [resolve(document_from(TEXT), order).data for order in itertools.permutations(claims)]
    assert all(data == results[0] for data in results)


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        ("reserve=1GiB", "reserve=2GiB", "reserve"),
        ("reserve=1GiB", "reserve=1GiB", "reserve"),
        ("device_map=balanced", "device_map.unet=cuda:0", "device_map"),
        ("components.vae={dtype: fp16}", "components.vae.dtype=fp32", "components.vae"),
    ],
)
def test_resolve_conflict_in_either_order_names_both(first: str, second: str, path: str) -> None:
    """Two overrides of one value, or one inside the other's, contradict each other whichever comes first."""
    for assignments in ((first, second), (second, first)):
        conflict = next(p for p in refusal(*assignments).problems if p.code is Code.OVERRIDE_CONFLICT)
        assert conflict.what == f"--set {assignments[1]} and --set {assignments[0]} both set {path}"
        assert conflict.origin == f"--set {assignments[1]}"


def test_resolve_neighbours_do_not_conflict() -> None:
    """Keys that share a beginning of letters are different keys, as are siblings."""
    data = resolved("device_map.text_encoder=cuda:0", "device_map.text_encoder_2=cuda:1").data
    assert data["device_map"] == {"unet": "cuda:0", "text_encoder": "cuda:0", "text_encoder_2": "cuda:1"}


def test_resolve_below_a_scalar_is_refused_with_the_way_out() -> None:
    """Nothing can be set inside a word, a number or a list; the fix can be pasted."""
    problem = only_problem(refusal("device_map.unet=cuda:1", text="device_map: balanced\n"))
    assert (problem.code, problem.path) == (Code.BAD_OVERRIDE, ("device_map", "unet"))
    assert problem.what == "device_map is 'balanced', not a mapping, so device_map.unet cannot be set in it"
    assert problem.fix == "set the whole of it: device_map={unet: cuda:1, ...}"
    assert (problem.origin, problem.location) == ("--set device_map.unet=cuda:1", None)
    assert only_problem(refusal("a.b=1", text="a: [1, 2]\n")).code is Code.BAD_OVERRIDE
    assert only_problem(refusal("a.b=1", text="- x\n")).code is Code.BAD_OVERRIDE


def test_resolve_two_levels_below_a_scalar_has_a_true_fix() -> None:
    """What is to be pasted means what was meant."""
    problem = only_problem(refusal("pipeline.a.b=1", text="pipeline: x\n"))
    assert problem.fix == "set the whole of it: pipeline={a: {b: 1}, ...}"


def test_resolve_all_problems_come_together() -> None:
    """Conflicts and what cannot be set are told at once."""
    codes = [p.code for p in refusal("reserve=1", "reserve=2", "version.x=1").problems]
    assert sorted(codes) == [Code.BAD_OVERRIDE, Code.OVERRIDE_CONFLICT]


def test_place_of_the_file_or_of_the_override() -> None:
    """A value's place is its line; one set from outside has its override instead, also below it, and no line."""
    result = resolved("components.vae={dtype: fp16}", "reserve=1GiB")
    assert result.place(("pipeline", "source")) == (Location("spec.yaml", 3, 11), "")
    assert result.place(("pipeline", "source"), key=True) == (Location("spec.yaml", 3, 3), "")
    assert result.place(("reserve",)) == (None, "--set reserve=1GiB")
    assert result.place(("components", "vae", "dtype")) == (None, "--set components.vae={dtype: fp16}")
    assert result.place(("components",)) == (Location("spec.yaml", 7, 3), "")


def test_problem_carries_its_place() -> None:
    """A problem of an overridden value names the override, never a line of the file."""
    result = resolved("reserve=1GiB")
    problem = result.problem(Code.BAD_SIZE, ("reserve",), "no size", why="because", fix="mend it")
    assert (problem.origin, problem.location, problem.path) == ("--set reserve=1GiB", None, ("reserve",))
    assert (problem.what, problem.why, problem.fix) == ("no size", "because", "mend it")


def test_folder_of_file_and_of_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path in the file starts in the file's folder; one given from outside in the current folder."""
    monkeypatch.chdir(tmp_path)
    document = document_from(TEXT, folder=Path("/specs"))
    result = resolve(document, [*overrides("pipeline.source=./a"), *overrides_from_mapping({"offload_folder": "b"})])
    assert result.folder_of(("pipeline", "source")) == tmp_path
    assert result.folder_of(("offload_folder",)) == tmp_path
    assert result.folder_of(("components", "vae", "source")) == Path("/specs")


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("reserve=2GiB", ("reserve",), "2GiB"),
        (" reserve =2GiB", ("reserve",), "2GiB"),
        ("call.steps=20", ("call", "steps"), 20),
        ("call.prompt=a=b", ("call", "prompt"), "a=b"),
        ("call.prompt='off'", ("call", "prompt"), "off"),
        ("call.sizes=[1, 2]", ("call", "sizes"), [1, 2]),
        ("components.vae=null", ("components", "vae"), None),
        ("components.vae=", ("components", "vae"), None),
        ("device_map={unet: cuda:0}", ("device_map",), {"unet": "cuda:0"}),
        ("device_map.unet=cuda:0", ("device_map", "unet"), "cuda:0"),
        ("device_map.transformer.blocks.0=cuda:0", ("device_map", "transformer.blocks.0"), "cuda:0"),
        ("max_memory.cuda:0=80%", ("max_memory", "cuda:0"), "80%"),
        ("device_map=balanced", ("device_map",), "balanced"),
    ],
)
def test_override_from_text_key_and_yaml_value(assignment: str, path: tuple[str, ...], value: Any) -> None:
    """The first = ends the key; the value is YAML; below device_map the rest of the key is one module's path."""
    override = override_from_text(assignment)
    assert (override.path, override.value) == (path, value)
    assert (override.origin, override.folder) == (f"--set {assignment}", Path.cwd())


@pytest.mark.parametrize(
    ("assignment", "what"),
    [
        ("reserve", "'reserve' is not of the form key.path=value"),
        ("=1", "'=1' is not of the form key.path=value"),
        ("pipeline..dtype=1", "'pipeline..dtype=1' is not of the form key.path=value"),
        ("  =1", "'  =1' is not of the form key.path=value"),
        ("call.x=off", "off is a boolean to some YAML readers and text to others"),
        ("call.x=0123", "0123 is a number to some YAML readers and text to others"),
        ("call.x=a: b: c", "mapping values are not allowed in this context"),
        ("call.x={a: 1, a: 2}", "key 'a' stands here a second time; first at line 1, column 2"),
    ],
)
def test_override_from_text_refused_at_its_flag(assignment: str, what: str) -> None:
    """What is no assignment, or no YAML we accept, is shown as the user wrote it."""
    with pytest.raises(ResolveError) as caught:
        override_from_text(assignment, "--call")
    problem = only_problem(caught.value)
    assert (problem.code, problem.what) == (Code.BAD_OVERRIDE, what)
    assert (problem.origin, problem.location) == (f"--call {assignment}", None)


class Choice(enum.Enum):
    BALANCED = "balanced"


class Level(enum.IntEnum):
    LOW = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (0, 0),
        (2.5, 2.5),
        ("off", "off"),  # text from Python is text: nothing to quote
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("cpu"), "cpu"),
        (Choice.BALANCED, "balanced"),
        (Level.LOW, 3),
        (Path("models/flux"), "./models/flux"),  # a path is a folder, never a hub id
        (Path("./models"), "./models"),
        (Path("../models"), "../models"),
        (Path("/models"), "/models"),
        (Path("~/models"), "~/models"),
        (PurePosixPath("a/b"), "./a/b"),
        ((1, 2), [1, 2]),
        ([torch.float32, None], ["float32", None]),
        ({"dtype": torch.float16, "source": Path("a")}, {"dtype": "float16", "source": "./a"}),
        ({0: "20GiB", torch.device("cpu"): 1}, {"0": "20GiB", "cpu": 1}),
        ({}, {}),
    ],
)
def test_overrides_from_mapping_python_values_become_plain(value: Any, plain: Any) -> None:
    """Dtypes, devices, enums, paths, tuples and mappings of them are written as in the file."""
    (override,) = overrides_from_mapping({"call.x": value})
    assert override.value == plain
    assert type(override.value) is type(plain)
    assert (override.path, override.origin) == (("call", "x"), "overrides['call.x']")


def test_overrides_from_mapping_path_like_object() -> None:
    """Whatever has a file system path is one."""

    class Entry(os.PathLike[str]):
        def __fspath__(self) -> str:
            return "models/flux"

    (override,) = overrides_from_mapping({"pipeline.source": Entry()})
    assert override.value == "./models/flux"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (b"x", "builtins.bytes"),
        ({"a": [1, object()]}, "builtins.object"),
        (3j, "builtins.complex"),
        (torch.zeros(2), "torch.Tensor"),
    ],
)
def test_overrides_from_mapping_other_types_are_refused_by_name(value: Any, kind: str) -> None:
    """A value no file can hold is refused, also deep within; its type is named."""
    with pytest.raises(ResolveError) as caught:
        overrides_from_mapping({"call.x": value, "reserve": 1})
    problem = only_problem(caught.value)
    assert problem.what == f"a value of type {kind} cannot be written in a spec"
    assert problem.origin == "overrides['call.x']"


def test_overrides_from_mapping_all_refusals_at_once() -> None:
    """Two bad values are two problems."""
    with pytest.raises(ResolveError) as caught:
        overrides_from_mapping({"a": object(), "b": 1, "c": {1}})
    assert [problem.origin for problem in caught.value.problems] == ["overrides['a']", "overrides['c']"]


def test_overrides_from_mapping_does_not_keep_the_callers_values() -> None:
    """Lists and mappings are copied: changing them later changes nothing."""
    given: dict[str, Any] = {"call": {"sizes": [1, 2]}}
    (override,) = overrides_from_mapping(given)
    given["call"]["sizes"].append(3)
    assert override.value == {"sizes": [1, 2]}


def test_overrides_from_mapping_keys_that_become_one_are_refused() -> None:
    """0 and "0" are one key in a file, so giving both contradicts itself."""
    with pytest.raises(ResolveError):
        overrides_from_mapping({"max_memory": {0: "1GiB", "0": "2GiB"}})
