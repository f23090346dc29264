"""All of a pipeline's components, placed by a plan: attach everything, know everything, undo everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dmconfig.dispatch.carrier import Carrier
from dmconfig.dispatch.placed import placed_class
from dmconfig.dispatch.weights import Brought, PerLeaf, Resident, Turns, Weights
from dmconfig.errors import Code, DispatchError, Problem
from dmconfig.plan import Assignment, Plan, Residency
from dmconfig.progress import Progress

SEED = "seed"


class Placement:
    """The one owner of where a pipeline lives.

    ``home`` is the pipeline's execution device. ``rest`` is called by the pipeline after each generation; ``release``
    undoes everything and may be called twice.
    """

    def __init__(self, pipe: Any, plan: Plan, call: Mapping[str, Any], in_turn: tuple[str, ...]) -> None:
        self.pipe, self.plan, self.home = pipe, plan, torch.device(plan.execution_device)
        self._call, self._in_turn = call, in_turn
        self._turns: dict[str, Turns] = {}
        self._weights: dict[str, Weights] = {}
        self._carriers: list[Carrier] = []

    def attach(self, assignment: Assignment) -> None:
        """Place one component."""
        module = getattr(self.pipe, assignment.component)
        weights = self._weights_of(module, assignment)
        weights.attach()
        self._weights[assignment.component] = weights
        device = torch.device(assignment.execution_device)
        if device != self.home or assignment.residency is not Residency.ALWAYS:
            carrier = Carrier(module, weights, device=device, home=self.home, skip_keys=_skip_keys(module))
            carrier.attach()
            self._carriers.append(carrier)

    def rest(self) -> None:
        """Send every component that was brought home; called when the pipeline's call ends."""
        for weights in self._weights.values():
            weights.rest()

    def release(self) -> None:
        """Put all weights on the cpu, leave no hook, and give the pipeline back to diffusers."""
        for carrier in reversed(self._carriers):
            carrier.detach()
        for weights in self._weights.values():
            weights.detach()
        self._carriers.clear()
        self._weights.clear()
        for pipe in _with_inner_pipelines(self.pipe):
            pipe._placement = None
            pipe.hf_device_map = None

    def call_defaults(self) -> dict[str, Any]:
        """Return the call's defaults of the file; a seed becomes a new generator each time, on the cpu.

        A cpu generator gives the same picture wherever the denoiser runs.
        """
        defaults = {name: value for name, value in self._call.items() if name != SEED}
        if SEED in self._call:
            defaults["generator"] = torch.Generator("cpu").manual_seed(self._call[SEED])
        return defaults

    def _weights_of(self, module: torch.nn.Module, assignment: Assignment) -> Weights:
        device = torch.device(assignment.execution_device)
        match assignment.residency:
            case Residency.ALWAYS:
                return Resident(module, device)
            case Residency.WHILE_RUNNING:
                turns = self._turns.setdefault(assignment.execution_device, Turns())
                return Brought(module, device, turns if assignment.component in self._in_turn else None)
            case Residency.PER_LEAF:
                return PerLeaf(module, device, _skip_keys(module))


def dispatch(pipe: Any, plan: Plan, *, call: Mapping[str, Any], in_turn: tuple[str, ...], progress: Progress) -> Any:
    """Place a built pipeline by a plan and return it; it answers for itself from then on.

    Every component is then where the plan says, which is checked. ``call`` are the defaults of the pipeline's call.
    ``in_turn`` are the components that use an accelerator one after the other.

    Raises: DispatchError: a component could not be placed, or is not where the plan says. Nothing stays half placed.
    """
    placement = Placement(pipe, plan, call, in_turn)
    try:
        for assignment in progress.track("place", plan.assignments, lambda a: f"{a.component} on {a.execution_device}"):
            placement.attach(assignment)
        problems = [*audit(pipe, plan)]
        if problems:
            raise DispatchError(problems)
    except (RuntimeError, ValueError) as error:  # torch and accelerate say so when a device cannot hold or take it
        placement.release()
        what = f"placing stopped: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise DispatchError([Problem(code=Code.PLACEMENT_DIFFERS, what=what)]) from error
    except BaseException:
        placement.release()
        raise
    for inner in _with_inner_pipelines(pipe):
        inner.__class__ = placed_class(inner.__class__)
        inner._placement = placement
        inner.hf_device_map = dict(plan.device_map)
    return pipe


def audit(pipe: Any, plan: Plan) -> Iterator[Problem]:
    """Yield a problem per component whose weights are not where, or not of the dtype, the plan says.

    A tensor on meta is right only where a hook owns it.
    """
    for assignment in plan.assignments:
        module = getattr(pipe, assignment.component)
        planned = "meta" if assignment.residency is Residency.PER_LEAF else assignment.storage_device
        found = {str(tensor.device) for tensor in module.parameters()}
        if found - {planned}:
            what = f"{assignment.component} was planned on {planned} and is on {', '.join(sorted(found))}"
            yield Problem(code=Code.PLACEMENT_DIFFERS, what=what, path=("device_map",))
        dtypes = {
            str(tensor.dtype).removeprefix("torch.") for tensor in module.parameters() if tensor.is_floating_point()
        }
        if dtypes - {assignment.dtype, "float32"}:
            what = f"{assignment.component} was planned in {assignment.dtype} and is in {', '.join(sorted(dtypes))}"
            yield Problem(code=Code.PLACEMENT_DIFFERS, what=what, path=("components", assignment.component))


def _skip_keys(module: torch.nn.Module) -> frozenset[str]:
    """The arguments that a model writes into; diffusers and transformers each have a name for the list."""
    keys = getattr(module, "_skip_keys", None) or getattr(module, "_skip_keys_device_placement", None) or ()
    return frozenset([keys] if isinstance(keys, str) else keys)


def _with_inner_pipelines(pipe: Any) -> Iterator[Any]:
    """Yield a pipeline and the pipelines it is made of (combined ones share their components)."""
    from diffusers import DiffusionPipeline

    yield pipe
    yield from (value for value in list(vars(pipe).values()) if isinstance(value, DiffusionPipeline))
