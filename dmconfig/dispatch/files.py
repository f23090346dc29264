"""What a plan lets rest on disk and has no file there: weights that are in memory, or in a folder that goes.

A pipeline that was just built has none. One that is placed anew has: what was on an accelerator is in no file any
more, and what was cast is in the folder of the placement before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from dmconfig.devices import DISK
from dmconfig.dispatch.audit import count_in_memory, modules_of
from dmconfig.errors import Code, DispatchError, Problem
from dmconfig.offload import OffloadFolder, resting_on_disk
from dmconfig.plan import Assignment, Plan

if TYPE_CHECKING:
    from dmconfig.dispatch.placement import Placement


def without_files(
    modules: Mapping[str, torch.nn.Module], plan: Plan, former: Placement | None
) -> tuple[Assignment, ...]:
    """Return the components of a plan of which something is to rest on disk, and is in no file that stays."""
    folder = former.files if former is not None else None
    return tuple(
        assignment
        for assignment in plan.assignments
        if (folder is not None and folder.has(assignment.component) and assignment.bytes_on_disk)
        or any(
            count_in_memory(modules_of(modules[assignment.component], assignment, each))
            for each in assignment.parts or (assignment,)
            if each.storage_device == DISK
        )
    )


def folder_for(
    lacking: Sequence[Assignment], files: OffloadFolder | None, former: Placement | None
) -> OffloadFolder | None:
    """Return where to write components: to ``files``, or beside where the placement before has written.

    Raises: DispatchError: there is neither; or the folder has no room, or cannot be written to. Nothing has changed.
    """
    if not lacking or files is not None:
        return files
    if former is None or former.files is None:
        raise DispatchError([_no_folder(lacking)])
    return former.files.beside(sum(assignment.bytes_on_disk for assignment in lacking))


def write(modules: Mapping[str, torch.nn.Module], lacking: Sequence[Assignment], files: OffloadFolder) -> None:
    """Write components that are on the cpu to files, and map them from there.

    Raises: DispatchError: writing fails.
    """
    for assignment in lacking:
        files.take(assignment.component, resting_on_disk(modules[assignment.component], assignment))


def _no_folder(lacking: Sequence[Assignment]) -> Problem:
    names = ", ".join(assignment.component for assignment in lacking)
    return Problem(
        code=Code.PLACEMENT_DIFFERS,
        what=f"{names}: to rest on disk, without a file to rest in",
        why="weights that have been on an accelerator, were cast, or were made here are in memory only",
        fix="load the pipeline anew with load_from_yaml, or give dispatch an OffloadFolder as files",
        path=("device_map",),
    )
