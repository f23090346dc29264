"""From a file to its rehearsal, or to a sweep: the way that ``load`` goes, as far as it needs no weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dmconfig.checked import Checked
from dmconfig.garbage import gc_paused
from dmconfig.inventory import Inventory
from dmconfig.load import plan_for, plan_of
from dmconfig.rehearse.script import Script, Settings
from dmconfig.resolve import Override, overrides_from_mapping

if TYPE_CHECKING:
    from dmconfig.rehearse.model import Rehearsal
    from dmconfig.rehearse.sweeping import Tried


Check = Callable[[Sequence[Override]], Checked]
"""Reads and checks a file with these overrides: ``load.check_file`` with its other arguments."""


def rehearse_file(
    check: Check,
    overrides: Sequence[Override],
    inventory: Inventory,
    settings: Settings,
    *,
    tries_remedies: bool = False,
    ask_hub: bool = False,
) -> Rehearsal:
    """Return the rehearsal of a file on a machine; where it does not fit, with what may help.

    With ``tries_remedies`` each of these is rehearsed too; with ``ask_hub`` sizes may come from the hub.

    Raises: SpecError: the file has no such pipeline. DMConfigError: as ``check``, ``plan_for`` and ``rehearse``.
    """
    checked = check(overrides)
    checked.pipeline_named(settings.pipeline)
    rehearsal = _rehearsed(checked, inventory, settings, ask_hub=ask_hub)
    from dmconfig.rehearse.remedies import changes, remedies

    def trial(keys: Mapping[str, Any], changed: Settings) -> Rehearsal:
        return _rehearsed(check(_with_keys(overrides, keys)), inventory, changed, ask_hub=ask_hub)

    found = changes(script_of(checked), rehearsal, settings)
    return replace(rehearsal, remedies=remedies(found, trial if tries_remedies else None))


def sweep_machines(
    checked: Checked,
    inventories: Iterable[Inventory],
    grid: Iterable[tuple[int, int]],
    settings: Settings,
    *,
    ask_hub: bool = False,
) -> dict[str, list[Tried]]:
    """Return what becomes of every setting of a grid of sizes and batches, by machine; see ``sweep``.

    Raises: SpecError: the file has no such pipeline. DMConfigError: as ``sweep``.
    """
    checked.pipeline_named(settings.pipeline)
    from dmconfig.rehearse.sweeping import sweep

    pairs, planner = [*grid], functools.partial(plan_of, checked, ask_hub)
    return {
        inventory.name: [*sweep(script_of(checked), planner, inventory, pairs, settings)] for inventory in inventories
    }


def script_of(checked: Checked) -> Script:
    """Return what is rehearsed of a checked spec."""
    return Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)


def _rehearsed(checked: Checked, inventory: Inventory, settings: Settings, *, ask_hub: bool = False) -> Rehearsal:
    plan = plan_for(checked, inventory, ask_hub=ask_hub, settings=settings)
    with gc_paused():  # torch and the libraries above it: a second of it is the collector's
        from dmconfig.rehearse.apart import apart
        from dmconfig.rehearse.rehearsal import rehearse
    return apart(rehearse, script_of(checked), plan, inventory, settings)


def _with_keys(overrides: Sequence[Override], keys: Mapping[str, Any]) -> list[Override]:
    """The overrides with more on top; those that speak of the same keys give way."""
    more = [*overrides_from_mapping(keys)]
    return [*(each for each in overrides if not any(_overlap(each, new) for new in more)), *more]


def _overlap(one: Override, other: Override) -> bool:
    shared = min(len(one.path), len(other.path))
    return one.path[:shared] == other.path[:shared]
