"""Layers merged: against an oracle that applies them one after the other, and in any order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dmconfig.errors import Code, Problem, ResolveError
from dmconfig.merging import Layer, Mode, Node, Stage, merge, tree_from, tree_of
from dmconfig.paths import ConfigPath, Origin
from tests.conftest import document_from, only_problem

KEYS = "abc"


def layer(text: str, stage: Stage = Stage.FILES, name: str = "one.yaml", extends: Sequence[str] = ()) -> Layer:
    """Return a layer of YAML."""
    from dmconfig.document import parse_document

    document = parse_document(text, name=name, folder=Path("/specs"), tagged=True)
    return Layer(stage=stage, name=name, tree=tree_of(document), extends=frozenset(extends))


def over(below: str, above: str) -> Any:
    """Return what two files make, of which the second extends the first."""
    return merge([layer(below), layer(above, name="two.yaml", extends=["one.yaml"])]).plain


def problem_over(below: str, above: str) -> Problem:
    with pytest.raises(ResolveError) as caught:
        over(below, above)
    return only_problem(caught.value)


@pytest.mark.parametrize(
    ("below", "above", "merged"),
    [
        ("a: 1", "a: 2", {"a": 2}),
        ("a: 1", "b: 2", {"a": 1, "b": 2}),
        ("a: {b: 1, c: 2}", "a: {c: 3}", {"a": {"b": 1, "c": 3}}),
        ("a: {b: 1, c: 2}", "a: !replace {c: 3}", {"a": {"c": 3}}),
        ("a: {b: {c: 1}, d: 1}", "a: {b: !replace {}}", {"a": {"b": {}, "d": 1}}),
        ("a: {b: 1}", "a: word", {"a": "word"}),
        ("a: {b: 1}", "a: null", {"a": None}),  # nothing is a value; it does not mean "as below"
        ("a: word", "a: {b: 1}", {"a": {"b": 1}}),
        ("a:", "a: {b: 1}", {"a": {"b": 1}}),
        ("a: {b: 1}", "a: {}", {"a": {"b": 1}}),
        ("a: [1, 2]", "a: !append [3]", {"a": [1, 2, 3]}),
        ("a: [1, 2]", "a: !replace [3]", {"a": [3]}),
        ("a: [1, 2]", "a: 3", {"a": 3}),
        ("a: 3", "a: [1]", {"a": [1]}),
        ("a: {b: 1}", "a: [1]", {"a": [1]}),
        ("a: [1]", "a: {b: 1}", {"a": {"b": 1}}),
        ("a: [{b: 1}]", "a: !append [{c: 2}]", {"a": [{"b": 1}, {"c": 2}]}),
        ("a: !replace {b: 1}", "c: 1", {"a": {"b": 1}, "c": 1}),  # nothing below to replace
    ],
)
def test_merge_two_files(below: str, above: str, merged: Any) -> None:
    """Mappings go key by key, words take the place of what is below, and tags say the rest."""
    assert over(below, above) == merged


@pytest.mark.parametrize(
    ("below", "above", "code", "what"),
    [
        ("a: [1]", "a: [2]", Code.UNSTATED_MERGE, "a is a list here and in one.yaml:1:4"),
        ("a: [1]", "a: [1]", Code.UNSTATED_MERGE, "a is a list here and in one.yaml:1:4"),
        ("b: 1", "a: !append [2]", Code.BAD_APPEND, "there is no list under a to append to"),
        ("a: 1", "a: !append [2]", Code.BAD_APPEND, "a is 1 in one.yaml:1:4, not a list to append to"),
        ("a:", "a: !append [2]", Code.BAD_APPEND, "a is null in one.yaml:1:3, not a list to append to"),
        ("a: {b: 1}", "a: !append [2]", Code.BAD_APPEND, "a is a mapping in one.yaml:1:4, not a list to append to"),
    ],
)
def test_merge_refuses_to_guess_about_lists(below: str, above: str, code: Code, what: str) -> None:
    """A list over a list has to say how, and what is appended to has to be there and be a list."""
    problem = problem_over(below, above)
    assert (problem.code, problem.what, problem.path) == (code, what, ("a",))
    assert problem.location is not None
    assert problem.location.file == "two.yaml"


def test_merge_a_list_that_says_no_tag_is_fine_under_one_that_replaces() -> None:
    """What a stronger layer puts right is no mistake."""
    three = layer("a: !replace [3]", name="three.yaml", extends=["one.yaml", "two.yaml"])
    two = layer("a: [2]", name="two.yaml", extends=["one.yaml"])
    assert merge([layer("a: [1]"), two, three]).plain == {"a": [3]}


def test_merge_a_mapping_above_a_word_does_not_bring_back_what_the_word_covered() -> None:
    """Of three layers, the second's word covers the first's mapping for good."""
    two = layer("a: word", name="two.yaml", extends=["one.yaml"])
    three = layer("a: {c: 3}", name="three.yaml", extends=["one.yaml", "two.yaml"])
    assert merge([layer("a: {b: 1}"), two, three]).plain == {"a": {"c": 3}}


SIDE_BY_SIDE = [
    ("a: 1", "a: 2", "a is 1 in one.yaml:1:4 and 2 in two.yaml:1:4"),
    ("a: 1", "a: true", "a is 1 in one.yaml:1:4 and true in two.yaml:1:4"),
    ("a: 1", "a: '1'", "a is 1 in one.yaml:1:4 and '1' in two.yaml:1:4"),
    ("a: ${X}", "a: '${X}'", "a is '${X}' in one.yaml:1:4 and '${X}' in two.yaml:1:4"),
    ("a: 1", "a: {b: 1}", "a is 1 in one.yaml:1:4 and a mapping in two.yaml:1:4"),
    ("a: [1]", "a: [2]", "a is a list of 1 in one.yaml:1:4 and a list of 1 in two.yaml:1:4"),
    ("a: [1]", "a: {b: 1}", "a is a list of 1 in one.yaml:1:4 and a mapping in two.yaml:1:4"),
    ("a: !replace {b: 1}", "a: {c: 1}", "a is a mapping in one.yaml:1:4 and a mapping in two.yaml:1:4"),
]


@pytest.mark.parametrize(("one", "two", "what"), SIDE_BY_SIDE)
@pytest.mark.parametrize("stage", Stage)
def test_merge_layers_side_by_side_that_disagree_are_an_error_naming_both_places(
    one: str, two: str, what: str, stage: Stage
) -> None:
    """Neither extends the other, so neither is right; the order in which they are given is no reason."""
    layers = [layer(one, stage), layer(two, stage, "two.yaml")]
    for given in (layers, layers[::-1]):
        with pytest.raises(ResolveError) as caught:
            merge(given)
        problem = only_problem(caught.value)
        assert (problem.code, problem.what, problem.path) == (Code.LAYER_CONFLICT, what, ("a",))


def test_merge_two_that_append_to_one_list_disagree() -> None:
    """The order of what they add would be a guess, also where they add the same."""
    base = layer("a: [1]")
    for second in ("a: !append [2]", "a: !append [3]"):
        sides = [
            layer("a: !append [2]", Stage.OVERLAYS, "two.yaml"),
            layer(second, Stage.OVERLAYS, "three.yaml"),
        ]
        for given in itertools.permutations([base, *sides]):
            with pytest.raises(ResolveError) as caught:
                merge(given)
            assert only_problem(caught.value).code is Code.LAYER_CONFLICT


@pytest.mark.parametrize(("one", "two", "what"), SIDE_BY_SIDE)
def test_merge_a_stronger_layer_settles_what_weaker_ones_disagree_on(one: str, two: str, what: str) -> None:
    """Whoever is over both may decide."""
    above = layer("a: 7", name="three.yaml", extends=["one.yaml", "two.yaml"])
    assert merge([layer(one), layer(two, name="two.yaml"), above]).plain == {"a": 7}


def test_merge_side_by_side_agreement_is_no_conflict() -> None:
    """To say the same twice is fine, for words, lists and mappings."""
    text = "version: 1\na: [1, {b: 2}]\nc: !replace {d: 1}\n"
    assert merge([layer(text), layer(text, name="two.yaml")]).plain == {"version": 1, "a": [1, {"b": 2}], "c": {"d": 1}}


def test_merge_of_a_diamond_lets_one_side_change_what_both_extend() -> None:
    """A file is over what it extends, also where another file that extends the same has left it alone."""
    base = layer("a: 1\nb: 1\n", name="base.yaml")
    left = layer("a: 2", name="left.yaml", extends=["base.yaml"])
    right = layer("b: 3", name="right.yaml", extends=["base.yaml"])
    for given in itertools.permutations([base, left, right]):
        assert merge(given).plain == {"a": 2, "b": 3}


def test_merge_does_not_change_the_layers() -> None:
    """Trees are values."""
    one, two = layer("a: {b: [1]}"), layer("a: {b: !append [2]}", name="two.yaml", extends=["one.yaml"])
    before = (one.tree.plain, two.tree.plain)
    merge([one, two])
    assert (one.tree.plain, two.tree.plain) == before


# ---------------------------------------------------------------- against an oracle


def random_tree(rng: random.Random, name: str, depth: int = 0) -> Node:
    """Return a random mapping; its words are few, so that layers agree now and then, and tell who said them."""
    value: dict[str, Node] = {}
    for key in rng.sample(KEYS, rng.randint(0, len(KEYS))):
        if depth < 2 and rng.random() < 0.5:
            value[key] = random_tree(rng, name, depth + 1)
        else:
            value[key] = tree_from(rng.choice([None, 1, 2, True, "x"]), origin(name), Mode.UNSAID)
    mode = Mode.REPLACE if depth and rng.random() < 0.2 else Mode.UNSAID
    return Node(value=value, origin=origin(name), key=origin(name), mode=mode)


def origin(name: str) -> Origin:
    return Origin(Path("/specs"), words=name)


def applied(layers: Sequence[Layer]) -> tuple[Any, dict[ConfigPath, str]]:
    """The oracle: start from nothing, and write layer after layer over it, as one would with a pencil.

    Returns the data, and who wrote each word.
    """
    data: dict[str, Any] = {}
    authors: dict[ConfigPath, str] = {}
    for each in layers:
        _write(data, authors, (), each.tree, each.name)
    return data, authors


def _write(data: dict[str, Any], authors: dict[ConfigPath, str], path: ConfigPath, node: Node, name: str) -> None:
    for key, child in node.value.items():
        at = (*path, key)
        is_mapping = isinstance(child.value, dict)
        if not is_mapping or child.mode is Mode.REPLACE or not isinstance(data.get(key), dict):
            for gone in [each for each in authors if each[: len(at)] == at]:
                del authors[gone]
            data[key] = {} if is_mapping else child.value
        if is_mapping:
            _write(data[key], authors, at, child, name)
        else:
            authors[at] = name


def authors_of(node: Node, path: ConfigPath = ()) -> dict[ConfigPath, str]:
    """Who said each word, as merging tells it."""
    if not isinstance(node.value, dict):
        return {path: node.origin.words}
    return {at: name for key, child in node.value.items() for at, name in authors_of(child, (*path, key)).items()}


def same(one: Any, other: Any) -> bool:
    """Whether data is the same to the type: in Python, 1 is True."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def chain(rng: random.Random, length: int) -> list[Layer]:
    """Return layers of which each is over all before it: by its stage, or by what it extends."""
    stages = sorted(rng.choices(list(Stage), k=length))
    names = [f"{index}.yaml" for index in range(length)]
    return [
        Layer(stage=stage, name=name, tree=random_tree(rng, name), extends=frozenset(names[:index]))
        for index, (stage, name) in enumerate(zip(stages, names, strict=True))
    ]


@pytest.mark.parametrize("seed", range(300))
def test_merge_of_a_chain_is_writing_one_over_the_other(seed: int) -> None:
    """For layers in one line, data and the author of every word are the oracle's, in whatever order they are given."""
    rng = random.Random(seed)  # noqa: S311 - toy trees
    layers = chain(rng, rng.randint(1, 5))
    data, authors = applied(layers)
    for _ in range(3):
        rng.shuffle(layers)
        merged = merge(layers)
        assert same(merged.plain, data)
        assert authors_of(merged) == authors


def partial(rng: random.Random) -> list[Layer]:
    """Return layers of which some are side by side."""
    layers: list[Layer] = []
    for index in range(rng.randint(2, 4)):
        stage = rng.choice([Stage.FILES, Stage.OVERLAYS])
        below = [each for each in layers if each.stage is stage and rng.random() < 0.4]
        extends = frozenset(name for each in below for name in (each.name, *each.extends))
        name = f"{index}.yaml"
        layers.append(Layer(stage=stage, name=name, tree=random_tree(rng, name), extends=extends))
    return layers


def orders(layers: Sequence[Layer]) -> list[tuple[Layer, ...]]:
    """Return every order in which no layer comes before one that it is over."""
    return [
        order
        for order in itertools.permutations(layers)
        if not any(one.is_over(other) for one, other in itertools.combinations(order, 2))
    ]


def result_of(layers: Sequence[Layer]) -> Mapping[str, Any] | frozenset[tuple[Any, ...]]:
    """Return the merged data, or what is told of the conflicts."""
    try:
        plain: Mapping[str, Any] = merge(layers).plain
    except ResolveError as error:
        return frozenset((problem.path, problem.what) for problem in error.problems)
    return plain


@pytest.mark.parametrize("seed", range(300))
def test_merge_side_by_side_conflicts_only_where_the_order_would_matter(seed: int) -> None:
    """Order never matters; what merges is what some allowed order makes, and of what conflicts they make two things.

    But for one rule that is stricter: a ``!replace`` and another mapping beside it have to agree, also where a
    stronger layer happens to say every key of both.
    """
    layers = partial(random.Random(seed))  # noqa: S311 - toy trees
    result = result_of(layers)
    assert all(same(result_of(order), result) for order in itertools.permutations(layers))
    possible = [applied(order)[0] for order in orders(layers)]
    if isinstance(result, frozenset):
        of_wholes = all(what.count("a mapping in") == 2 for _, what in result)
        assert of_wholes or any(not same(possible[0], other) for other in possible)
    else:
        assert any(same(result, each) for each in possible)


def test_the_random_layers_are_worth_testing() -> None:
    """Both ends of the property are reached often: conflicts, and merges of layers side by side."""
    results = [result_of(partial(random.Random(seed))) for seed in range(300)]  # noqa: S311 - toy trees
    conflicts = sum(isinstance(result, frozenset) for result in results)
    assert 40 < conflicts < 260


def test_merge_override_modes_lead_only_into_mappings() -> None:
    """A path into a word is refused, into nothing it makes the mapping."""
    path = Node(value={"b": tree_from(1, origin("set"))}, origin=origin("set"), key=origin("set"), mode=Mode.INTO)
    root = Node(value={"a": path}, origin=origin("set"), key=origin("set"), mode=Mode.INTO)
    override = Layer(stage=Stage.OVERRIDES, name="set", tree=root)
    assert merge([layer("a:"), override]).plain == {"a": {"b": 1}}
    assert merge([layer("c: 1"), override]).plain == {"c": 1, "a": {"b": 1}}
    with pytest.raises(ResolveError) as caught:
        merge([layer("a: word"), override])
    assert only_problem(caught.value).path == ("a", "b")


def test_layers_of_one_stage_are_only_over_what_they_extend() -> None:
    """Strength is stated, not counted."""
    one, two = layer("a: 1"), layer("a: 1", name="two.yaml")
    assert not one.is_over(two)
    assert not two.is_over(one)
    assert two._replace(stage=Stage.PROFILE).is_over(one)
    assert not one.is_over(one)


def test_tree_of_keeps_places() -> None:
    """Every node of a document has its line."""
    tree = tree_of(document_from("a:\n  - b: 1\n"))
    leaf = tree.value["a"].value[0].value["b"]
    assert (str(leaf.origin), str(leaf.key)) == ("spec.yaml:2:8", "spec.yaml:2:5")
