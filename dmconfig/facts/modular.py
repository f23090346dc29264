"""Modular pipelines in source -> their facts: what their blocks need, make and take, without making a block.

A block is a leaf, which declares its components and inputs itself, or is made of others: in sequence, in a loop, or
one of several that is chosen when it is called. What the whole declares is put together as diffusers does it.

Source: diffusers modular_pipelines/modular_pipeline.py (ConditionalPipelineBlocks, SequentialPipelineBlocks,
LoopSequentialPipelineBlocks), which the tests hold this against for every pipeline.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dmconfig.facts.expression import (
    Annotation,
    UnknownValueError,
    evaluate,
    method_of,
    methods_of,
    own_attribute,
    read_annotation,
)
from dmconfig.facts.records import CallParameter, ClassFacts, ComponentSlot, Json, PipelineFacts, is_module_class
from dmconfig.facts.source import ClassSource, Module, Sources

PIPELINE_BASE = "ModularPipeline"
_BLOCKS_BASE = "ModularPipelineBlocks"
_CONDITIONAL, _LOOP, _SEQUENCE = "ConditionalPipelineBlocks", "LoopSequentialPipelineBlocks", "SequentialPipelineBlocks"
_WITHIN_ANOTHER = frozenset({"controlnet"})
"""Components that run within the phase of another: the denoiser calls for them in each step."""


FactsOf = Callable[[str, str], ClassFacts | None]
_Made = tuple[Module, ast.Call] | None
"""The call that makes a block and the module it is written in, where it is not its class alone that is named."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A component that a block declares; ``is_made``: from settings of the block's own, not loaded."""

    name: str
    types: tuple[str, ...]
    is_made: bool


@dataclass(frozen=True, slots=True)
class _Block:
    """What a block declares. ``settings`` are names; ``outputs`` of later blocks' inputs need not be given.

    ``is_conditional``: it is left out of a call that does not ask for it.
    """

    parts: tuple[_Part, ...] = ()
    settings: tuple[str, ...] = ()
    inputs: tuple[CallParameter, ...] = ()
    outputs: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    is_conditional: bool = False


def read_modular(sources: Sources, class_name: str, blocks: str | None, facts_of: FactsOf) -> PipelineFacts | None:
    """Return the facts of a modular pipeline class made of blocks; None when diffusers exports no such class.

    Args:
        sources: the installed libraries.
        class_name: as diffusers exports it.
        blocks: the class of its blocks, or None for the pipeline's own default. One that diffusers does not export,
            or that says itself of no blocks, stands for the default too, as upstream has it.
        facts_of: returns the facts of a component's class by its library and name.
    """
    source = sources.public_class("diffusers", class_name)
    if source is None or PIPELINE_BASE not in _ancestors(sources, source):
        return None
    block_source = _blocks_named(sources, blocks) or _blocks_named(sources, _default_blocks(sources, source))
    if block_source is None:
        return None
    block = _read(sources, block_source, None)
    parts = _each_part_once(block.parts)
    modules = [name for name, part in parts.items() if not part.is_made and _is_module(part, facts_of)]
    return PipelineFacts(
        class_name=class_name,
        slots=tuple(ComponentSlot(name, part.types, optional=True) for name, part in parts.items()),
        config_parameters=tuple(dict.fromkeys(block.settings)),
        call=tuple(_to_be_given(_each_once(block.inputs), block.outputs)),
        accepts_any_call_argument=False,
        model_cpu_offload_seq=_last_uses(sources, block_source, modules),
        exclude_from_cpu_offload=(),
        module=source.module.name,
        blocks=block_source.node.name,
        made=tuple(name for name, part in parts.items() if part.is_made),
    )


def _to_be_given(inputs: Iterable[CallParameter], outputs: Iterable[str]) -> Iterator[CallParameter]:
    """Yield inputs, required where the caller has to give them: what some block makes, or has a default, need not be.

    Upstream's own mark on the whole says what any of its blocks requires, of what another has made too.
    """
    made = frozenset(outputs)
    for each in inputs:
        yield each._replace(required=each.required and each.default is None and each.name not in made)


def _each_part_once(parts: Iterable[_Part]) -> dict[str, _Part]:
    """Each component with the classes that all blocks together name for it, as the last way of having it has it."""
    found: dict[str, _Part] = {}
    for part in parts:
        types = (*found[part.name].types, *part.types) if part.name in found else part.types
        found[part.name] = replace(part, types=tuple(dict.fromkeys(types)))
    return found


def known_modular(sources: Sources) -> tuple[str, ...]:
    """Return the names of all modular pipelines that diffusers exports, sorted, without the base."""
    named = (name for name in sources.quoted("diffusers") if name.endswith(PIPELINE_BASE))
    return tuple(sorted(name for name in named if name != PIPELINE_BASE))


def _default_blocks(sources: Sources, source: ClassSource) -> str | None:
    node = _attribute(sources, source, "default_blocks_name")
    return node[1].value if node and isinstance(node[1], ast.Constant) and isinstance(node[1].value, str) else None


def _blocks_named(sources: Sources, name: str | None) -> ClassSource | None:
    """The class of blocks of a name, unless it is none, or one of the bases, which have no blocks."""
    source = sources.public_class("diffusers", name) if name else None
    if source is None or _BLOCKS_BASE not in _ancestors(sources, source):
        return None
    return source if [*_inner(sources, source)] else None


def _is_module(part: _Part, facts_of: FactsOf) -> bool:
    found = (facts_of(name, each) for each in part.types for name in ("diffusers", "transformers"))
    return any(facts is not None and is_module_class(facts) for facts in found)


# ---------------------------------------------------------------- blocks


def _read(sources: Sources, source: ClassSource, made: _Made) -> _Block:
    """Return what a block declares; ``made`` is the call that makes it, where its module makes it."""
    kinds = _ancestors(sources, source)
    if kinds.isdisjoint({_CONDITIONAL, _LOOP, _SEQUENCE}):
        return _leaf(sources, source, made)
    inner = [_read(sources, each, call) for each, call in _inner(sources, source)]
    if _CONDITIONAL in kinds:
        block = _one_of(inner, has_default=_has_default(sources, source))
    else:
        loop = _leaf(sources, source, made, prefix="loop_") if _LOOP in kinds else None
        block = _in_sequence(inner, loop)
    more = _own_inputs(sources, source)
    known = {each.name: each for each in more}
    inputs = tuple(known.pop(each.name, each) for each in block.inputs)
    return replace(block, inputs=(*inputs, *known.values()))


def _leaf(sources: Sources, source: ClassSource, made: _Made, prefix: str = "") -> _Block:
    """A block that declares everything itself; of a loop, what it declares beside its blocks."""
    inputs = tuple(_each_once(_parameters(sources, source, f"{prefix}inputs", made)))
    return _Block(
        parts=tuple(_parts(sources, source, f"{prefix}expected_components", made)),
        settings=tuple(_called(sources, source, f"{prefix}expected_configs", "ConfigSpec")),
        inputs=inputs,
        outputs=tuple(each.name for each in _parameters(sources, source, f"{prefix}intermediate_outputs", made, "Out")),
        required=frozenset(each.name for each in inputs if each.required),
    )


def _in_sequence(inner: Iterable[_Block], loop: _Block | None) -> _Block:
    """Blocks one after the other, which make inputs for those after them; a loop's own inputs come first."""
    blocks = [*inner]
    inputs: dict[str, CallParameter] = {each.name: each for each in loop.inputs} if loop else {}
    outputs: set[str] = set()
    for block in blocks:
        for each in block.inputs:
            if each.name not in outputs:
                inputs.setdefault(each.name, each)
        outputs.update(() if block.is_conditional else block.outputs)
    every = [*blocks, *([loop] if loop else [])]
    required = frozenset(name for block in every for name in block.required)
    own = (each._replace(required=each.name in required) for each in inputs.values())
    return _Block(
        parts=tuple(part for block in every for part in block.parts),
        settings=tuple(name for block in every for name in block.settings),
        inputs=tuple(own if loop else inputs.values()),
        outputs=tuple(dict.fromkeys(name for block in every for name in block.outputs)),
        required=required,
    )


def _one_of(blocks: list[_Block], *, has_default: bool) -> _Block:
    """Blocks of which a call chooses one: an input is required where each of them requires it, and one is run."""
    required = frozenset.intersection(*(block.required for block in blocks)) if has_default and blocks else frozenset()
    inputs: dict[str, list[CallParameter]] = {}
    for each in (each for block in blocks for each in block.inputs):
        inputs.setdefault(each.name, []).append(each)
    return _Block(
        parts=tuple(part for block in blocks for part in block.parts),
        settings=tuple(name for block in blocks for name in block.settings),
        inputs=tuple(_agreed(name, each, name in required) for name, each in inputs.items()),
        outputs=tuple(dict.fromkeys(name for block in blocks for name in block.outputs)),
        required=required,
        is_conditional=not has_default,
    )


def _agreed(name: str, several: list[CallParameter], required: bool) -> CallParameter:
    """An input that several blocks have; where they have several defaults, none."""
    default = several[0].default if all(each.default == several[0].default for each in several) else None
    return CallParameter(name, required=required, default=default)


def _has_default(sources: Sources, source: ClassSource) -> bool:
    """Tell whether one of the blocks is run where no input asks for another."""
    node = _attribute(sources, source, "block_trigger_inputs")
    triggers = node[1].elts if node and isinstance(node[1], ast.List) else []
    if "AutoPipelineBlocks" in _ancestors(sources, source):
        return any(isinstance(each, ast.Constant) and each.value is None for each in triggers)
    default = _attribute(sources, source, "default_block_name")
    return default is not None and not (isinstance(default[1], ast.Constant) and default[1].value is None)


def _inner(sources: Sources, source: ClassSource) -> Iterator[tuple[ClassSource, _Made]]:
    """Yield the blocks that a block is made of, each with the call that makes it, if its module makes it."""
    found = _attribute(sources, source, "block_classes")
    for module, node in _listed(sources, *found) if found else ():
        call = node if isinstance(node, ast.Call) else None
        name = call.func if call else node
        inner = sources.find_class(module.name, name.id) if isinstance(name, ast.Name) else None
        if inner is not None:
            yield inner, (module, call) if call else None


def _listed(sources: Sources, module: Module, node: ast.expr) -> Iterator[tuple[Module, ast.expr]]:
    """Yield the elements of a list, or the values of a table of the module: ``[A, B()]``, ``BLOCKS.values()``."""
    match node:
        case ast.List():
            yield from ((module, each) for each in node.elts)
        case ast.Call(func=ast.Name(id="list"), args=[inner]):
            yield from _listed(sources, module, inner)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="values")):
            found = sources.find(module.name, name)
            if found is not None and isinstance(found[1], ast.Call) and found[1].args:
                pairs = found[1].args[0].elts if isinstance(found[1].args[0], ast.List) else []
                yield from ((found[0], pair.elts[1]) for pair in pairs if isinstance(pair, ast.Tuple))


def _last_uses(sources: Sources, source: ClassSource, modules: list[str]) -> tuple[str, ...]:
    """Components with weights in the order of their last use: the order of the leaves that declare them."""
    order: dict[str, None] = {}
    for name in _uses(sources, source, None):
        order.pop(name, None)
        order[name] = None
    return tuple(name for name in order if name in modules and name not in _WITHIN_ANOTHER)


def _uses(sources: Sources, source: ClassSource, made: _Made) -> Iterator[str]:
    inner = [*_inner(sources, source)]
    for each, call in inner:
        yield from _uses(sources, each, call)
    if not inner:
        yield from (part.name for part in _parts(sources, source, "expected_components", made))


# ---------------------------------------------------------------- what a block declares


def _parts(sources: Sources, source: ClassSource, method: str, made: _Made) -> Iterator[_Part]:
    for module, call in _calls(sources, source, method, ("ComponentSpec",)):
        given = _given(call, ("name", "type_hint"))
        _, name = _as_made(sources, source, module, given.get("name"), made)
        where, hint = _as_made(sources, source, module, given.get("type_hint"), made)
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            annotation = read_annotation(sources, where, hint) if hint is not None else Annotation((), False)
            way = given.get("default_creation_method")
            is_made = isinstance(way, ast.Constant) and way.value == "from_config"
            yield _Part(name.value, annotation.types, is_made)


def _called(sources: Sources, source: ClassSource, method: str, word: str) -> Iterator[str]:
    for _, call in _calls(sources, source, method, (word,)):
        name = _given(call, ("name",)).get("name")
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


def _parameters(
    sources: Sources, source: ClassSource, method: str, made: _Made, kind: str = "In"
) -> Iterator[CallParameter]:
    """Yield the inputs, or outputs, that a block declares, and those that whoever makes the block names."""
    words = (f"{kind}putParam",)
    for module, call in _calls(sources, source, method, words):
        parameter = _parameter(sources, module, call)
        default = _as_made(sources, source, module, _given(call, ()).get("default"), made)
        if parameter is not None:
            is_own = default[0] is not module or _is_of_self(_given(call, ()).get("default"))
            yield parameter._replace(default=_value(sources, *default, None)) if is_own else parameter
    found = method_of(sources, source, method)
    if found is not None:
        yield from _named_by_maker(sources, source, found[1], made)


def _own_inputs(sources: Sources, source: ClassSource) -> tuple[CallParameter, ...]:
    """What blocks made of others say of their inputs beside these."""
    own = own_attribute(source.node, "inputs")
    if not isinstance(own, ast.FunctionDef):
        return ()
    calls = [node for node in ast.walk(own) if isinstance(node, ast.Call) and _is_call_of(node, ("InputParam",))]
    found = (_parameter(sources, source.module, call) for call in calls)
    return tuple(each for each in found if each is not None)


def _parameter(sources: Sources, module: Module, call: ast.Call) -> CallParameter | None:
    """The parameter that ``InputParam(name, ...)`` or ``InputParam.template(name, ...)`` makes; None without a name."""
    of_template = isinstance(call.func, ast.Attribute)
    given = _given(call, ("template_name",) if of_template else ("name", "type_hint", "default", "required"))
    first = given.get("template_name" if of_template else "name")
    if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
        return None
    table = _template(sources, call, first.value) if of_template else {}
    name = _value(sources, module, given.get("name"), table.get("name", first.value))
    if name is None:
        return None
    default = table.get("default") if "default" not in given else _value(sources, module, given["default"], None)
    required = _value(sources, module, given.get("required"), table.get("required", False))
    return CallParameter(str(name), required=bool(required), default=default)


def _template(sources: Sources, call: ast.Call, name: str) -> dict[str, Any]:
    """What the template of an input of this name says, as far as it is plain."""
    table = "INPUT_PARAM_TEMPLATES" if _is_call_of(call, ("InputParam",)) else "OUTPUT_PARAM_TEMPLATES"
    found = sources.find("diffusers.modular_pipelines.modular_pipeline_utils", table)
    entries = found[1] if found else None
    for key, value in zip(entries.keys, entries.values, strict=True) if isinstance(entries, ast.Dict) else ():
        if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Dict) and found:
            pairs = zip(value.keys, value.values, strict=True)
            plain = {each.value: node for each, node in pairs if isinstance(each, ast.Constant)}
            wanted = ("name", "default", "required", "kwargs_type")
            return {word: _value(sources, found[0], plain[word], None) for word in wanted if word in plain}
    return {}


def _named_by_maker(
    sources: Sources, source: ClassSource, method: ast.FunctionDef, made: _Made
) -> Iterator[CallParameter]:
    """Names that a block is made with, of those that the method reads on it."""
    for attribute in _read_on_self(method):
        value = _kept(sources, source, attribute, made)
        if value is not None:
            yield from _names_in(sources, *value)


def _names_in(sources: Sources, module: Module, node: ast.expr) -> Iterator[CallParameter]:
    """Parameters in what a block is made with: calls that make them, or plain names; of a table, its values."""
    match node:
        case ast.Constant(value=str(name)):
            yield CallParameter(name, required=False, default=None)
        case ast.Call() if _is_call_of(node, ("InputParam", "OutputParam")):
            parameter = _parameter(sources, module, node)
            if parameter is not None:
                yield parameter
        case ast.List() | ast.Tuple():
            for each in node.elts:
                yield from _names_in(sources, module, each)
        case ast.Dict():
            for each in node.values:
                yield from (name._replace(required=True) for name in _names_in(sources, module, each))
        case ast.Name(id=name):
            found = sources.find(module.name, name)
            if found is not None and not isinstance(found[1], ast.ClassDef):
                yield from _names_in(sources, found[0], found[1])


def _as_made(
    sources: Sources, source: ClassSource, module: Module, node: ast.expr | None, made: _Made
) -> tuple[Module, ast.expr | None]:
    """An expression, or, for an attribute of the block itself, what the block was made with."""
    if isinstance(node, ast.Attribute) and _is_self(node.value):
        return _kept(sources, source, node.attr, made) or (module, node)
    return module, node


def _kept(sources: Sources, source: ClassSource, attribute: str, made: _Made) -> tuple[Module, ast.expr] | None:
    """What ``__init__``, or that of a base, keeps as an attribute: what the block is made with, or what holds else."""
    for module, init in methods_of(sources, source, "__init__"):
        parameter = _parameter_kept_as(init, attribute)
        if parameter is not None:
            return _argument(module, init, parameter, made)
        made = _call_of_base(module, init)
    return None


def _argument(module: Module, init: ast.FunctionDef, parameter: str, made: _Made) -> tuple[Module, ast.expr] | None:
    """What is given for a parameter, or else what ``__init__`` puts in place of None, or else its default."""
    names = [each.arg for each in init.args.args[1:]]
    given = _given(made[1], tuple(names)) if made else {}
    if made is not None and parameter in given:
        return made[0], given[parameter]
    put = [
        node.value for node in ast.walk(init) if isinstance(node, ast.Assign) and _is_name(node.targets[0], parameter)
    ]
    with_default = names[len(names) - len(init.args.defaults) :]
    defaults = dict(zip(with_default, init.args.defaults, strict=True))
    node = put[0] if put else defaults.get(parameter)
    return (module, node) if node is not None else None


def _parameter_kept_as(init: ast.FunctionDef, attribute: str) -> str | None:
    names = {each.arg for each in init.args.args}
    for node in ast.walk(init):
        if isinstance(node, ast.Assign) and _is_of_self(node.targets[0], attribute):
            read = (each.id for each in ast.walk(node.value) if isinstance(each, ast.Name))
            return next((name for name in read if name in names), None)
    return None


def _call_of_base(module: Module, init: ast.FunctionDef) -> _Made:
    """The call of the base's ``__init__``."""
    calls = (node for node in ast.walk(init) if isinstance(node, ast.Call))
    base = (node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "__init__")
    found = next(base, None)
    return (module, found) if found is not None else None


def _read_on_self(method: ast.FunctionDef) -> tuple[str, ...]:
    nodes = (node for node in ast.walk(method) if isinstance(node, ast.Attribute) and _is_self(node.value))
    return tuple(dict.fromkeys(node.attr for node in nodes))


# ---------------------------------------------------------------- syntax


def _calls(
    sources: Sources, source: ClassSource, method: str, words: tuple[str, ...]
) -> Iterator[tuple[Module, ast.Call]]:
    """Yield the calls of these names in a method of a class, in the order written."""
    found = method_of(sources, source, method)
    nodes = [node for node in ast.walk(found[1]) if isinstance(node, ast.Call)] if found else []
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        if _is_call_of(node, words) and found is not None:
            yield found[0], node


def _is_call_of(node: ast.Call, words: tuple[str, ...]) -> bool:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name), attr="template"):
            return name in words
    return False


def _given(call: ast.Call | None, names: tuple[str, ...]) -> dict[str, ast.expr]:
    """The arguments of a call by name; ``names`` are those of the parameters."""
    if call is None:
        return {}
    by_place = dict(zip(names, call.args, strict=False))
    return {**by_place, **{each.arg: each.value for each in call.keywords if each.arg is not None}}


def _value(sources: Sources, module: Module, node: ast.expr | None, default: Any) -> Any:
    if node is None:
        return default
    try:
        return _plain(evaluate(sources, module, node))
    except UnknownValueError:
        return None


def _plain(value: Any) -> Json:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else None


def _attribute(sources: Sources, source: ClassSource, name: str) -> tuple[Module, ast.expr] | None:
    """A class attribute as written, and the module it is written in; inherited ones included."""
    for ancestor in sources.mro(source):
        if isinstance(ancestor, ClassSource):
            node = own_attribute(ancestor.node, name)
            if isinstance(node, ast.expr):
                return ancestor.module, node
    return None


def _ancestors(sources: Sources, source: ClassSource) -> frozenset[str]:
    return frozenset(each if isinstance(each, str) else each.node.name for each in sources.mro(source))


def _is_of_self(node: ast.expr | None, attribute: str | None = None) -> bool:
    """Tell whether an expression is an attribute of self: any, or this one."""
    return isinstance(node, ast.Attribute) and _is_self(node.value) and attribute in (None, node.attr)


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _each_once(parameters: Iterable[CallParameter]) -> tuple[CallParameter, ...]:
    found: dict[str, CallParameter] = {}
    for each in parameters:
        found.setdefault(each.name, each)
    return tuple(found.values())
