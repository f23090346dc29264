"""The memory of every component of an assembly, from the best source there is: weights, catalogue, configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dmconfig.adapters import adapter_notes, additions_of
from dmconfig.assembly import Assembly, Component
from dmconfig.catalog import find_pipeline
from dmconfig.checkpoint import tensors_of
from dmconfig.errors import Code, DMConfigError, Problem, SourceError
from dmconfig.footprint import (
    FLOATS,
    Footprint,
    MeasuredFrom,
    bits_of,
    build_on_meta,
    dominant_dtype,
    fp32_patterns,
    group_sizes,
    loaded_sizes,
    mapped_config,
    measure_configs,
    measure_tensors,
    module_bytes,
)
from dmconfig.gguf import LOADABLE_TYPES, loaded_sizes_of_gguf, most_common_type
from dmconfig.layout import Layout, lay_out, layout_of, layout_of_tensors, with_more
from dmconfig.layouts import layout_by_config, packaged_layout
from dmconfig.quantization import quantised_sizes
from dmconfig.resolve import Resolved
from dmconfig.source import Source
from dmconfig.spec import Spec
from dmconfig.stored import (
    AUTO,
    Headers,
    component_weights,
    config_folder_of,
    header_tensors,
    model_config,
    single_file_tensors,
)
from dmconfig.switches import cast_sizes, casting_of
from dmconfig.units import format_bytes
from dmconfig.weights import TensorInfo

_VARIANTS = {"fp16": "float16", "bf16": "bfloat16"}
"""The dtype of published variants; the catalogue's figures are of plain weights."""

_ASK = "plan with --hub, which asks the hub for the headers alone, or load it once, which downloads what it needs"


def measure(resolved: Resolved, assembly: Assembly, hub: Headers | None = None) -> Mapping[str, Footprint]:
    """Return a footprint per component that has weights.

    Reads headers only: of weights on this machine, or, with ``hub``, of those it has of components that are not.
    torch is imported only for a component with neither weights nor an entry in the catalogue.

    Raises: SourceError: damaged weights, or a component whose size cannot be known here; all of them at once.
        BuildError: as ``hub`` does.
    """
    footprints: dict[str, Footprint] = {}
    problems: list[Problem] = []
    for component in assembly.modules:
        try:
            size = _with_taken_in(_measure(component, resolved, hub), component, assembly, resolved, hub)
            footprints[component.name] = _with_additions(size, component, assembly)
        except DMConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise SourceError(problems)
    return footprints


def _with_taken_in(
    size: Footprint, component: Component, assembly: Assembly, resolved: Resolved, hub: Headers | None
) -> Footprint:
    """The footprint with the weights of another component that are copied into this one, in its dtype.

    Its largest block takes in at most the largest of the other.
    """
    if component.takes_in is None:
        return size
    other = next(each for each in assembly.modules if each.name == component.takes_in)
    more = _measure(replace(other, dtype=size.dtype), resolved, hub)
    return replace(
        size,
        nbytes=size.nbytes + more.nbytes,
        largest_leaf_bytes=max(size.largest_leaf_bytes, more.largest_leaf_bytes),
        largest_block_bytes=size.largest_block_bytes + more.largest_block_bytes,
        outside_blocks_bytes=size.outside_blocks_bytes + more.outside_blocks_bytes,
        needs_cast=size.needs_cast or more.needs_cast,
    )


def _with_additions(size: Footprint, component: Component, assembly: Assembly) -> Footprint:
    """The footprint with what adapters add. What goes to no module known by name may be anywhere."""
    added = [*_additions(component, assembly, size.dtype)]
    if not added:
        return size
    blocks = group_sizes(added)
    return replace(
        size,
        nbytes=size.nbytes + blocks["nbytes"],
        largest_leaf_bytes=size.largest_leaf_bytes + max(nbytes for _, nbytes in added),
        largest_block_bytes=size.largest_block_bytes + blocks["largest_block_bytes"],
        outside_blocks_bytes=size.outside_blocks_bytes + blocks["outside_blocks_bytes"],
    )


def _additions(component: Component, assembly: Assembly, dtype: str) -> Iterator[tuple[str, int]]:
    """Name and bytes of every tensor that adapters add to a component; they take its dtype."""
    modules = [each.name for each in assembly.modules]
    for adapter in assembly.adapters:
        for each in additions_of(adapter, modules, assembly.denoiser):
            if each.component == component.name:
                yield f"{each.module}.weight" if each.module else "", each.elements * bits_of(dtype) // 8


def lay_out_split(
    resolved: Resolved,
    spec: Spec,
    assembly: Assembly,
    footprints: Mapping[str, Footprint],
    hub: Headers | None = None,
    *,
    as_auto: bool = False,
) -> Mapping[str, Layout]:
    """Return the layout of every component that the file splits, and of those that ``auto`` may split.

    ``as_auto``: as if the strategy were ``auto``, whatever it is.

    Imports torch only for a component that the file splits, if it is of transformers with a config that is not
    packaged, or if there are only configs of it.

    Raises: SourceError: nothing on this machine tells how a component of the file's own choice is laid out.
    """
    layouts: dict[str, Layout] = {}
    problems: list[Problem] = []
    for component in assembly.modules:
        size = footprints[component.name]
        try:
            if spec.splits(component.name):
                layout: Layout | None = _layout(component, size, resolved, hub)
            elif (as_auto or spec.may_split(component.name)) and "split" not in component.refused:
                layout = _known_layout(component, size, hub)
            else:
                layout = None
            if layout is not None:
                layouts[component.name] = with_more(layout, _additions(component, assembly, size.dtype))
        except DMConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise SourceError(problems)
    return layouts


def _layout(component: Component, size: Footprint, resolved: Resolved, hub: Headers | None) -> Layout:
    known = _known_layout(component, size, hub)
    if known is not None:
        return known
    folder = config_folder_of(component)
    _refuse_to_run(component, "how")
    if component.original_config is not None:
        return layout_of(_built_on_meta(component, size.dtype), size.dtype)
    if folder is not None:
        return lay_out(folder, component.library, component.class_name, size.dtype)
    what = f"how {component.name!r} ({component.class_name}) can be split cannot be known here"
    why = f"its config, a part of {component.source.text}, is not on this machine"
    fix = "load it once with load_from_yaml or dmconfig run, which downloads what it needs"
    raise SourceError([resolved.problem(Code.SIZES_UNKNOWN, component.path, what, why=why, fix=fix)])


def _known_layout(component: Component, size: Footprint, hub: Headers | None) -> Layout | None:
    """The layout that the weights of a diffusers component, or the packaged layouts, tell without building it."""
    if component.source.is_gguf:
        return None
    if component.library != "diffusers":
        return known_by_config(component, size.dtype)
    can_split = component.facts.no_split_modules is not None
    if casting_of(component.asked) is not None:
        return layout_of_tensors(_changed_sizes(component, size), order=component.facts.members, can_split=can_split)
    tensors = header_tensors(component, hub)
    if tensors is not None:
        patterns = _patterns(component, size.dtype)
        sizes = loaded_sizes(tensors, dtype=size.dtype, keep_in_fp32=patterns, tied=_tied(component))
        return layout_of_tensors(sizes, order=component.facts.members, can_split=can_split)
    if component.home.hub_id is None:
        return None
    return packaged_layout(component.home.hub_id, component.name_there, component.class_name, size.dtype)


def known_by_config(component: Component, dtype: str) -> Layout | None:
    """Return the packaged layout of a component of transformers: what its config says, here or packaged, tells it."""
    if casting_of(component.asked) is not None:
        return None
    return layout_by_config(
        model_config(component),
        component.class_name,
        dtype,
        members=component.facts.members,
        keep_in_fp32=_patterns(component, dtype),
    )


def config_of_authors(component: Component) -> Mapping[str, Any]:
    """Return the config that diffusers makes from the ``original_config`` of a component. Imports diffusers.

    Raises: SourceError: it, or the file of weights, is not on this machine.
    """
    original = component.original_config
    tensors = () if component.source.is_pickle else tensors_of(component.source)  # a pickle is not opened to look
    if original is None or original.values is None or tensors is None:
        what = f"the config of {component.name!r} ({component.class_name}) cannot be made here"
        why = "it is made from its original_config and the header of its weights, and not both are known here"
        raise SourceError([Problem(code=Code.SIZES_UNKNOWN, what=what, why=why, path=component.path)])
    return mapped_config(original.values, tensors, component.facts.ancestors)


def _built_on_meta(component: Component, dtype: str) -> Any:
    """A component as its class builds it on meta: from the config in its folder, or the one made of its authors'.

    Raises: SourceError: there is no config of it, or the class cannot be built from it.
    """
    folder = config_folder_of(component)
    if folder is None and component.original_config is None:
        what = f"how {component.name!r} is made cannot be known: its config is not here"
        fix = "load it once with load_from_yaml or dmconfig run, which downloads what it needs"
        raise SourceError([Problem(code=Code.SIZES_UNKNOWN, what=what, path=component.path, fix=fix)])
    try:
        config = folder or config_of_authors(component)
        return build_on_meta(config, component.library, component.class_name, dtype)
    except SourceError:
        raise
    except Exception as error:  # code of other libraries, on a config nobody has checked: anything may come
        what = f"{component.name!r} ({component.class_name}) cannot be built from its config"
        why = f"{type(error).__name__}: {error}"
        raise SourceError([Problem(code=Code.SIZES_UNKNOWN, what=what, why=why, path=component.path)]) from error


def _measure(component: Component, resolved: Resolved, hub: Headers | None) -> Footprint:
    """The footprint of a component as it is in memory: several models together, weights quantised or cast."""
    if component.parts:
        return _together([_measure(part, resolved, hub) for part in _of_one_dtype(component, resolved, hub)])
    size = _as_stored(component, resolved, hub)
    if component.quantization is None and casting_of(component.asked) is None:
        return size
    return replace(size, **group_sizes(_changed_sizes(component, size)))


def _of_one_dtype(component: Component, resolved: Resolved, hub: Headers | None) -> tuple[Component, ...]:
    """The models of a component in the dtype of the first, which all of them are loaded in."""
    dtype = _as_stored(component.parts[0], resolved, hub).dtype
    return tuple(replace(part, dtype=dtype) for part in component.parts)


def _together(sizes: Sequence[Footprint]) -> Footprint:
    """Models in a list: each of them is a block."""
    return replace(
        sizes[0],
        nbytes=sum(size.nbytes for size in sizes),
        largest_leaf_bytes=max(size.largest_leaf_bytes for size in sizes),
        largest_block_bytes=max(size.nbytes for size in sizes),
        outside_blocks_bytes=0,
        needs_cast=any(size.needs_cast for size in sizes),
    )


def _changed_sizes(component: Component, size: Footprint) -> list[tuple[str, int]]:
    """Name and bytes of every tensor of a component that is quantised, or whose weights are cast layer by layer.

    Which layers that concerns is asked of the class, built from its config on the meta device. Imports torch.

    Raises: SourceError: there is no config, or the class cannot be built from it.
    """
    _refuse_to_run(component, "how large, quantised or cast layer by layer,")
    module = _built_on_meta(component, size.dtype)
    if component.quantization is not None:
        return [*quantised_sizes(module, component.quantization, size.dtype)]
    return [*cast_sizes(module, component.asked, size.dtype)]


def _refuse_to_run(component: Component, question: str) -> None:
    """Refuse what only a component's class can tell, where that is code of its source: planning runs none.

    Raises: SourceError: it is.
    """
    if component.code is not None:
        what = f"{question} {component.name!r} ({component.class_name}) is cannot be known without running its own code"
        why = f"it is code of {component.code.origin}, and there are no headers of weights here that tell it"
        fix = "keep its safetensors beside its config, and leave it as it is stored"
        raise SourceError([Problem(code=Code.SIZES_UNKNOWN, what=what, why=why, path=component.path, fix=fix)])


def _as_stored(component: Component, resolved: Resolved, hub: Headers | None) -> Footprint:
    dtype = None if component.dtype == AUTO else component.dtype
    if component.is_single_file and hub is not None and not _is_known(component.source):
        component = replace(component, source=replace(component.source, told=_told_by(hub, component)))
    if component.source.is_gguf:
        return _from_gguf(component, resolved)
    if component.is_single_file:
        return _from_single_file(component, resolved, dtype)
    return _from_folder(component, resolved, hub, dtype)


def _is_known(source: Source) -> bool:
    """Whether a file is here, or the hub has told what it holds."""
    return source.path is not None or source.told is not None


def _told_by(hub: Headers, component: Component) -> tuple[TensorInfo, ...] | None:
    tensors = hub(component)
    return tuple(tensors) if tensors is not None else None


def _from_folder(component: Component, resolved: Resolved, hub: Headers | None, dtype: str | None) -> Footprint:
    tensors = header_tensors(component, hub)
    if tensors is not None:
        return _from_tensors(component, tensors, dtype)
    catalogued = _from_catalogue(component, dtype)
    if catalogued is not None:
        return catalogued
    if component.folder is not None:
        _refuse_to_run(component, "how large")
        size = measure_configs(component.folder, component.library, component.class_name, dtype)
        files = component_weights(component)
        return replace(size, needs_cast=True) if files is not None and files.is_pickle else size
    what = f"how large {component.name!r} ({component.class_name}) is cannot be known here"
    why = f"its part of {component.source.text} is not in the local hub cache, and dmconfig has no figures for it"
    raise SourceError([resolved.problem(Code.SIZES_UNKNOWN, component.path, what, why=why, fix=_ASK)])


def _from_single_file(component: Component, resolved: Resolved, dtype: str | None) -> Footprint:
    """The size of a component as its config has it: a single file has other names, and weights of others beside.

    Loaders rearrange what they read of some classes, so only weights of diffusers' models rest in the file.
    """
    tensors = single_file_tensors(component)
    stored = dominant_dtype(tensors) if tensors is not None else dtype
    target = dtype or stored
    folder = config_folder_of(component)
    if target is None or stored is None or (folder is None and component.original_config is None):
        raise _unknown_size(component, resolved, f"{component.source.text} or its config is not on this machine")
    _refuse_to_run(component, "how large")
    known = _from_catalogue(component, target) if folder is not None and component.folder is None else None
    if folder is not None:
        size = known or measure_configs(folder, component.library, component.class_name, target)
    else:
        size = _size_on_meta(component, target)
    in_file = component.library == "diffusers" and not component.source.is_pickle
    return replace(size, stored_dtype=stored, needs_cast=not in_file or target != stored, measured_from="configs")


def _size_on_meta(component: Component, dtype: str) -> Footprint:
    sizes = group_sizes(module_bytes(_built_on_meta(component, dtype), dtype))
    return Footprint(dtype=dtype, stored_dtype=dtype, needs_cast=False, measured_from="configs", **sizes)


def _unknown_size(component: Component, resolved: Resolved, why: str) -> SourceError:
    what = f"how large {component.name!r} ({component.class_name}) is cannot be known here"
    return SourceError([resolved.problem(Code.SIZES_UNKNOWN, component.path, what, why=why, fix=_ASK)])


def _from_gguf(component: Component, resolved: Resolved) -> Footprint:
    """The size of what a GGUF file holds; of an unknown one nothing can be said, for the weights are quantised."""
    tensors = tensors_of(component.source)
    if tensors is None:
        raise _unknown_size(component, resolved, f"{component.source.text} is not on this machine")
    refused = sorted({tensor.dtype for tensor in tensors} - LOADABLE_TYPES)
    if refused:
        what = f"{component.source.text} has tensors of ggml type {', '.join(refused)}, which diffusers does not load"
        fix = f"name a file with others: {', '.join(sorted(LOADABLE_TYPES))}"
        raise SourceError([resolved.problem(Code.NOT_SUPPORTED_YET, component.path, what, fix=fix)])
    patterns = _patterns(component, component.dtype)
    sizes = loaded_sizes_of_gguf(tensors, dtype=component.dtype, keep_in_fp32=patterns)
    stored = most_common_type(tensors)
    return Footprint(
        dtype=component.dtype,
        stored_dtype=stored,
        needs_cast=True,
        comes_whole=True,
        measured_from="weights" if component.source.path is not None else "hub",
        **group_sizes(sizes),
    )


def _from_tensors(component: Component, tensors: Sequence[TensorInfo], dtype: str | None) -> Footprint:
    patterns = _patterns(component, dtype or dominant_dtype(tensors))
    source: MeasuredFrom = "weights" if component_weights(component) is not None else "hub"
    tied = _tied(component)
    return measure_tensors(tensors, dtype=dtype, keep_in_fp32=patterns, tied=tied, measured_from=source)


def _tied(component: Component) -> tuple[str, ...]:
    """The names that are second names of another weight; a head is none where the config says that it is not tied.

    Encoders without a head tie their embeddings whatever the config says.
    """
    keys = component.facts.tied_weights_keys
    untied = model_config(component).get("tie_word_embeddings") is False
    return tuple(key for key in keys if not (untied and "lm_head" in key))


def _patterns(component: Component, dtype: str) -> tuple[str, ...]:
    facts = component.parts[0].facts if component.parts else component.facts
    return fp32_patterns(
        library=component.library,
        dtype=dtype,
        keep=facts.keep_in_fp32_modules,
        keep_strict=facts.keep_in_fp32_modules_strict,
    )


def _from_catalogue(component: Component, dtype: str | None) -> Footprint | None:
    known = find_pipeline(component.home.hub_id) if component.home.hub_id else None
    part = known.component(component.name_there) if known else None
    size = part.footprint(dtype) if part and part.class_name == component.class_name else None
    stored = _VARIANTS.get(component.variant or "")
    if size is None or stored is None:
        return size
    return replace(size, stored_dtype=stored, needs_cast=stored != size.dtype)


def variant_notes(assembly: Assembly) -> Iterator[str]:
    """Yield a sentence per component that has no weights of the pipeline's variant and loads its plain ones."""
    for component in assembly.loaded:
        files = component_weights(component) if component.is_module else None
        if files is not None and component.variant and files.variant is None:
            yield f"{component.name} has no {component.variant} weights; its plain ones are used"


def change_notes(assembly: Assembly) -> Iterator[str]:
    """Yield a sentence per component whose weights are not kept in its dtype, and per adapter that is not here."""
    for component in assembly.modules:
        if component.quantization is not None:
            yield f"{component.name} is quantised with {component.quantization.quant_backend} while it is loaded"
        elif (casting := casting_of(component.asked)) is not None:
            yield f"{component.name} is kept in {casting.storage_dtype} and cast layer by layer while it computes"
        if component.takes_in is not None:
            yield f"{assembly.class_name} copies {component.takes_in} into {component.name}, which has its bytes too"
    yield from adapter_notes(assembly.adapters)


def cast_notes(footprints: Mapping[str, Footprint]) -> Iterator[str]:
    """Yield a sentence per pair of dtypes: which components are stored in one and loaded in the other."""
    casts: dict[tuple[str, str], list[str]] = {}
    for name, size in footprints.items():
        if size.stored_dtype in FLOATS and size.stored_dtype != size.dtype:
            casts.setdefault((size.stored_dtype, size.dtype), []).append(name)
    for (stored, dtype), names in casts.items():
        nbytes = format_bytes(sum(footprints[name].nbytes for name in names))
        cost = f"slower and with {nbytes} beside the files"
        yield f"cast from {stored} to {dtype} while loading, {cost}: {', '.join(names)}"
