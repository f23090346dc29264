"""From an exception in a rehearsed pipeline to a failure that says where, what, and what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from dmconfig.rehearse.model import Failure, FailureKind
from dmconfig.virtual import DeviceMismatchError, UnknownValueError, VirtualOutOfMemoryError
from dmconfig.virtual.ledger import Stretch

_KINDS: Mapping[type[Exception], FailureKind] = {
    VirtualOutOfMemoryError: "out of memory",
    DeviceMismatchError: "wrong device",
    UnknownValueError: "unknown value",
}
_FIXES: Mapping[FailureKind, str] = {
    "unknown value": "nothing can be told of what comes after: please report it, with the file",
    "error": "if the arguments of the call are as they should be (--call sets them), the libraries refuse it on real "
    "devices too, or a stand-in is to blame: please report it with what DMCONFIG_TRACEBACK=1 in the environment shows",
}


def failure_of(error: Exception, phase: str, timeline: Sequence[Stretch], components: Mapping[str, Any]) -> Failure:
    """Return what happened, and in which run of a phase: it has ended when the error arrives.

    Args:
        error: any exception of the call.
        phase: what was running when it arrived.
        timeline: all that ran before.
        components: of the pipeline, by name.
    """
    kind: FailureKind = next((kind for refused, kind in _KINDS.items() if isinstance(error, refused)), "error")
    words = (str(error).strip().splitlines() or [""])[0].partition(" (op ")[0]
    module = getattr(error, "module", None) or _module_in(error.__traceback__, components)
    ended = (stretch.phase for stretch in reversed(timeline) if stretch.phase.partition(".")[0] == _component(module))
    return Failure(
        kind=kind,
        phase=next(ended, phase),
        what=words if kind != "error" else f"{type(error).__name__}: {words}",
        module=module,
        operation=getattr(error, "operation", None) or "",
        devices=devices_named_in(words) if kind != "error" else (),
        fix=_FIXES.get(kind, ""),
        trace="".join(traceback.format_exception(error)) if kind == "error" else "",
    )


def devices_named_in(what: str) -> tuple[str, ...]:
    """Return the devices that the words of a virtual machine's error name: accelerators, and the cpu beside just one.

    CUDA's words for an index that is elsewhere speak of the cpu as one place where it may be.
    """
    numbers = re.findall(r"\bcuda:(\d+)|\bGPU (\d+)", what)
    accelerators = tuple(dict.fromkeys(f"cuda:{named or counted}" for named, counted in numbers))
    others = () if len(accelerators) > 1 else tuple(dict.fromkeys(re.findall(r"\b(?:cpu|meta)\b", what)))
    return (*accelerators, *others)


def _component(module: str) -> str:
    return module.partition(".")[0]


def _module_in(trace: TracebackType | None, components: Mapping[str, Any]) -> str:
    """The path of the innermost module in whose code an error was raised, or nothing."""
    running = [*_modules_of(trace)]
    for name, component in components.items() if running else ():
        for path, module in component.named_modules() if isinstance(component, torch.nn.Module) else ():
            if module is running[-1]:
                return f"{name}.{path}" if path else name
    return ""


def _modules_of(trace: TracebackType | None) -> Iterator[torch.nn.Module]:
    """The modules whose methods an error came through, outermost first."""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            yield owner
        trace = trace.tb_next
