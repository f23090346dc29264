"""From a spec to an assembly: which pipelines it is of, their components, and what is put on or made of them.

Reads small JSON files and the facts of classes; no weights, no machine, and neither torch nor diffusers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dmconfig.adapters import changed_components, locate_adapters, unplaceable_adapters
from dmconfig.assembly import Assembly, Component, Made
from dmconfig.checkpoint import FileHeaders
from dmconfig.components import Assembler, is_made, unknown_config_values
from dmconfig.errors import Code, DMConfigError, Problem, nearest
from dmconfig.facts import ComponentSlot, PipelineFacts, class_facts, own_class_facts
from dmconfig.paths import ConfigPath
from dmconfig.pipelines import pipeline_class, pipeline_source, sharing_pipelines, with_connected
from dmconfig.resolve import Resolved
from dmconfig.spec import ComponentSpec, Spec

_MOTION_ADAPTER = "motion_adapter"


def assemble(resolved: Resolved, spec: Spec, hub: FileHeaders | None = None) -> tuple[Assembly, tuple[Problem, ...]]:
    """Return what the pipeline of spec is made of, and what is wrong with its components.

    A component that is missing, unknown or cannot be located is among the problems and not in the assembly, so that
    other rules can be held against the rest. ``hub`` is asked what files of weights hold that are not here.

    Raises: SpecError: the source or the pipeline class is missing or unknown.
    """
    source, file, index = pipeline_source(resolved, spec, hub)
    facts, code = pipeline_class(resolved, spec, source, index)
    index = with_connected(resolved, spec, source, index, facts)
    sharing, problems = sharing_pipelines(resolved, spec)
    class_path: ConfigPath = ("pipeline", "class" if spec.pipeline.class_name else "source")
    classes: dict[ConfigPath, PipelineFacts] = {
        class_path: facts,
        **{("pipelines", each.name, "class"): each.facts for each in sharing},
    }
    problems += _unknown_components(resolved, spec, *classes.values())
    assemblers = [Assembler(resolved, spec, source, file, index, each, path, hub) for path, each in classes.items()]
    found, unfit = _components(assemblers)
    made, unmade = _made(resolved, spec, facts)
    known = own_class_facts(code.files, code.class_name) if code else class_facts("diffusers", facts.class_name)
    adapters, wrong = locate_adapters(resolved, spec, facts, known.ancestors if known else frozenset())
    assembly = Assembly(
        class_name=facts.class_name,
        source=source,
        facts=facts,
        components=tuple(component for component in found.values() if component is not None),
        absent=tuple(name for name, component in found.items() if component is None),
        config={name: value for name, value in index.config.items() if name in facts.config_parameters},
        sharing=sharing,
        adapters=adapters,
        made=made,
        code=code,
    )
    if not wrong:
        wrong = [*_unplaceable(resolved, spec, assembly)]
        assembly = _with_changes(assembly)
    return assembly, (*problems, *unfit, *unmade, *wrong)


def _unplaceable(resolved: Resolved, spec: Spec, assembly: Assembly) -> Iterator[Problem]:
    """What adapters are put on must be there; an image encoder that the file leaves out by name is left out."""
    names = [component.name for component in assembly.modules]
    without = [name for name, asked in spec.components.items() if asked is None]
    types = {slot.name: slot.types for slot in assembly.facts.slots}
    image_encoder = next(iter(types.get("image_encoder", ())), "CLIPVisionModelWithProjection")
    yield from unplaceable_adapters(
        resolved, assembly.adapters, names, assembly.denoiser, without=without, image_encoder=image_encoder
    )


def _with_changes(assembly: Assembly) -> Assembly:
    """The assembly, with components that adapters change kept from resting in their files."""
    names = [component.name for component in assembly.modules]
    changed = dict(changed_components(assembly.adapters, names, assembly.denoiser))
    components = (
        replace(each, refused={**each.refused, "disk": changed[each.name]}) if each.name in changed else each
        for each in assembly.components
    )
    return replace(assembly, components=tuple(_with_motion(components)))


def _with_motion(components: Iterable[Component]) -> Iterator[Component]:
    """The components, with a UNet for pictures that is to make films known as what it becomes.

    Source: constructors of diffusers' AnimateDiff pipelines, which put a ``UNetMotionModel`` in its place, made of
    copies of it and of the motion adapter (``from_unet2d``). That class does not say which of its modules stay whole.
    """
    components = [*components]
    adapted = any(each.name == _MOTION_ADAPTER for each in components)
    why = f"its pipeline makes another UNet of it and {_MOTION_ADAPTER}"
    for each in components:
        if adapted and each.name == "unet" and each.class_name == "UNet2DConditionModel":
            refused = {**each.refused, "disk": f"{why}, which no file holds", "split": f"{why}, which stays whole"}
            yield replace(each, takes_in=_MOTION_ADAPTER, refused=refused)
        else:
            yield each


def _components(assemblers: Iterable[Assembler]) -> tuple[dict[str, Component | None], list[Problem]]:
    """Return the components of all classes, each once, None where it is left out; and what is wrong with them."""
    found: dict[str, Component | None] = {}
    problems: list[Problem] = []
    tried: set[str] = set()
    for assembler in assemblers:
        for slot in assembler.facts.slots:
            try:
                if slot.name not in tried:
                    tried.add(slot.name)
                    found[slot.name] = component = assembler.component(slot)
                    problems += assembler.unfit(slot, component) if component else ()
                elif slot.name in found:
                    problems += assembler.unshared(slot, found[slot.name])
            except DMConfigError as error:
                problems += error.problems
    return found, problems


def _made(resolved: Resolved, spec: Spec, facts: PipelineFacts) -> tuple[tuple[Made, ...], list[Problem]]:
    """Return what the file changes of the components that a modular pipeline makes itself, and what it may not."""
    made: list[Made] = []
    problems: list[Problem] = []
    for name, asked in spec.components.items():
        if not is_made(facts, spec, name):
            continue
        slot = next(slot for slot in facts.slots if slot.name == name)
        wrong = [*_unmakeable(resolved, slot, asked)]
        if isinstance(asked, ComponentSpec) and not wrong:
            made.append(Made(name=name, class_name=asked.class_name, config=asked.config_values or {}))
        problems += wrong
    return tuple(made), problems


def _unmakeable(
    resolved: Resolved, slot: ComponentSlot, asked: ComponentSpec | tuple[ComponentSpec, ...] | None
) -> Iterator[Problem]:
    """What blocks cannot make: nothing, several, another kind of thing, or one with values that its class has not."""
    path: ConfigPath = ("components", slot.name)
    if not isinstance(asked, ComponentSpec):
        what = f"{slot.name!r} is made by the pipeline's blocks, which cannot do without it"
        yield resolved.problem(Code.UNFIT_FOR_MODULAR, path, what, fix="remove the line", key=True)
        return
    for key in asked.model_fields_set - {"class_name", "config"}:
        what = f"{slot.name!r} is made by the pipeline's blocks and loaded from nowhere, so {key} means nothing for it"
        fix = "remove the line, or give it a source; class and config change what is made"
        yield resolved.problem(Code.UNFIT_FOR_MODULAR, (*path, key), what, fix=fix, key=True)
    name = asked.class_name or next(iter(slot.types), "")
    facts = class_facts("diffusers", name)
    if facts is None or "ConfigMixin" not in facts.ancestors:
        what = f"diffusers makes no {name!r} of values in a config"
        yield resolved.problem(Code.UNFIT_FOR_MODULAR, path, what, fix=f"give components.{slot.name} a source")
    else:
        yield from unknown_config_values(resolved, (*path, "config"), asked.config_values, facts)


def unknown_component(resolved: Resolved, path: ConfigPath, facts: PipelineFacts, *more: str) -> Problem:
    """Return the problem of a component name that the pipeline class does not have; ``more`` are other known words."""
    name = str(path[-1]).partition(".")[0]  # a key of a device map may name a part
    names = [slot.name for slot in facts.slots]
    meant = nearest(name, [*names, *more])
    what = f"{name!r} is not a component of {facts.class_name}"
    why = f"its components are: {', '.join(names)}"
    fix = f"did you mean {meant!r}?" if meant else "remove it, or name the class that has it under pipeline.class"
    return resolved.problem(Code.UNKNOWN_COMPONENT, path, what, why=why, fix=fix, key=True)


def _unknown_components(resolved: Resolved, spec: Spec, *classes: PipelineFacts) -> Iterator[Problem]:
    known = {slot.name for facts in classes for slot in facts.slots}
    for name in spec.components:
        if name not in known:
            yield unknown_component(resolved, ("components", name), classes[0], *known)
