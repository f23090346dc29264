"""The memory of every component of an assembly, from the best source there is: weights, catalogue, configs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dmconfig.assembly import Assembly, Component
from dmconfig.catalog import find_pipeline
from dmconfig.configs import config_folder
from dmconfig.errors import Code, DMConfigError, Problem, SourceError
from dmconfig.footprint import (
    Footprint,
    MeasuredFrom,
    dominant_dtype,
    fp32_patterns,
    loaded_sizes,
    measure_configs,
    measure_tensors,
)
from dmconfig.layout import Layout, lay_out, layout_of_tensors
from dmconfig.layouts import layout_by_config, packaged_layout
from dmconfig.resolve import Resolved
from dmconfig.spec import Spec
from dmconfig.weights import TensorInfo, WeightFiles, find_weights, read_tensors

AUTO = "auto"

Headers = Callable[[Component], Sequence[TensorInfo] | None]
"""The tensors of a component's weights where they are, or None where there are none."""


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
            footprints[component.name] = _measure(component, resolved, hub)
        except DMConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise SourceError(problems)
    return footprints


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
        if not spec.splits(component.name):
            may_split = as_auto or spec.may_split(component.name)
            if may_split and (layout := _known_layout(component, footprints[component.name], hub)):
                layouts[component.name] = layout
            continue
        try:
            layouts[component.name] = _layout(component, footprints[component.name], resolved, hub)
        except DMConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise SourceError(problems)
    return layouts


def _layout(component: Component, size: Footprint, resolved: Resolved, hub: Headers | None) -> Layout:
    known = _known_layout(component, size, hub)
    if known is not None:
        return known
    if component.folder is not None:
        return lay_out(component.folder, component.library, component.class_name, size.dtype)
    what = f"how {component.name!r} ({component.class_name}) can be split cannot be known here"
    why = f"its config, a part of {component.source.text}, is not on this machine"
    fix = "load it once with load_from_yaml or dmconfig run, which downloads what it needs"
    raise SourceError([resolved.problem(Code.SIZES_UNKNOWN, component.path, what, why=why, fix=fix)])


def _known_layout(component: Component, size: Footprint, hub: Headers | None) -> Layout | None:
    """The layout that the weights of a diffusers component, or the packaged layouts, tell without building it."""
    if component.library != "diffusers":
        return known_by_config(component, size.dtype)
    can_split = component.facts.no_split_modules is not None
    tensors = _tensors(component, hub)
    if tensors is not None:
        patterns = _patterns(component, size.dtype)
        sizes = loaded_sizes(tensors, dtype=size.dtype, keep_in_fp32=patterns, tied=_tied(component))
        return layout_of_tensors(sizes, order=component.facts.members, can_split=can_split)
    if component.source.hub_id is None:
        return None
    return packaged_layout(component.source.hub_id, component.name, component.class_name, size.dtype)


def known_by_config(component: Component, dtype: str) -> Layout | None:
    """Return the packaged layout of a component of transformers: what its config says, here or packaged, tells it."""
    config = model_config(component)
    packaged = config_folder(component.source.hub_id) if not config and component.source.hub_id else None
    if packaged is not None:
        config = read_config(packaged / component.name)
    return layout_by_config(
        config,
        component.class_name,
        dtype,
        members=component.facts.members,
        keep_in_fp32=_patterns(component, dtype),
    )


def component_weights(component: Component) -> WeightFiles | None:
    """Return the weight files a component loads: of its variant, or without one where the variant is the pipeline's.

    Raises: SourceError: an index names files that are not there.
    """
    if component.folder is None:
        return None
    files = find_weights(component.folder, library=component.library, variant=component.variant)
    if files is None and component.variant and not component.variant_required:
        files = find_weights(component.folder, library=component.library, variant=None)
    return files


def model_config(component: Component) -> Mapping[str, Any]:
    """Return the config of a component with weights; empty where it is not here or is none, which its loader tells."""
    return {} if component.folder is None else read_config(component.folder)


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the config in folder; empty where there is none."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _tensors(component: Component, hub: Headers | None) -> Sequence[TensorInfo] | None:
    """What the headers of a component's weights say: of those here, else of those on the hub, if it may be asked."""
    files = component_weights(component)
    if files is not None:
        return read_tensors(files)
    return hub(component) if hub is not None else None


def _measure(component: Component, resolved: Resolved, hub: Headers | None) -> Footprint:
    dtype = None if component.dtype == AUTO else component.dtype
    tensors = _tensors(component, hub)
    if tensors is not None:
        return _from_tensors(component, tensors, dtype)
    catalogued = _from_catalogue(component, dtype)
    if catalogued is not None:
        return catalogued
    if component.folder is not None:
        return measure_configs(component.folder, component.library, component.class_name, dtype)
    what = f"how large {component.name!r} ({component.class_name}) is cannot be known here"
    why = f"its part of {component.source.text} is not in the local hub cache, and dmconfig has no figures for it"
    fix = "plan with --hub, which asks the hub for the headers alone, or load it once, which downloads what it needs"
    raise SourceError([resolved.problem(Code.SIZES_UNKNOWN, component.path, what, why=why, fix=fix)])


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
    facts = component.facts
    return fp32_patterns(
        library=component.library,
        dtype=dtype,
        keep=facts.keep_in_fp32_modules,
        keep_strict=facts.keep_in_fp32_modules_strict,
    )


def _from_catalogue(component: Component, dtype: str | None) -> Footprint | None:
    known = find_pipeline(component.source.hub_id) if component.source.hub_id else None
    part = known.component(component.name) if known else None
    return part.footprint(dtype) if part and part.class_name == component.class_name else None


def variant_notes(assembly: Assembly) -> Iterator[str]:
    """Yield a sentence per component that has no weights of the pipeline's variant and loads its plain ones."""
    for component in assembly.modules:
        files = component_weights(component)
        if files is not None and component.variant and files.variant is None:
            yield f"{component.name} has no {component.variant} weights; its plain ones are used"
