"""Which module is running, asked when something went wrong.

Nothing is recorded while all goes well, so this costs nothing then: the answer is read off the Python stack, on which
every call of a module, and every move of one, has a frame whose ``self`` is that module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType

import torch


def running_module(components: Mapping[str, torch.nn.Module]) -> str | None:
    """Return the innermost module that this thread is in, or None.

    Its name starts with a component (``unet.down_blocks.0.resnets.1.conv1``), or where no component has it with the
    class of the outermost module that is running (``UNet2DConditionModel.conv_in``).
    """
    running = list(_modules_on_the_stack())
    if not running:
        return None
    innermost, outermost = running[0], running[-1]
    roots = {**components, type(outermost).__name__: outermost}
    for name, root in roots.items():
        for path, module in root.named_modules():
            if module is innermost:
                return qualified(name, path)
    return type(innermost).__name__


def qualified(component: str, path: str) -> str:
    """Return the name of a part of a component; its path is empty for the component itself."""
    return f"{component}.{path}" if path else component


def _modules_on_the_stack() -> Iterator[torch.nn.Module]:
    """Yield the modules whose methods this thread is in, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.nn.Module):
                yield owner
        frame = frame.f_back
