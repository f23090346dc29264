"""Taking a call into a component to the device it runs on, and its result back to where the pipeline works.

Pipelines enter a component in more ways than ``forward``: ``vae.decode``, ``get_image_features``, a submodule
called directly (``text_encoder.text_model.final_layer_norm``). Whatever is entered from outside counts as one
entry: weights are brought, tensors are carried in, results are carried home. Calls inside an entry are the
component's own affair and are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dmconfig.dispatch.casting import dtype_given, handed_back, moved_and_cast
from dmconfig.dispatch.moving import copy_to, to_device
from dmconfig.dispatch.weights import Weights

ENTRY_METHODS = (
    "forward", "encode", "decode", "generate", "get_image_features", "get_text_features", "encode_image", "encode_text",
    "post_process_latents", "scale", "unscale", "check_text_safety", "check_video_safety", "predict_num_frames",
    "generate_captions", "get_image_tokens", "decode_to_image", "decode_to_mesh",
)  # fmt: skip
"""Methods through which diffusers' pipelines enter a component, found by searching them for calls on components.

Submodules are entered through their ``__call__``.
"""

_ENCODING = ("encode",)
"""The entries whose results a pipeline goes on to compute with."""


@dataclass(slots=True)
class _Wrapped:
    """A method we stand before: what the instance had in its place (another's hook, or nothing), and what it has."""

    before: Any
    entered: Callable[..., Any] | None = None
    is_active: bool = True


class Carrier:
    """Carries the calls of one component. ``device`` is where it runs, ``home`` where the pipeline works.

    With ``casts``, what enters is also cast to its dtype, and what it encodes takes the dtype of what came.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        weights: Weights,
        *,
        device: torch.device,
        home: torch.device,
        skip_keys: frozenset[str],
        casts: bool = False,
    ) -> None:
        self.casts, self._move = casts, moved_and_cast(module) if casts else copy_to
        self.module, self.weights, self.device, self.home, self.skip_keys = module, weights, device, home, skip_keys
        self._inside: object | None = None  # the module or method through which the component was entered
        self._wrapped: dict[str, _Wrapped] = {}  # by the name of the method
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self) -> None:
        """Stand before every entry of the component."""
        for name in ENTRY_METHODS:
            if callable(getattr(type(self.module), name, None)):
                self._wrap(name)
        for submodule in self.module.modules():
            if submodule is not self.module:
                enter = submodule.register_forward_pre_hook(self._enter_submodule, prepend=True, with_kwargs=True)
                leave = submodule.register_forward_hook(self._leave_submodule, always_call=True)
                self._handles += [enter, leave]

    def detach(self) -> None:
        """Step aside: calls go through as if we were not there, and no submodule has a hook of ours.

        A method that somebody has wrapped since keeps their wrapper, and ours below it lets calls pass.
        """
        for name, wrapped in self._wrapped.items():
            wrapped.is_active = False
            if vars(self.module).get(name) is not wrapped.entered:
                continue
            if wrapped.before is None:
                del vars(self.module)[name]
            else:
                vars(self.module)[name] = wrapped.before
        for handle in self._handles:
            handle.remove()
        self._wrapped.clear()
        self._handles.clear()

    def _wrap(self, name: str) -> None:
        method: Callable[..., Any] = getattr(self.module, name)
        wrapped = _Wrapped(before=vars(self.module).get(name))

        @functools.wraps(method)
        def entered(*args: Any, **kwargs: Any) -> Any:
            if not wrapped.is_active or self._inside is not None:
                return method(*args, **kwargs)
            self._inside = method
            try:
                given = dtype_given(args, kwargs) if self.casts and name in _ENCODING else None
                args, kwargs = self._carry_in(args, kwargs)
                output = self._carry_home(method(*args, **kwargs))
                return output if given is None else handed_back(output, given)
            finally:
                self._inside = None
                self.weights.leave()

        wrapped.entered = entered
        self._wrapped[name] = wrapped
        vars(self.module)[name] = entered

    def _enter_submodule(
        self, submodule: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._inside is not None:
            return None
        self._inside = submodule
        return self._carry_in(args, kwargs)

    def _leave_submodule(self, submodule: torch.nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002 - torch's
        if self._inside is not submodule:
            return None
        self._inside = None
        self.weights.leave()
        return self._carry_home(output)

    def _carry_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.weights.bring()
        carried: tuple[Any, ...] = to_device(args, self.device, move=self._move)
        return carried, to_device(kwargs, self.device, skip=self.skip_keys, move=self._move)

    def _carry_home(self, output: Any) -> Any:
        return to_device(output, self.home)
