"""All of a pipeline's components, placed by a plan: attach everything, know everything, undo everything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache

from dmconfig.dispatch.audit import audit
from dmconfig.dispatch.carrier import Carrier
from dmconfig.dispatch.files import folder_for, without_files, write
from dmconfig.dispatch.placed import placed_class
from dmconfig.dispatch.split import Split
from dmconfig.dispatch.weights import Brought, Grouped, PerLeaf, Resident, Turns, Weights
from dmconfig.errors import Code, DispatchError, Problem
from dmconfig.offload import OffloadFolder
from dmconfig.plan import Assignment, Plan, Residency
from dmconfig.progress import NoProgress, Progress

DEFAULT_GROUPS: Mapping[str, Any] = {"offload_type": "leaf_level", "num_blocks_per_group": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedComponent:
    """One component in its place: the owner of its weights, and its carrier where calls have to be carried."""

    assignment: Assignment
    module: torch.nn.Module
    weights: Weights
    carrier: Carrier | None

    def attach(self) -> None:
        """Put the weights where they rest and stand before the entries."""
        self.weights.attach()
        if self.carrier is not None:
            self.carrier.attach()

    def detach(self) -> None:
        """Leave no hook. Weights that did not stay on an accelerator are whole on the cpu; the others stay there."""
        if self.carrier is not None:
            self.carrier.detach()
        self.weights.detach()


class Placement:
    """The one owner of where a pipeline lives, and of undoing it.

    ``home`` is the pipeline's execution device; ``pipes`` are the pipelines that share the components, the placed one
    first; ``asked`` is what the file says of places and dtypes; ``files`` holds weights that were cast and rest on
    disk, and goes with the placement. Everything here leaves the placement as it was when
    it fails.
    """

    def __init__(self, plan: Plan, *, in_turn: tuple[str, ...], group_options: Mapping[str, Any]) -> None:
        self.plan, self.in_turn, self.group_options = plan, in_turn, group_options
        self.asked: Mapping[str, Any] = {}
        self.files: OffloadFolder | None = None
        self.home = torch.device(plan.execution_device)
        self.pipes: list[Any] = []
        self.components: dict[str, PlacedComponent] = {}
        self.is_suspended = False
        self._turns: dict[str, Turns] = {}

    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The components by name."""
        return {name: placed.module for name, placed in self.components.items()}

    def place(self, module: torch.nn.Module, assignment: Assignment) -> None:
        """Place one component, in the stead of the one of that name if there is one."""
        placed = self._prepare(module, assignment)
        try:
            placed.attach()
        except BaseException:
            placed.detach()
            module.to("cpu")
            raise
        self.components[assignment.component] = placed

    def rest(self) -> None:
        """Send every component that was brought home; called when the pipeline's call ends."""
        for placed in self.components.values():
            placed.weights.rest()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Take every hook off for a while, so that others may change or read the components, and put them on again."""
        self.rest()
        for placed in self.components.values():
            placed.detach()
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False
            for placed in self.components.values():
                placed.attach()

    def release(self) -> None:
        """Put all weights on the cpu, leave no hook, and give the pipelines back to diffusers. May be called twice."""
        self.rest()
        for placed in self.components.values():
            placed.detach()
            placed.module.to("cpu")
            if self.files is not None and self.files.has(placed.assignment.component):
                self.files.bring_back(placed.module.parameters())
        clear_device_cache()
        self._forget()

    def discard(self) -> None:
        """Leave no hook and let go of everything, without moving weights first. May be called twice."""
        for placed in self.components.values():
            placed.detach()
        self._forget()

    def swap(self, name: str, module: torch.nn.Module, assignment: Assignment) -> None:
        """Put another module in a component's place; when that fails, the old one is there as before.

        The old one goes to the cpu first, so that devices need room for one of them, and the host for both.
        """
        old = self.components[name]
        self.rest()
        old.detach()
        old.module.to("cpu")
        clear_device_cache()
        try:
            self.place(module, assignment)
        except BaseException:
            old.attach()
            raise
        self.plan = replace(
            self.plan, assignments=tuple(assignment if a.component == name else a for a in self.plan.assignments)
        )

    def adopt(self, pipe: Any, call: Mapping[str, Any]) -> None:
        """Answer for a pipeline made of these components, and for the pipelines it is itself made of.

        ``call`` are defaults of its call.
        """
        for each in with_inner_pipelines(pipe):
            each.__class__ = placed_class(each.__class__)
            each._placement = self
            each._call = call if each is pipe else {}
            each.hf_device_map = dict(self.plan.device_map)
            self.pipes.append(each)

    def _prepare(self, module: torch.nn.Module, assignment: Assignment) -> PlacedComponent:
        device = torch.device(assignment.execution_device)
        weights = self._weights_of(module, assignment, device)
        carrier = None
        if device != self.home or assignment.residency is not Residency.ALWAYS or assignment.casts_inputs:
            carrier = Carrier(
                module,
                weights,
                device=device,
                home=self.home,
                skip_keys=_skip_keys(module),
                casts=assignment.casts_inputs,
            )
        return PlacedComponent(assignment=assignment, module=module, weights=weights, carrier=carrier)

    def _weights_of(self, module: torch.nn.Module, assignment: Assignment, device: torch.device) -> Weights:
        match assignment.residency:
            case Residency.ALWAYS:
                return Resident(module, device)
            case Residency.WHILE_RUNNING:
                turns = self._turns.setdefault(assignment.execution_device, Turns())
                return Brought(module, device, turns if assignment.component in self.in_turn else None)
            case Residency.PER_GROUP:
                return Grouped(module, device, self.group_options)
            case Residency.PER_LEAF:
                return PerLeaf(module, device, _skip_keys(module))
            case Residency.SPLIT:
                return Split(module, assignment.parts, _skip_keys(module))

    def _forget(self) -> None:
        self.components.clear()
        if self.files is not None:
            self.files.close()
        for pipe in self.pipes:
            pipe._placement = None
            pipe.hf_device_map = None
        self.pipes.clear()


def dispatch(
    pipe: Any,
    plan: Plan,
    *,
    call: Mapping[str, Any] | None = None,
    sharing: Iterable[tuple[Any, Mapping[str, Any]]] = (),
    in_turn: tuple[str, ...] = (),
    group_options: Mapping[str, Any] | None = None,
    asked: Mapping[str, Any] | None = None,
    files: OffloadFolder | None = None,
    is_mapped: bool = True,
    progress: Progress | None = None,
) -> Any:
    """Place a built pipeline by a plan and return it; it answers for itself from then on.

    Every component is then where the plan says, which is checked. A pipeline that is placed so already is left as it
    is, and one that is placed otherwise is placed anew: by its former settings where none are given, and with what
    is to rest on disk and is in no file written to where the former placement has written, or to ``files``.

    Args:
        pipe: with every component of the plan loaded, but those that only ``sharing`` has.
        plan: where each goes.
        call: defaults of the pipeline's call, as ``inputs.call_with_files`` returns them; None: as before, or none.
        sharing: more pipelines on the same components, each with the defaults of its call; those that share them
            already go on doing so.
        in_turn: the components that use an accelerator one after the other; empty: as before, or all of them.
        group_options: of diffusers' ``apply_group_offloading``, for components brought in groups.
        asked: what the file says of places and dtypes, for reports.
        files: where weights are, or are to be written, that rest on disk and have no file; closed with the placement.
        is_mapped: whether what rests on disk is mapped from files, and so is checked to be; not where it has no data.
        progress: told which component is being placed.

    Raises: DispatchError: a component is to rest on disk, and there is no folder to write it to: nothing has changed.
        Or one could not be placed, or is not where the plan says: all are on the cpu then, and nothing is half placed.
    """
    former = placement_of(pipe)
    if former is not None:
        if former.plan == plan:
            return pipe
        former.rest()
    pipes = {**_pipes_of(pipe, former, call), **dict(sharing)}
    modules = {assignment.component: _module(assignment.component, pipes) for assignment in plan.assignments}
    if former is None:  # else our own hooks hold weights back
        _refuse_empty(modules)
    lacking = without_files(modules, plan, former) if is_mapped else ()
    files = folder_for(lacking, files, former)
    placement = _new_placement(plan, former, in_turn, group_options)
    placement.asked, placement.files = asked or {}, files
    if former is not None:
        former.release()
    try:
        if files is not None:
            write(modules, lacking, files)
        _place(placement, modules, progress or NoProgress(), is_mapped=is_mapped)
    except (RuntimeError, ValueError) as error:  # torch and accelerate say so when a device cannot hold or take it
        placement.release()
        reason = (str(error).splitlines() or [""])[0]
        what = f"placing stopped: {type(error).__name__}: {reason}"
        raise DispatchError([Problem(code=Code.PLACEMENT_DIFFERS, what=what)]) from error
    except BaseException:
        placement.release()
        raise
    for each, defaults in pipes.items():
        if each not in placement.pipes:  # an inner pipeline comes with the one that it is in
            placement.adopt(each, defaults)
    return pipe


def _place(
    placement: Placement, modules: Mapping[str, torch.nn.Module], progress: Progress, *, is_mapped: bool
) -> None:
    """Place every component of a plan, and see that it is there."""
    plan = placement.plan
    for assignment in progress.track("place", plan.assignments, lambda a: f"{a.component} on {a.execution_device}"):
        placement.place(modules[assignment.component], assignment)
    if problems := [*audit(modules, plan, is_mapped=is_mapped)]:
        raise DispatchError(problems)


def _new_placement(
    plan: Plan, former: Placement | None, in_turn: tuple[str, ...], group_options: Mapping[str, Any] | None
) -> Placement:
    """A placement with what is given, else what the one before had, else what holds for any."""
    before = (former.in_turn, former.group_options) if former else (tuple(plan.device_map), DEFAULT_GROUPS)
    options = before[1] if group_options is None else group_options
    return Placement(plan, in_turn=in_turn or before[0], group_options=options)


def _pipes_of(pipe: Any, former: Placement | None, call: Mapping[str, Any] | None) -> dict[Any, Mapping[str, Any]]:
    """A pipeline and those that share its components, with the defaults of their calls."""
    before = {each: each._call for each in former.pipes} if former is not None else {}
    own = before.pop(pipe, {})
    return {pipe: own if call is None else call, **before}


def _module(name: str, pipes: Iterable[Any]) -> torch.nn.Module:
    """The component of a name, of the first pipeline that has it."""
    module: torch.nn.Module = next(getattr(pipe, name) for pipe in pipes if getattr(pipe, name, None) is not None)
    return module


def _refuse_empty(modules: Mapping[str, torch.nn.Module]) -> None:
    """Refuse components without data: they were never loaded, or somebody else's hooks hold their weights."""
    empty = [name for name, module in modules.items() if has_empty_tensors(module)]
    if empty:
        what = f"{', '.join(empty)}: there are tensors on meta, so the weights were never loaded, or are offloaded"
        fix = "load the component with its weights, and remove others' offload hooks from it"
        raise DispatchError([Problem(code=Code.PLACEMENT_DIFFERS, what=what, fix=fix)])


def has_empty_tensors(module: torch.nn.Module) -> bool:
    """Tell whether a module has tensors without data."""
    return any(tensor.device.type == "meta" for tensor in (*module.parameters(), *module.buffers()))


def placement_of(pipe: Any) -> Placement | None:
    """Return the placement of a pipeline that dmconfig placed and nobody released, else None."""
    placement: Placement | None = getattr(pipe, "_placement", None)
    return placement


def with_inner_pipelines(pipe: Any) -> Iterator[Any]:
    """Yield a pipeline and the pipelines it is made of (combined ones share their components)."""
    from diffusers import DiffusionPipeline

    yield pipe
    yield from (value for value in list(vars(pipe).values()) if isinstance(value, DiffusionPipeline))


def _skip_keys(module: torch.nn.Module) -> frozenset[str]:
    """The arguments that a model writes into; diffusers and transformers each have a name for the list."""
    keys = getattr(module, "_skip_keys", None) or getattr(module, "_skip_keys_device_placement", None) or ()
    return frozenset([keys] if isinstance(keys, str) else keys)
