"""The class of a placed pipeline: the diffusers class it was, with the placement as its owner.

diffusers finds a pipeline's execution device by walking components in the order of a signature, and re-installs
offloading after each call; in a mixed placement both are wrong. A subclass made at load time answers instead. It
keeps the name and module of the class it stands for, so saving and type checks see no difference.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dmconfig.dispatch.placement import Placement


class PlacedPipeline:
    """What a placed pipeline answers from its placement; once released, diffusers answers again."""

    _placement: Placement | None = None

    @property
    def _execution_device(self) -> torch.device:
        return self._placement.home if self._placement else super()._execution_device  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        """The device on which latents and embeddings live."""
        return self._placement.home if self._placement else super().device  # type: ignore[misc]

    def maybe_free_model_hooks(self) -> None:
        """Send home what was brought for the call; the placement stays."""
        super().maybe_free_model_hooks()  # type: ignore[misc]
        if self._placement:
            self._placement.rest()

    def remove_all_hooks(self) -> None:
        """Undo the placement: all weights on the cpu, no hook left."""
        if self._placement:
            self._placement.release()
        super().remove_all_hooks()  # type: ignore[misc]

    def reset_device_map(self) -> None:
        """Undo the placement: all weights on the cpu, no hook left, and no device map."""
        if self._placement:
            self._placement.release()


@functools.cache
def placed_class(cls: Any) -> type:
    """Return the placed form of a pipeline class; the same one for the same class."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._placement is not None:
            given = inspect.signature(cls.__call__).bind_partial(self, *args, **kwargs).arguments
            defaults = self._placement.call_defaults()
            kwargs = {**{name: value for name, value in defaults.items() if name not in given}, **kwargs}
        return cls.__call__(self, *args, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__call__": call}
    return type(cls.__name__, (PlacedPipeline, cls), names)
