"""The memory of every component of an assembly, from the best source there is: weights, catalogue, configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dmconfig.assembly import Assembly, Component
from dmconfig.catalog import find_pipeline
from dmconfig.errors import Code, DMConfigError, Problem, SourceError
from dmconfig.footprint import Footprint, dominant_dtype, fp32_patterns, measure_configs, measure_tensors
from dmconfig.layout import Layout, lay_out
from dmconfig.resolve import Resolved
from dmconfig.spec import PlacementSpec, Spec
from dmconfig.weights import WeightFiles, find_weights, read_tensors

AUTO = "auto"


def measure(resolved: Resolved, assembly: Assembly) -> Mapping[str, Footprint]:
    """Return a footprint per component that has weights.

    Reads headers only. torch is imported only for a component with neither weights on disk nor an entry in the
    catalogue.

    Raises: SourceError: damaged weights, or a component whose size cannot be known here; all of them at once.
    """
    footprints: dict[str, Footprint] = {}
    problems: list[Problem] = []
    for component in assembly.modules:
        try:
            footprints[component.name] = _measure(component, resolved)
        except DMConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise SourceError(problems)
    return footprints


def lay_out_split(
    resolved: Resolved, spec: Spec, assembly: Assembly, footprints: Mapping[str, Footprint]
) -> Mapping[str, Layout]:
    """Return the layout of every component that the file splits. Imports torch only when there is one.

    Raises: SourceError: a component's config is not on this machine, or its class cannot be built from it.
    """
    layouts: dict[str, Layout] = {}
    problems: list[Problem] = []
    for component in assembly.modules:
        entry = spec.placements.get(component.name)
        if not spec.parts_of(component.name) and not (isinstance(entry, PlacementSpec) and entry.is_spread):
            continue
        name, folder = component.name, component.folder
        if folder is None:
            what = f"how {name!r} ({component.class_name}) can be split cannot be known here"
            why = f"its config, a part of {component.source.text}, is not on this machine"
            fix = "load it once with load_from_yaml or dmconfig run, which downloads what it needs"
            problems.append(resolved.problem(Code.SIZES_UNKNOWN, component.path, what, why=why, fix=fix))
            continue
        try:
            layouts[name] = lay_out(folder, component.library, component.class_name, footprints[name].dtype)
        except DMConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise SourceError(problems)
    return layouts


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


def _measure(component: Component, resolved: Resolved) -> Footprint:
    dtype = None if component.dtype == AUTO else component.dtype
    files = component_weights(component)
    if files is not None:
        return _from_weights(component, files, dtype)
    catalogued = _from_catalogue(component, dtype)
    if catalogued is not None:
        return catalogued
    if component.folder is not None:
        return measure_configs(component.folder, component.library, component.class_name, dtype)
    what = f"how large {component.name!r} ({component.class_name}) is cannot be known here"
    why = f"its part of {component.source.text} is not in the local hub cache, and dmconfig has no figures for it"
    fix = "load it once with load_from_yaml or dmconfig run, which downloads what it needs"
    raise SourceError([resolved.problem(Code.SIZES_UNKNOWN, component.path, what, why=why, fix=fix)])


def _from_weights(component: Component, files: WeightFiles, dtype: str | None) -> Footprint:
    tensors = read_tensors(files)
    facts = component.facts
    patterns = fp32_patterns(
        library=component.library,
        dtype=dtype or dominant_dtype(tensors),
        keep=facts.keep_in_fp32_modules,
        keep_strict=facts.keep_in_fp32_modules_strict,
    )
    return measure_tensors(tensors, dtype=dtype, keep_in_fp32=patterns, tied=facts.tied_weights_keys)


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
