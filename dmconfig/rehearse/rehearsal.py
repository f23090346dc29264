"""Running a pipeline's own code on virtual accelerators, without weights, and noting what it takes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dmconfig.dispatch import dispatch
from dmconfig.errors import DMConfigError, SpecError
from dmconfig.facts import PipelineFacts
from dmconfig.garbage import gc_frozen, gc_paused
from dmconfig.inputs import call_with_files, opened
from dmconfig.inventory import Inventory
from dmconfig.plan import Plan
from dmconfig.rehearse.adapters import pictures_for
from dmconfig.rehearse.failures import failure_of
from dmconfig.rehearse.figures import crossings_of, device_peak
from dmconfig.rehearse.inputs import MAIN, arguments, meaningless, steps_of
from dmconfig.rehearse.model import Failure, Rehearsal
from dmconfig.rehearse.outputs import oddity, shape_of_result
from dmconfig.rehearse.scaling import Steps, noted_steps
from dmconfig.rehearse.script import Script, Settings
from dmconfig.rehearse.skeleton import build_skeletons
from dmconfig.virtual import OUTSIDE, VirtualMachine

_READ_VALUES = ("safety_checker",)
"""Components that look at values to decide something: they are told zeros, for which they flag nothing."""


def rehearse(
    script: Script, plan: Plan, inventory: Inventory, settings: Settings, *, is_enforced: bool = True
) -> Rehearsal:
    """Return what a generation takes on a machine, placed by a plan.

    Nothing is read but configs, nothing computed but shapes. Must run where no real CUDA device is visible. With
    ``is_enforced`` a device that is full fails as a real one does; the figures are then those of a second run, in
    which no device is ever full, so that they tell how much is missing.

    Raises: SpecError: the settings ask for what the pipeline does not do. BuildError: a component cannot be built from
        its config. DispatchError: one cannot be placed.
    """
    if wrong := [*meaningless(settings, script.assembly.facts_of(settings.pipeline))]:
        raise SpecError(wrong)
    with _one_thread(), _quiet_libraries():
        run = _run_through(script, plan, inventory, settings, is_enforced=is_enforced)
        if run.failure is None or run.failure.kind != "out of memory":
            return _rehearsal(run, script, plan, inventory)
        unlimited = _run_through(script, plan, inventory, settings, is_enforced=False)
        return replace(_rehearsal(unlimited, script, plan, inventory), failure=run.failure, odd_output="")


@dataclass(slots=True, kw_only=True)
class _Run:
    """One run of a pipeline, of all that share its components: its machine, what went in, and what came of it."""

    pipes: Mapping[str, Any]
    pipe: Any
    facts: PipelineFacts
    machine: VirtualMachine
    stand_ins: tuple[str, ...]
    steps: Mapping[str, Steps]
    given: Mapping[str, Any] = field(default_factory=dict)
    output: tuple[int, ...] = ()
    failure: Failure | None = None


def _run_through(script: Script, plan: Plan, inventory: Inventory, settings: Settings, *, is_enforced: bool) -> _Run:
    """Build the pipeline, place it on a machine of its own, and call it."""
    with gc_paused():
        dtypes = {assignment.component: assignment.dtype for assignment in plan.assignments}
        pipes, stand_ins = build_skeletons(script.resolved, script.assembly, dtypes)
    facts, defaults = script.assembly.facts_of(settings.pipeline), _defaults(script, settings)
    pipe = pipes[settings.pipeline]
    steps = steps_of(pipe, facts, settings, defaults)
    capacities = [device.total_bytes for device in inventory.accelerators]
    machine = VirtualMachine(capacities, values=False, zero_phases=_READ_VALUES, enforce_capacity=is_enforced)
    run = _Run(pipes=pipes, pipe=pipe, facts=facts, machine=machine, stand_ins=stand_ins, steps=steps)
    phase = "placing"
    with gc_frozen(), machine, torch.no_grad():
        try:
            _place(run, script, plan)
            phase = OUTSIDE
            _call(run, script, settings)
        except DMConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - code of other libraries on new arguments: anything may come
            run.failure = failure_of(error, phase, machine.ledger.timeline, pipe.components)
    return run


def _defaults(script: Script, settings: Settings) -> dict[str, Any]:
    """What the file gives to the call, with paths of pictures in full."""
    return call_with_files(script.resolved, script.assembly.call_of(script.spec, settings.pipeline))


def _place(run: _Run, script: Script, plan: Plan) -> None:
    """Put every component on the machine, where the plan has it; the books begin afterwards."""
    first, *others = run.pipes.values()
    parts = {name: part for pipe in run.pipes.values() for name, part in pipe.components.items()}
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            run.machine.adopt(part)
    sharing: list[tuple[Any, Mapping[str, Any]]] = [(each, {}) for each in others]
    options = script.spec.group_offload.model_dump()
    dispatch(first, plan, sharing=sharing, in_turn=script.assembly.in_turn, group_options=options, is_mapped=False)
    run.machine.ledger.reset()


def _call(run: _Run, script: Script, settings: Settings) -> None:
    """Call the pipeline, with as many steps as are rehearsed."""
    defaults = opened(_defaults(script, settings))
    given = arguments(run.pipe, run.facts, settings, defaults, run.steps)
    run.given = {**given, **pictures_for(run.pipe, run.facts, given, script.assembly.adapters)}
    ledger = run.machine.ledger
    with run.machine.track(run.pipe.components), noted_steps(run.pipe, ledger, run.steps):
        run.output = shape_of_result(run.pipe(**run.given))


def _rehearsal(run: _Run, script: Script, plan: Plan, inventory: Inventory) -> Rehearsal:
    """The figures of a run."""
    quantised = ((each.name, each.quantization) for each in script.assembly.modules)
    ledger, main = run.machine.ledger, run.steps[MAIN]
    return Rehearsal(
        plan=plan,
        pipeline=run.facts.class_name,
        steps=(main.run, main.asked),
        arguments={name: value for name, value in run.given.items() if isinstance(value, (str, int, float))},
        devices=tuple(device_peak(ledger, device) for device in inventory.accelerators),
        crossings=tuple(crossings_of(ledger, [*run.steps.values()], plan, inventory)),
        output=run.output,
        odd_output="" if run.failure else oddity(run.output, run.given),
        stand_ins=run.stand_ins,
        by_rule={name: asked.quant_backend for name, asked in quantised if asked is not None},
        guesses=dict(run.machine.guesses),
        failure=run.failure,
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: what is left to compute are small tensors, which others only slow down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep the libraries' warnings off the screen: they speak of a run that does not take place."""
    import diffusers
    import transformers

    levels = diffusers.logging.get_verbosity(), transformers.logging.get_verbosity()
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        diffusers.logging.set_verbosity(levels[0])
        transformers.logging.set_verbosity(levels[1])
