"""One class in source -> its facts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dmconfig.facts.expression import (
    Annotation,
    UnknownValueError,
    class_value,
    evaluate,
    method_of,
    read_annotation,
)
from dmconfig.facts.index import Index
from dmconfig.facts.installed import LIBRARIES
from dmconfig.facts.records import CallParameter, ClassFacts, ComponentSlot, Json, PipelineFacts
from dmconfig.facts.source import ClassSource, Module, Sources

_PIPELINE_BASE = "DiffusionPipeline"
_MADE_FOR = {
    "transformers": frozenset(
        {
            "PreTrainedModel",
            "PreTrainedTokenizerBase",
            "ProcessorMixin",
            "ImageProcessingMixin",
            "FeatureExtractionMixin",
        }
    ),
    "diffusers": frozenset({"ModelMixin", "SchedulerMixin", "ConfigMixin"}),
}
"""By library, the bases by which its loaders know a class."""
# diffusers itself reads the new class where a config has the old name (utils/deprecation_utils.py).
_RENAMED = {"CLIPFeatureExtractor": "CLIPImageProcessor"}


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of a method as written; ``default`` is None when there is none."""

    name: str
    module: Module
    annotation: ast.expr | None
    default: ast.expr | None


def read_pipeline(sources: Sources, class_name: str) -> PipelineFacts | None:
    """Return the facts of a pipeline class that diffusers exports; None when there is no such class."""
    source = sources.public_class("diffusers", class_name)
    if source is None or class_name == _PIPELINE_BASE or _PIPELINE_BASE not in _ancestors(sources, source):
        return None
    return _pipeline(sources, source, class_name)


def read_own_pipeline(sources: Sources, module: str, class_name: str) -> PipelineFacts | None:
    """Return the facts of a pipeline class that a module of no library has; None when it has none of this name.

    Where its call takes ``**kwargs``, it is taken to hand them on to the class that it is made from.
    """
    source = sources.find_class(module, class_name)
    if source is None or _PIPELINE_BASE not in _ancestors(sources, source):
        return None
    facts = _pipeline(sources, source, class_name)
    return facts._replace(call=tuple(_handed_on(sources, source)))


def _handed_on(sources: Sources, source: ClassSource) -> Iterator[CallParameter]:
    """Yield the parameters of a class's call, after those that its base takes of what is handed on."""
    own = [_call_parameter(sources, parameter) for parameter in _parameters(sources, source, "__call__")]
    names = {parameter.name for parameter in own}
    bases = (each for each in sources.mro(source)[1:] if isinstance(each, ClassSource))
    base = next((each for each in bases if method_of(sources, each, "__call__")), None)
    if base is not None and _takes_any_keyword(sources, source, "__call__"):
        yield from (each for each in _handed_on(sources, base) if each.name not in names)
    yield from own


def read_own_class(sources: Sources, module: str, class_name: str) -> ClassFacts | None:
    """Return the facts of a class that a module of no library has, as of the library it is made for; None without one.

    A class that is made for neither library, which neither could load, is none.
    """
    source = sources.find_class(module, class_name)
    if source is None:
        return None
    facts = _class(sources, source, class_name)
    library = next((name for name, bases in _MADE_FOR.items() if not bases.isdisjoint(facts.ancestors)), None)
    return facts._replace(library=library) if library is not None else None


def read_own_method(sources: Sources, module: str, class_name: str, method: str) -> tuple[CallParameter, ...] | None:
    """Return the parameters of a method, as ``read_method``, of a class that a module of no library has."""
    return _parameters_of(sources, sources.find_class(module, class_name), method)


def pipelines_of_module(sources: Sources, module: str) -> tuple[str, ...]:
    """Return the names of the pipeline classes that a module itself defines, in the order written."""
    read = sources.module(module)
    classes = [ClassSource(read, node) for node in read.classes.values()] if read is not None else []
    return tuple(each.node.name for each in classes if _PIPELINE_BASE in _ancestors(sources, each))


def _pipeline(sources: Sources, source: ClassSource, class_name: str) -> PipelineFacts:
    slots, config_parameters = _split_parameters(sources, source)
    call = _parameters(sources, source, "__call__")
    return PipelineFacts(
        class_name=class_name,
        slots=slots,
        config_parameters=config_parameters,
        call=tuple(_call_parameter(sources, parameter) for parameter in call),
        accepts_any_call_argument=_takes_any_keyword(sources, source, "__call__"),
        model_cpu_offload_seq=_offload_sequence(sources, source),
        exclude_from_cpu_offload=_names(sources, source, "_exclude_from_cpu_offload") or (),
        module=source.module.name,
        connected=_connected(sources, source),
    )


def read_class(sources: Sources, library: str, class_name: str) -> ClassFacts | None:
    """Return the facts of the class that model_index.json calls (library, class_name); None when there is none."""
    source = _find(sources, library, class_name)
    return None if source is None else _class(sources, source, class_name)


def _class(sources: Sources, source: ClassSource, class_name: str) -> ClassFacts:
    ancestors = _ancestors(sources, source)
    skip_keys = "_skip_keys_device_placement" if "PreTrainedModel" in ancestors else "_skip_keys"
    return ClassFacts(
        class_name=class_name,
        library=source.module.name.partition(".")[0],
        module=source.module.name,
        ancestors=ancestors | {class_name},
        no_split_modules=_names(sources, source, "_no_split_modules"),
        keep_in_fp32_modules=_names(sources, source, "_keep_in_fp32_modules") or (),
        keep_in_fp32_modules_strict=_names(sources, source, "_keep_in_fp32_modules_strict") or (),
        skip_keys=_names(sources, source, skip_keys) or (),
        tied_weights_keys=_names(sources, source, "_tied_weights_keys") or (),
        init_parameters=tuple(parameter.name for parameter in _parameters(sources, source, "__init__")),
        supports_group_offloading=_is_not_false(sources, source, "_supports_group_offloading"),
        group_offload_block_modules=_names(sources, source, "_group_offload_block_modules") or (),
        repeated_blocks=_names(sources, source, "_repeated_blocks") or (),
        members=_members(sources, source),
    )


def read_method(sources: Sources, library: str, class_name: str, method: str) -> tuple[CallParameter, ...] | None:
    """Return the named parameters of a method of a class, without ``self``; None when there is no such method."""
    return _parameters_of(sources, _find(sources, library, class_name), method)


def _parameters_of(sources: Sources, source: ClassSource | None, method: str) -> tuple[CallParameter, ...] | None:
    if source is None or method_of(sources, source, method) is None:
        return None
    return tuple(_call_parameter(sources, parameter) for parameter in _parameters(sources, source, method))


def read_fields(sources: Sources, class_name: str) -> tuple[CallParameter, ...] | None:
    """Return the fields of a dataclass that diffusers exports, as parameters of its constructor; None without one."""
    source = sources.public_class("diffusers", class_name)
    if source is None:
        return None
    fields: dict[str, CallParameter] = {}
    for ancestor in reversed(sources.mro(source)):
        for node in ancestor.node.body if isinstance(ancestor, ClassSource) else ():
            if (
                isinstance(ancestor, ClassSource)
                and isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
            ):
                written = _Parameter(node.target.id, ancestor.module, node.annotation, node.value)
                fields[written.name] = _call_parameter(sources, written)
    return tuple(fields.values())


def read_members(sources: Sources, module: str, enumeration: str) -> tuple[str, ...]:
    """Return the values of an enumeration of words, in the order written; empty when there is none."""
    source = sources.find_class(module, enumeration)
    values = [node.value for node in source.node.body if isinstance(node, ast.Assign)] if source else []
    return tuple(value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str))


def read_mapped_classes(sources: Sources) -> tuple[str, ...]:
    """Return the classes for which diffusers' single-file loader maps a config of the model's authors, sorted."""
    found = sources.find("diffusers.loaders.single_file_model", "SINGLE_FILE_LOADABLE_CLASSES")
    if found is None or not isinstance(found[1], ast.Dict):
        return ()
    entries = zip(found[1].keys, found[1].values, strict=True)
    return tuple(sorted(str(ast.literal_eval(name)) for name, entry in entries if name and _maps_config(entry)))


def _maps_config(entry: ast.expr) -> bool:
    keys = entry.keys if isinstance(entry, ast.Dict) else []
    return any(isinstance(key, ast.Constant) and key.value == "config_mapping_fn" for key in keys)


def read_exported_descendants(sources: Sources, base: str) -> tuple[str, ...]:
    """Return the names of all classes on base that diffusers exports, sorted. They are told by their bases' names."""
    index, exported = sources.index("diffusers"), sources.quoted("diffusers")
    descendants = _descendants(index, base)
    return tuple(sorted(name for name in descendants if name in exported))


def _descendants(index: Index, base: str) -> set[str]:
    """Return the names of all classes that inherit from base, however far, without base."""
    found, todo = set[str](), {base}
    while todo:
        todo = {name for name, made in index.items() if any(_mentions(bases, todo) for _, bases in made)} - found
        found |= todo
    return found


def _mentions(bases: str, names: set[str]) -> bool:
    return not names.isdisjoint(base.strip().rpartition(".")[2] for base in bases.split(","))


def _find(sources: Sources, library: str, class_name: str) -> ClassSource | None:
    """Return the class that diffusers would load; library may be a folder of its pipelines.

    Folders that have moved to ``deprecated`` are found there: published indexes go on naming them.
    """
    if library not in LIBRARIES:
        found = sources.find_class(f"diffusers.pipelines.{library}", class_name)
        return found or sources.find_class(f"diffusers.pipelines.deprecated.{library}", class_name)
    found = sources.public_class(library, class_name)
    if found is None and library == "transformers":
        older = (sources.public_class(library, name) for name in _newer_names(sources, class_name))
        found = next((source for source in older if source is not None), None)
    return found


def _newer_names(sources: Sources, name: str) -> Iterator[str]:
    """Yield the names under which transformers 5 still serves a class that has gone (its ``_LazyModule``)."""
    if name in _RENAMED:
        yield _RENAMED[name]
    if name.endswith(("TokenizerFast", "ImageProcessorFast")):
        yield name.removesuffix("Fast")
    if name.removesuffix("Fast") in _converted_tokenizers(sources):
        yield "PreTrainedTokenizerFast"


def _converted_tokenizers(sources: Sources) -> frozenset[str]:
    """Return the tokenizers that transformers loads as another class, through its table of converters."""
    found = sources.find("transformers.convert_slow_tokenizer", "SLOW_TO_FAST_CONVERTERS")
    if found is None or not isinstance(found[1], ast.Dict):
        return frozenset()
    return frozenset(key.value for key in found[1].keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _ancestors(sources: Sources, source: ClassSource) -> frozenset[str]:
    return frozenset(each if isinstance(each, str) else each.node.name for each in sources.mro(source))


def _names(sources: Sources, source: ClassSource, attribute: str) -> tuple[str, ...] | None:
    """Return a class attribute that holds names (of a dict, its keys); None when it is None, absent or not understood.

    Sets have no order of their own and come sorted.
    """
    try:
        value = class_value(sources, source, attribute)
    except UnknownValueError:
        return None
    if isinstance(value, str):  # transformers 4 writes a single name so
        return (value,)
    if not isinstance(value, list | tuple | dict | set | frozenset) or not all(isinstance(name, str) for name in value):
        return None
    return tuple(sorted(value) if isinstance(value, set | frozenset) else value)


def _is_not_false(sources: Sources, source: ClassSource, attribute: str) -> bool:
    """Return whether a class attribute is anything but False; absent ones are."""
    try:
        return class_value(sources, source, attribute) is not False
    except UnknownValueError:
        return True


def _offload_sequence(sources: Sources, source: ClassSource) -> tuple[str, ...] | None:
    try:
        text = class_value(sources, source, "model_cpu_offload_seq")
    except UnknownValueError:
        return None
    return tuple(text.split("->")) if isinstance(text, str) else None


def _connected(sources: Sources, source: ClassSource) -> tuple[str, ...]:
    """Return the prefixes of components that come from pipelines named in the model card of the pipeline's source."""
    try:
        if class_value(sources, source, "_load_connected_pipes") is not True:
            return ()
        found = sources.find("diffusers.pipelines.pipeline_loading_utils", "CONNECTED_PIPES_KEYS")
        return tuple(evaluate(sources, found[0], found[1])) if found and isinstance(found[1], ast.expr) else ()
    except UnknownValueError:
        return ()


def _split_parameters(sources: Sources, source: ClassSource) -> tuple[tuple[ComponentSlot, ...], tuple[str, ...]]:
    """Return the parameters of ``__init__`` as components and as plain settings.

    As in ``DiffusionPipeline._get_signature_keys``, what has no default or is in ``_optional_components`` is
    a component. Beyond that rule, so is a parameter with a default whose annotation names a class.
    """
    optional = frozenset(_names(sources, source, "_optional_components") or ())
    slots: list[ComponentSlot] = []
    settings: list[str] = []
    for parameter in _parameters(sources, source, "__init__"):
        annotation = read_annotation(sources, parameter.module, parameter.annotation)
        if parameter.default is None or parameter.name in optional or annotation.types:
            slots.append(_slot(parameter, annotation, optional))
        else:
            settings.append(parameter.name)
    return tuple(slots), tuple(settings)


def _slot(parameter: _Parameter, annotation: Annotation, optional: frozenset[str]) -> ComponentSlot:
    may_lack = parameter.name in optional or annotation.allows_none or parameter.default is not None
    return ComponentSlot(parameter.name, annotation.types, may_lack)


def _call_parameter(sources: Sources, parameter: _Parameter) -> CallParameter:
    if parameter.default is None:
        return CallParameter(parameter.name, required=True, default=None)
    try:
        value = evaluate(sources, parameter.module, parameter.default)
    except UnknownValueError:
        value = None
    return CallParameter(parameter.name, required=False, default=_json(value))


def _json(value: Any) -> Json:
    """Return value as JSON holds it (tuples as lists), or None when JSON cannot."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_json(item) for item in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _json(item) for key, item in value.items()}
    return None


def _parameters(sources: Sources, source: ClassSource, method: str) -> list[_Parameter]:
    """Return the named parameters of a method, the inherited one if need be, without ``self``; [] if there is none."""
    found = method_of(sources, source, method)
    if found is None:
        return []
    module, arguments = found[0], found[1].args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    pairs = [*zip(positional, [*missing, *arguments.defaults], strict=True)][1:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [_Parameter(argument.arg, module, argument.annotation, default) for argument, default in pairs]


def _takes_any_keyword(sources: Sources, source: ClassSource, method: str) -> bool:
    found = method_of(sources, source, method)
    return found is not None and found[1].args.kwarg is not None


def _members(sources: Sources, source: ClassSource) -> tuple[str, ...]:
    """Return what ``__init__`` assigns on self, in the order written; what inner functions assign is not seen."""
    found = method_of(sources, source, "__init__")
    targets = [node for node in ast.walk(found[1]) if isinstance(node, ast.Attribute)] if found else []
    stores = [node for node in targets if isinstance(node.ctx, ast.Store) and _is_self(node.value)]
    return tuple(dict.fromkeys(node.attr for node in sorted(stores, key=lambda node: (node.lineno, node.col_offset))))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
