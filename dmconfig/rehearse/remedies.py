"""What would make a pipeline fit that does not: changes by name, and what a rehearsal of each comes to.

A remedy is only tried on request, and each for itself, on the same machine: what is reported as fitting has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dmconfig.assembly import PIPELINE
from dmconfig.check import COUNTS
from dmconfig.errors import DMConfigError
from dmconfig.plan import Residency
from dmconfig.rehearse.inputs import call_of
from dmconfig.rehearse.model import Rehearsal, Remedy
from dmconfig.rehearse.report import verdict
from dmconfig.rehearse.script import Script, Settings
from dmconfig.rehearse.settling import told
from dmconfig.spec import REHEARSED, ComponentSpec

Trial = Callable[[Mapping[str, Any], Settings], Rehearsal]
"""Rehearses the file with some of its keys set otherwise. Raises: DMConfigError: that cannot be."""
_WITH_TILES = ("vae", "movq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change: in words, to the file, and to what is asked."""

    words: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings


def changes(script: Script, rehearsal: Rehearsal, settings: Settings) -> tuple[Change, ...]:
    """Return the changes that may make a rehearsal fit that ran out of memory, the least first; else none."""
    if rehearsal.fits or (rehearsal.failure is not None and rehearsal.failure.kind != "out of memory"):
        return ()
    return (
        *_tiles(script, rehearsal, settings),
        *_other_devices(script, rehearsal, settings),
        *_offload(script, rehearsal, settings),
        *_smaller_batches(script, settings),
    )


def remedies(given: tuple[Change, ...], trial: Trial | None = None) -> tuple[Remedy, ...]:
    """Return changes as remedies; with a trial, each with what came of it."""
    return tuple(_tried(change, trial) for change in given)


def _tried(change: Change, trial: Trial | None) -> Remedy:
    if trial is None:
        return Remedy(words=change.words, change=change.keys)
    try:
        again = trial(change.keys, change.settings)
    except DMConfigError as error:
        return Remedy(words=change.words, change=change.keys, fits=False, verdict=told(error))
    return Remedy(words=change.words, change=change.keys, fits=again.fits, verdict=verdict(again))


def _tiles(script: Script, rehearsal: Rehearsal, settings: Settings) -> Iterator[Change]:
    """Decoding tile by tile, where a decoder is what does not fit."""
    for name in _too_much(rehearsal):
        asked = script.spec.components.get(name)
        if name in _WITH_TILES and not (isinstance(asked, ComponentSpec) and asked.tiling):
            keys = {f"components.{name}.tiling": True}
            yield Change(words=f"set components.{name}.tiling: true", keys=keys, settings=settings)


def _other_devices(script: Script, rehearsal: Rehearsal, settings: Settings) -> Iterator[Change]:
    """The room that phases need, known to the plan; and what does not fit, on each other device."""
    spec, devices = script.spec, [device.id for device in rehearsal.devices]
    if spec.strategy is not None:
        yield _planned(script, settings, {})
    for name, here in _too_much(rehearsal).items() if spec.strategy is None else ():
        for device in devices:
            if device not in here:
                keys = _pinned(script, name, device)
                yield Change(words=f"place {name} on {device}", keys=keys, settings=settings)
    if spec.strategy != "auto":
        yield _planned(script, settings, {"device_map": "auto"})


def _planned(script: Script, settings: Settings, keys: Mapping[str, Any]) -> Change:
    """A change of strategy, with a reserve that is rehearsed for what is asked, which the file then has to say."""
    section = "call" if settings.pipeline == PIPELINE else f"pipelines.{settings.pipeline}.call"
    arguments = call_of(settings, script.assembly.facts_of(settings.pipeline))
    asked = {f"{section}.{name}": value for name, value in arguments.items()}
    words = ", ".join(f"{key}: {value}" for key, value in {**keys, "reserve": REHEARSED, **asked}.items())
    return Change(words=f"set {words}", keys={**keys, "reserve": REHEARSED, **asked}, settings=settings)


def _pinned(script: Script, name: str, device: str) -> Mapping[str, Any]:
    """The keys that place one component on a device and leave the others where they are."""
    written = script.resolved.data.get("device_map", script.spec.device_map)
    return {"device_map": {**(written if isinstance(written, dict) else {"default": written}), name: device}}


def _offload(script: Script, rehearsal: Rehearsal, settings: Settings) -> Iterator[Change]:
    """Weights that are brought when they are needed, whole and then layer by layer."""
    stays = any(assignment.residency is Residency.ALWAYS for assignment in rehearsal.plan.assignments)
    for word in ("cpu_offload_with_hook", "sequential_cpu_offload") if stays else ():
        if word != script.spec.low_memory:
            yield _planned(script, settings, {"device_map": "balanced", "low_memory": word})


def _smaller_batches(script: Script, settings: Settings) -> Iterator[Change]:
    """Fewer pictures at once: half of them, and so on."""
    call = {name: each.value for name, each in script.assembly.call_of(script.spec, settings.pipeline).items()}
    asked = settings.batch or next((call[name] for name in COUNTS if isinstance(call.get(name), int)), 1)
    batch = asked // 2
    while batch >= 1:
        yield Change(words=f"make {batch} at once, not {asked}", settings=replace(settings, batch=batch))
        batch //= 2


def _too_much(rehearsal: Rehearsal) -> Mapping[str, tuple[str, ...]]:
    """The components in whose phases a device has too little, and where each runs; those of the highest peaks."""
    places = {each.component: each.execution_devices for each in rehearsal.plan.assignments}
    names = [device.peak.phase.partition(".")[0] for device in rehearsal.devices if not device.fits]
    if rehearsal.failure is not None:
        names.append(rehearsal.failure.phase.partition(".")[0])
    return {name: places[name] for name in dict.fromkeys(names) if name in places}
