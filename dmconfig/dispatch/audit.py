"""What is true of a placed pipeline, held against its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dmconfig.errors import Code, Problem
from dmconfig.plan import Assignment, Plan, Residency


def audit(pipe: Any, plan: Plan) -> Iterator[Problem]:
    """Yield a problem per component whose weights are not where, or not of the dtype, the plan says.

    Looks at every parameter and buffer, when nothing is running. A tensor on meta is right only where a hook owns it;
    float32 is right beside any dtype, because classes keep some of their layers so.
    """
    for assignment in plan.assignments:
        module = getattr(pipe, assignment.component)
        found = {_place(tensor, owned=_is_owned(part)) for part in module.modules() for tensor in _direct(part)}
        wrong = sorted(found - _right_places(assignment))
        if wrong:
            what = f"{assignment.component} was planned on {assignment.storage_device} and is on {', '.join(wrong)}"
            yield Problem(code=Code.PLACEMENT_DIFFERS, what=what, path=("device_map",))
        tensors = [tensor for tensor in module.parameters() if tensor.is_floating_point()]
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
        if other := sorted(dtypes - {assignment.dtype, "float32"}):
            what = f"{assignment.component} was planned in {assignment.dtype} and is in {', '.join(other)}"
            yield Problem(code=Code.PLACEMENT_DIFFERS, what=what, path=("components", assignment.component))


def _right_places(assignment: Assignment) -> set[str]:
    if assignment.residency is Residency.PER_LEAF:
        # buffers stay on the device, and what the component itself owns rests on the cpu: see PerLeaf
        return {"a hook", assignment.execution_device, assignment.storage_device}
    return {assignment.storage_device}


def _place(tensor: torch.Tensor, *, owned: bool) -> str:
    if tensor.device.type == "meta":
        return "a hook" if owned else "meta, with nobody to bring it"
    return str(tensor.device)


def _is_owned(module: torch.nn.Module) -> bool:
    return hasattr(module, "_hf_hook")


def _direct(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
