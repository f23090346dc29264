"""The facts as values, and their plain-data form for the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""A value that JSON can hold. Tuples of the source appear as lists."""

_MODULE_BASES = frozenset({"Module", "ModelMixin", "PreTrainedModel"})


class ComponentSlot(NamedTuple):
    """A parameter of a pipeline's ``__init__`` that takes a component.

    ``types`` are the class names of its annotation, in the order written (unions, ``Optional`` and
    ``list[...]`` flattened); empty when the annotation restricts nothing. ``optional`` says that the
    pipeline can be made without it: it is in ``_optional_components``, allows None or has a default.
    """

    name: str
    types: tuple[str, ...]
    optional: bool


class CallParameter(NamedTuple):
    """A named parameter of a pipeline's ``__call__``, or of another method.

    ``default`` is None when there is none, when it is None, and when JSON cannot hold it.
    """

    name: str
    required: bool
    default: Json


class PipelineFacts(NamedTuple):
    """What a pipeline class says of itself. Slots and parameters are in the order of the signatures.

    Args:
        class_name: as diffusers exports it.
        slots: the components it takes.
        config_parameters: the other parameters of ``__init__``, e.g. ``requires_safety_checker``.
        call: the named parameters of ``__call__``, without ``self``; empty when the class has no ``__call__``.
        accepts_any_call_argument: ``__call__`` takes ``**kwargs``.
        model_cpu_offload_seq: component names in the order they run, or None when the class states none.
        exclude_from_cpu_offload: components that upstream's offloading leaves on the device.
        module: import path, e.g. ``diffusers.pipelines.flux.pipeline_flux``.
        connected: the pipeline's parts that are pipelines of their own, each by the prefix of its components:
            ``prior``, whose text encoder is ``prior_text_encoder``.
        blocks: of a modular pipeline, the class of its blocks; None for any other.
        made: of a modular pipeline, the components that its blocks make from settings of their own.
    """

    class_name: str
    slots: tuple[ComponentSlot, ...]
    config_parameters: tuple[str, ...]
    call: tuple[CallParameter, ...]
    accepts_any_call_argument: bool
    model_cpu_offload_seq: tuple[str, ...] | None
    exclude_from_cpu_offload: tuple[str, ...]
    module: str
    connected: tuple[str, ...] = ()
    blocks: str | None = None
    made: tuple[str, ...] = ()

    @property
    def is_modular(self) -> bool:
        """Whether it is made of blocks, which declare what it needs and takes."""
        return self.blocks is not None


class ClassFacts(NamedTuple):
    """What a component's class says of itself: class attributes, not what an instance makes of them.

    Args:
        class_name: the name asked for. transformers serves old names for renamed classes
            (``T5TokenizerFast`` is ``T5Tokenizer`` in version 5); ``ancestors`` then holds both.
        library: the installed package it comes from, ``diffusers`` or ``transformers``.
        module: import path of the defining module.
        ancestors: names of the class and of all its bases.
        no_split_modules: blocks that stay whole; None when the class does not say, and cannot be split.
        keep_in_fp32_modules: parts kept in fp32 when loading in fp16 (diffusers: in any lower precision).
        keep_in_fp32_modules_strict: parts kept in fp32 when loading in fp16 or bf16 (transformers only).
        skip_keys: arguments of ``forward`` that hooks must hand on uncopied.
        tied_weights_keys: names or patterns of the parameters that are duplicates of another.
        supports_group_offloading: False where diffusers refuses ``apply_group_offloading`` for the class.
        group_offload_block_modules: parts that offloading by blocks brings by themselves, so that the class can be
            entered in other ways than ``forward``.
        repeated_blocks: classes of the blocks that compiling by regions compiles.
        init_parameters: the named parameters of ``__init__``, without ``self``: what its config may set.
        members: what ``__init__`` assigns on ``self``, in the order written: the order of its modules.
    """

    class_name: str
    library: str
    module: str
    ancestors: frozenset[str]
    no_split_modules: tuple[str, ...] | None
    keep_in_fp32_modules: tuple[str, ...]
    keep_in_fp32_modules_strict: tuple[str, ...]
    skip_keys: tuple[str, ...]
    tied_weights_keys: tuple[str, ...]
    init_parameters: tuple[str, ...]
    supports_group_offloading: bool
    group_offload_block_modules: tuple[str, ...]
    repeated_blocks: tuple[str, ...]
    members: tuple[str, ...]


class CodeFile(NamedTuple):
    """One file of code that is of no installed library, as it was read.

    ``module`` is its dotted name below the package that it is a part of: ``pipeline``, ``parts.block``.
    """

    module: str
    path: Path
    text: bytes

    @property
    def is_package(self) -> bool:
        """Whether it is the ``__init__.py`` of its folder."""
        return self.path.name == "__init__.py"


class CodeFiles(NamedTuple):
    """Files of code that are read, and may be run, as one package; the first is the one that has the class.

    ``package`` is its name. It differs whenever a text does, so what is known of it holds for ever.
    """

    package: str
    files: tuple[CodeFile, ...]

    @property
    def module(self) -> str:
        """The full name of the module that has the class."""
        return f"{self.package}.{self.files[0].module}"


def is_module_class(facts: ClassFacts) -> bool:
    """Return whether instances of the class are torch modules, that is: have weights to place."""
    return not _MODULE_BASES.isdisjoint(facts.ancestors)


def is_scheduler_class(facts: ClassFacts) -> bool:
    """Return whether the class is one of diffusers' schedulers."""
    return "SchedulerMixin" in facts.ancestors


def pipeline_to_data(facts: PipelineFacts) -> dict[str, Json]:
    """Return facts as data that JSON can hold; ``pipeline_from_data`` is its inverse."""
    return {
        "class_name": facts.class_name,
        "slots": [[slot.name, list(slot.types), slot.optional] for slot in facts.slots],
        "config_parameters": list(facts.config_parameters),
        "call": [[parameter.name, parameter.required, parameter.default] for parameter in facts.call],
        "accepts_any_call_argument": facts.accepts_any_call_argument,
        "model_cpu_offload_seq": None if facts.model_cpu_offload_seq is None else list(facts.model_cpu_offload_seq),
        "exclude_from_cpu_offload": list(facts.exclude_from_cpu_offload),
        "module": facts.module,
        "connected": list(facts.connected),
        "blocks": facts.blocks,
        "made": list(facts.made),
    }


def pipeline_from_data(data: dict[str, Any]) -> PipelineFacts:
    """Return the facts that ``pipeline_to_data`` wrote."""
    sequence = data["model_cpu_offload_seq"]
    return PipelineFacts(
        class_name=data["class_name"],
        slots=tuple(ComponentSlot(name, tuple(types), optional) for name, types, optional in data["slots"]),
        config_parameters=tuple(data["config_parameters"]),
        call=tuple(CallParameter(name, required, default) for name, required, default in data["call"]),
        accepts_any_call_argument=data["accepts_any_call_argument"],
        model_cpu_offload_seq=None if sequence is None else tuple(sequence),
        exclude_from_cpu_offload=tuple(data["exclude_from_cpu_offload"]),
        module=data["module"],
        connected=tuple(data["connected"]),
        blocks=data["blocks"],
        made=tuple(data["made"]),
    )


def class_to_data(facts: ClassFacts) -> dict[str, Json]:
    """Return facts as data that JSON can hold; ``class_from_data`` is its inverse."""
    return {
        "class_name": facts.class_name,
        "library": facts.library,
        "module": facts.module,
        "ancestors": [*sorted(facts.ancestors)],
        "no_split_modules": None if facts.no_split_modules is None else list(facts.no_split_modules),
        "keep_in_fp32_modules": list(facts.keep_in_fp32_modules),
        "keep_in_fp32_modules_strict": list(facts.keep_in_fp32_modules_strict),
        "skip_keys": list(facts.skip_keys),
        "tied_weights_keys": list(facts.tied_weights_keys),
        "init_parameters": list(facts.init_parameters),
        "supports_group_offloading": facts.supports_group_offloading,
        "group_offload_block_modules": list(facts.group_offload_block_modules),
        "repeated_blocks": list(facts.repeated_blocks),
        "members": list(facts.members),
    }


def class_from_data(data: dict[str, Any]) -> ClassFacts:
    """Return the facts that ``class_to_data`` wrote."""
    blocks = data["no_split_modules"]
    return ClassFacts(
        class_name=data["class_name"],
        library=data["library"],
        module=data["module"],
        ancestors=frozenset(data["ancestors"]),
        no_split_modules=None if blocks is None else tuple(blocks),
        keep_in_fp32_modules=tuple(data["keep_in_fp32_modules"]),
        keep_in_fp32_modules_strict=tuple(data["keep_in_fp32_modules_strict"]),
        skip_keys=tuple(data["skip_keys"]),
        tied_weights_keys=tuple(data["tied_weights_keys"]),
        init_parameters=tuple(data["init_parameters"]),
        supports_group_offloading=data["supports_group_offloading"],
        group_offload_block_modules=tuple(data["group_offload_block_modules"]),
        repeated_blocks=tuple(data["repeated_blocks"]),
        members=tuple(data["members"]),
    )
