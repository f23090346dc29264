"""Files as layers: what extends what, profiles, overlays, the one precedence, and where each value is from."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dmconfig.checked import resolve_file
from dmconfig.document import parse_scalar
from dmconfig.errors import Code, DMConfigError, ResolveError
from dmconfig.layers import MAX_FILES
from dmconfig.paths import ConfigPath, Location
from dmconfig.resolve import Resolved, override_from_text, overrides_from_mapping
from dmconfig.writing import as_yaml
from tests.conftest import only_problem

Write = Any


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Give a function that writes files into a folder, which is the current one, and returns the first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DMCONFIG_PROFILE", raising=False)

    def files(**texts: str) -> Path:
        for name, text in texts.items():
            file = Path(f"{name.replace('__', '/')}.yaml")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return Path(f"{next(iter(texts))}.yaml")

    return files


def data(file: Path, *overlays: str, profile: str | None = None) -> Any:
    """Return what a file and overlays make."""
    return resolve_file(file, overlays=overlays, profile=profile).data


def refusal(file: Path, *overlays: str, profile: str | None = None) -> DMConfigError:
    with pytest.raises(DMConfigError) as caught:
        resolve_file(file, overlays=overlays, profile=profile)
    return caught.value


def test_extends_one_file_or_several(write: Write) -> None:
    """What a file does not say is as in the files that it extends, and theirs; none of the words gets through."""
    file = write(
        pipe="extends: [conf/low.yaml, conf/gpu.yaml]\na: {x: 3}\n",
        conf__low="extends: ../base.yaml\nlow: 1\na: {w: 2}\n",
        conf__gpu="extends: ../base.yaml\ngpu: 1\n",
        base="version: 1\na: {x: 1, w: 1, z: 1}\n",
    )
    assert data(file) == {"version": 1, "low": 1, "gpu": 1, "a": {"x": 3, "w": 2, "z": 1}}


def test_extends_order_does_not_matter_and_disagreement_names_both(write: Write) -> None:
    """Two files that are extended by the same one have to agree, unless it decides."""
    for order in ("[one.yaml, two.yaml]", "[two.yaml, one.yaml]"):
        file = write(pipe=f"extends: {order}\n", one="a: 1\nb: 1\n", two="b: 2\n")
        problem = only_problem(refusal(file))
        assert (problem.code, problem.what) == (Code.LAYER_CONFLICT, "b is 1 in one.yaml:2:4 and 2 in two.yaml:1:4")
        assert problem.fix == "decide in the file that extends both"
        assert data(write(pipe=f"extends: {order}\nb: 3\n")) == {"a": 1, "b": 3}


def test_extends_a_circle_is_told_with_its_trail(write: Write) -> None:
    """The way round is told with the line of each step."""
    file = write(pipe="extends: a.yaml\n", a="version: 1\nextends: sub/b.yaml\n", sub__b="extends: [../a.yaml]\n")
    problem = only_problem(refusal(file))
    assert (problem.code, problem.what) == (Code.EXTENDS_CYCLE, "a.yaml extends itself by way of sub/b.yaml")
    assert problem.why == "a.yaml:2:10 extends sub/b.yaml; sub/b.yaml:1:11 extends a.yaml"
    assert problem.location == Location("sub/b.yaml", 1, 11)


def test_extends_itself(write: Write) -> None:
    """The shortest circle, also through another name of the file."""
    file = write(pipe="extends: ./pipe.yaml\n")
    assert only_problem(refusal(file)).what == "pipe.yaml extends itself"
    Path("link.yaml").symlink_to("pipe.yaml")
    file = write(pipe="extends: link.yaml\n")
    assert only_problem(refusal(file)).code is Code.EXTENDS_CYCLE


@pytest.mark.parametrize(
    ("text", "code", "what", "fix"),
    [
        ("extends: bsae.yaml", Code.FILE_UNREADABLE, "there is no file bsae.yaml", "did you mean 'base.yaml'?"),
        (
            "extends: x/y.yaml",
            Code.FILE_UNREADABLE,
            "there is no file x/y.yaml",
            "check the path; it starts in the folder of pipe.yaml",
        ),
        ("extends: 3", Code.BAD_EXTENDS, "extends takes the name of a file, or a list of them", "write extends: "),
        ("extends: []", Code.BAD_EXTENDS, "extends takes the name of a file, or a list of them", "write extends: "),
        ("extends:", Code.BAD_EXTENDS, "extends takes the name of a file, or a list of them", "write extends: "),
        ("extends: {a: b}", Code.BAD_EXTENDS, "extends takes the name of a file, or a list of them", "write extends: "),
        ("extends: ${NO_SUCH}", Code.UNSET_VARIABLE, "the variable NO_SUCH is not set", "set NO_SUCH"),
        ("profiles: [prod]", Code.BAD_PROFILES, "profiles is a mapping from name to keys of this file", "write"),
        ("profiles: {prod: fast}", Code.BAD_PROFILES, "the profile 'prod' is not a mapping", "write the keys"),
        (
            "profiles: {prod: {version: 1}}",
            Code.BAD_PROFILES,
            "version is for the whole file, not for a profile",
            "move it out of here",
        ),
        (
            "profiles: {prod: {extends: base.yaml}}",
            Code.BAD_PROFILES,
            "extends is for the whole file, not for a profile",
            "move it out of here",
        ),
    ],
)
def test_extends_and_profiles_that_are_none_are_refused_in_place(
    write: Write, text: str, code: Code, what: str, fix: str
) -> None:
    """Whatever is wrong with these keys is told at their line."""
    problem = only_problem(refusal(write(pipe=f"version: 1\n{text}\n", base="a: 1\n")))
    assert (problem.code, problem.what) == (code, what)
    assert problem.fix.startswith(fix)
    assert problem.location is not None
    assert (problem.location.file, problem.location.line) == ("pipe.yaml", 2)


def test_extends_of_a_broken_file_tells_its_own_lines(write: Write) -> None:
    """All problems of all files come at once, each once, though two extend the broken one."""
    file = write(
        pipe="extends: [one.yaml, two.yaml, none.yaml]\n",
        one="extends: broken.yaml\n",
        two="extends: broken.yaml\n",
        broken="a: 1\na: 2\nb: off\n",
    )
    told = [(p.code, str(p.location)) for p in refusal(file).problems]
    assert told == [
        (Code.DUPLICATE_KEY, "broken.yaml:2:1"),
        (Code.AMBIGUOUS_SCALAR, "broken.yaml:3:4"),
        (Code.FILE_UNREADABLE, "pipe.yaml:1:31"),
    ]


def test_extends_is_bounded(write: Write) -> None:
    """A long chain is an error of the file, not of Python's stack."""
    for index in range(MAX_FILES + 5):
        write(**{f"f{index}": f"extends: f{index + 1}.yaml\n"})
    assert only_problem(refusal(Path("f0.yaml"))).code is Code.TOO_LARGE


def test_extends_files_of_another_version_are_refused(write: Write) -> None:
    """The same key may mean something else in another version, so the version is not a value to override."""
    problem = only_problem(refusal(write(pipe="extends: base.yaml\nversion: 1\n", base="version: 0\n")))
    assert (problem.code, problem.path) == (Code.LAYER_CONFLICT, ("version",))


@pytest.mark.parametrize("base", ["version: 2\nprofiles: 3\n", "version: 2\na: off\n"], ids=["shape", "words"])
def test_extends_a_file_of_a_newer_version_says_so_and_only_that(base: str, write: Write) -> None:
    """Its other keys, and words, may well be right there."""
    problem = only_problem(refusal(write(pipe="extends: [base.yaml, none.yaml]\nversion: 1\n", base=base)))
    assert (problem.code, problem.what) == (
        Code.UNSUPPORTED_VERSION, "this file is of schema version 2; this dmconfig reads version 1",
    )  # fmt: skip
    assert str(problem.location).endswith("base.yaml:1:10")


def test_extends_a_missing_file_is_told_the_one_that_is_meant(write: Write) -> None:
    """As it is written there; never the file that says so, nor one that has only the ending in common."""
    file = write(pipe="extends: ./pip.yaml\n", tag="")
    assert only_problem(refusal(file)).fix.startswith("check the path")
    assert only_problem(refusal(write(pipe="extends: ./bse.yaml\n", base=""))).fix == "did you mean './base.yaml'?"


def test_profile_is_over_the_files_and_merges_with_what_they_extend(write: Write) -> None:
    """A profile is over all files, also over the one that extends the file it stands in."""
    file = write(
        pipe="extends: base.yaml\na: 2\nprofiles: {prod: {b: 2}}\n",
        base="a: 1\nb: 1\nc: 1\nprofiles: {prod: {a: 9, b: 9}, dev: {c: 9}, empty: }\n",
    )
    assert data(file) == {"a": 2, "b": 1, "c": 1}
    assert data(file, profile="prod") == {"a": 9, "b": 2, "c": 1}
    assert data(file, profile="dev") == {"a": 2, "b": 1, "c": 9}
    assert data(file, profile="empty") == data(file)
    assert resolve_file(file).profiles == ("dev", "empty", "prod")


def test_profile_of_the_environment_gives_way_to_a_given_one(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """DMCONFIG_PROFILE chooses where nothing else does; empty, it chooses none."""
    file = write(pipe="a: 1\nprofiles: {prod: {a: 2}, dev: {a: 3}}\n")
    monkeypatch.setenv("DMCONFIG_PROFILE", "prod")
    assert data(file) == {"a": 2}
    assert data(file, profile="dev") == {"a": 3}
    monkeypatch.setenv("DMCONFIG_PROFILE", "")
    assert data(file) == {"a": 1}


@pytest.mark.parametrize(
    ("profile", "why", "fix"),
    [
        ("pord", "the profiles are: dev, prod", "did you mean 'prod'?"),
        ("x", "the profiles are: dev, prod", "add it under profiles, or choose none"),
    ],
)
def test_profile_that_is_unknown_is_told_with_the_known_ones(write: Write, profile: str, why: str, fix: str) -> None:
    """Nobody gets another placement than the one they named."""
    file = write(pipe="profiles: {prod: {a: 2}}\n", over="profiles: {dev: {a: 3}}\n")
    problem = only_problem(refusal(file, "over.yaml", profile=profile))
    assert (problem.code, problem.what) == (Code.UNKNOWN_PROFILE, f"there is no profile {profile!r}")
    assert (problem.why, problem.fix, problem.origin) == (why, fix, f"profile {profile}")


def test_profile_that_is_unknown_in_the_environment_is_told_by_its_variable(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who set it is told."""
    monkeypatch.setenv("DMCONFIG_PROFILE", "prod")
    problem = only_problem(refusal(write(pipe="a: 1\n")))
    assert (problem.why, problem.origin) == ("no file has profiles", "DMCONFIG_PROFILE=prod")


def test_overlays_are_over_the_file_in_any_order_and_disagreement_names_both(write: Write) -> None:
    """Overlays do not win by coming last."""
    file = write(pipe="a: 1\nb: 1\n", one="a: 2\n", two="c: 3\n", three="a: 4\n")
    assert data(file, "one.yaml", "two.yaml") == data(file, "two.yaml", "one.yaml") == {"a": 2, "b": 1, "c": 3}
    told = {str(refusal(file, *order)) for order in itertools.permutations(["one.yaml", "two.yaml", "three.yaml"])}
    assert len(told) == 1
    assert "a is 2 in one.yaml:1:4 and 4 in three.yaml:1:4" in told.pop()


def test_one_overlay_need_not_be_in_a_list(write: Write) -> None:
    """A name is one file, not a list of letters."""
    file = write(pipe="a: 1\n", over="a: 2\n")
    assert resolve_file(file, overlays="over.yaml").data == resolve_file(file, overlays=Path("over.yaml")).data


def test_missing_overlay_and_missing_file_are_told_together(write: Write) -> None:
    """Both at once."""
    assert [p.origin for p in refusal(Path("no.yaml"), "nor.yaml").problems] == ["no.yaml", "nor.yaml"]


def test_the_precedence_is_as_written(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the layers is over all before it: taken away from the top, the next one shows."""
    write(
        base="a: base\n",
        pipe="extends: base.yaml\na: file\nprofiles: {p: {a: profile}, none: {}}\n",
        under="a: under the overlay\n",
        over="extends: under.yaml\na: overlay\nprofiles: {p: {a: profile of the overlay}}\n",
        bare="extends: base.yaml\nprofiles: {p: {a: profile}}\n",
        thin="extends: under.yaml\n",
        slim="extends: under.yaml\na: overlay\n",
    )
    override = [override_from_text("a=override")]

    def a(file: str, *overlays: str, profile: str | None = None, overrides: Any = ()) -> Any:
        return resolve_file(f"{file}.yaml", overrides, overlays=[f"{o}.yaml" for o in overlays], profile=profile).data[
            "a"
        ]

    assert a("bare") == "base"
    assert a("pipe") == "file"
    assert a("pipe", profile="p") == "profile"
    assert a("pipe", "thin", profile="p") == "under the overlay"
    assert a("pipe", "slim", profile="p") == "overlay"
    assert a("pipe", "over", profile="p") == "profile of the overlay"
    assert a("pipe", "over", profile="p", overrides=override) == "override"


def test_overrides_set_the_whole_of_a_value(write: Write) -> None:
    """An override is the value of its key: a mapping in one is not merged, a list needs no tag."""
    file = write(pipe="a: {x: 1}\nb: [1]\n")
    claims = [override_from_text("a={z: 2}"), *overrides_from_mapping({"b": [2]})]
    assert resolve_file(file, claims).data == {"a": {"z": 2}, "b": [2]}


@pytest.mark.parametrize("key", ["extends", "profiles.prod.a"])
def test_overrides_cannot_reach_the_keys_of_files(write: Write, key: str) -> None:
    """They are read before overrides are."""
    with pytest.raises(ResolveError) as caught:
        resolve_file(write(pipe="a: 1\n"), [override_from_text(f"{key}=x")])
    assert only_problem(caught.value).what == f"{key.partition('.')[0]} is read from files only"


def test_overrides_of_python_are_not_looked_through_for_variables(write: Write) -> None:
    """A value from a program is that value."""
    file = write(pipe="a: 1\n")
    assert resolve_file(file, overrides_from_mapping({"a": "${HOME} $$"})).data == {"a": "${HOME} $$"}


def test_folder_of_each_path_is_that_of_the_file_that_says_it(write: Write, tmp_path: Path) -> None:
    """Relative paths mean what they mean where they stand, also in a list from two files."""
    file = write(
        pipe="extends: conf/base.yaml\nb: ./b\n",
        conf__base="a: ./a\nb: ./b\nc: [./x]\nprofiles: {p: {d: ./d}}\n",
        boxes__gpu="c: !append [./y]\n",
    )
    claims = [override_from_text("e=./e")]
    resolved = resolve_file(file, claims, overlays=["boxes/gpu.yaml"], profile="p")
    folders = {path: str(resolved.folder_of(path).relative_to(tmp_path)) for path in resolved.values if path}
    assert folders == {
        ("a",): "conf", ("b",): ".", ("c",): "boxes", ("c", 0): "conf", ("c", 1): "boxes", ("d",): "conf", ("e",): ".",
    }  # fmt: skip


def test_problem_of_a_merged_value_names_the_place_that_set_it(write: Write) -> None:
    """Whichever file said the wrong thing is the one to mend."""
    from dmconfig.errors import SpecError
    from dmconfig.spec import validate_spec

    file = write(
        pipe="extends: base.yaml\nversion: 1\ndevice_map: {unet: cuda:0}\n",
        base="pipeline: {source: ./x, dtype: fp17}\n",
        over="device_map: {vae: cuda;1}\nlow_memry: none\n",
    )
    with pytest.raises(SpecError) as caught:
        validate_spec(resolve_file(file, [override_from_text("reserve=much")], overlays=["over.yaml"]))
    told = [(str(p.location or p.origin), ".".join(map(str, p.path))) for p in caught.value.problems]
    assert told == [
        ("--set reserve=much", "reserve"),
        ("base.yaml:1:32", "pipeline.dtype"),
        ("over.yaml:1:19", "device_map.vae"),
        ("over.yaml:2:1", "low_memry"),
    ]


# ---------------------------------------------------------------- random files, and who said what


def random_data(rng: random.Random, name: str, depth: int = 0) -> dict[str, Any]:
    """Return a random mapping whose words are all different, and say which file they are of."""
    return {
        key: random_data(rng, name, depth + 1) if depth < 2 and rng.random() < 0.5 else f"{name}-{rng.randrange(10**9)}"
        for key in rng.sample("abcd", rng.randint(1, 4))
    }


def laid_over(below: Any, above: Any) -> Any:
    """The oracle: a mapping over a mapping key by key, else what is above."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: laid_over(below.get(key), item) for key, item in above.items()}


def leaves(value: Any, path: ConfigPath = ()) -> Mapping[ConfigPath, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {at: leaf for key, item in value.items() for at, leaf in leaves(item, (*path, key)).items()}


def check_places(resolved: Resolved, set_: Mapping[str, str]) -> None:
    """Hold every place against the text of its file: the line says this key and this value."""
    for path, value in leaves(resolved.data).items():
        place = resolved.origin(path)
        if place.location is None:
            assert set_[".".join(map(str, path))] == value
            continue
        line = Path(place.location.file).read_text(encoding="utf-8").splitlines()[place.location.line - 1]
        key, _, said = line.partition(":")
        assert (key.strip(), parse_scalar(said.strip())) == (path[-1], value)
        assert line[place.location.column - 1 :] == value


@pytest.mark.parametrize("seed", range(60))
def test_layers_in_one_line_are_the_same_however_they_are_stacked(write: Write, seed: int) -> None:
    """One file extending the next, overlays that extend, or both: the same data, and the right line for every word."""
    rng = random.Random(seed)  # noqa: S311 - toy files
    one, two, three = (random_data(rng, name) for name in ("one", "two", "three"))
    profile = random_data(rng, "profile")
    expected = laid_over(laid_over(one, two), three)
    write(one=as_yaml(one), two=as_yaml(two), three=as_yaml(three))
    write(two_on_one=f"extends: one.yaml\n{as_yaml(two)}", three_on_two=f"extends: two.yaml\n{as_yaml(three)}")
    write(three_on_both=f"extends: two_on_one.yaml\n{as_yaml(three)}")
    write(alone=as_yaml({**three, "profiles": {"p": profile}}))
    stacked = [
        resolve_file("three_on_both.yaml"),
        resolve_file("two_on_one.yaml", overlays=["three.yaml"]),
        resolve_file("one.yaml", overlays=["three_on_two.yaml"]),
    ]
    for resolved in stacked:
        assert resolved.data == expected
        check_places(resolved, {})
    set_ = {".".join(map(str, path)): "set" for path in rng.sample(sorted(leaves(profile)), 1)}
    with_all = resolve_file("one.yaml", overrides_from_mapping(set_), overlays=["alone.yaml"], profile="p")
    expected = laid_over(laid_over(one, three), profile)
    for key, value in set_.items():
        *parents, last = key.split(".")
        inside = expected
        for parent in parents:
            inside = inside[parent]
        inside[last] = value
    assert with_all.data == expected
    check_places(with_all, set_)
