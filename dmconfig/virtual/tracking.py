"""Attributing memory and moves to a pipeline's components, and to the ways in which a pipeline enters them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from dmconfig.virtual.ledger import Ledger
from dmconfig.virtual.state import MachineState
from dmconfig.virtual.whereabouts import qualified

ENTRY_METHODS = (
    "encode", "decode", "generate", "get_image_features", "get_text_features", "encode_image", "encode_text",
    "post_process_latents", "scale", "unscale", "check_text_safety", "check_video_safety", "predict_num_frames",
    "generate_captions", "get_image_tokens", "decode_to_image", "decode_to_mesh",
)  # fmt: skip
"""Methods through which pipelines enter a component, besides calling it or one of its submodules.

The list is that of ``dispatch.carrier``, which is not imported: this package knows nothing of placements.
"""


@contextmanager
def tracked_components(state: MachineState, components: Mapping[str, object]) -> Iterator[None]:
    """Make every entry of a component a phase, and its modules known by name, until the end of the block."""
    modules = {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}
    with ExitStack() as stack:
        stack.callback(state.components.update, dict(state.components))
        stack.callback(state.components.clear)  # last in, first out
        state.components.update(modules)
        for name, module in modules.items():
            stack.enter_context(_Entries(state.ledger, name, module).watched())
        yield


class _Entries:
    """Watches how one component is entered: whatever is called from outside is a phase, its own calls are not."""

    def __init__(self, ledger: Ledger, name: str, module: torch.nn.Module) -> None:
        self._ledger, self._name, self._module = ledger, name, module
        self._inside: object | None = None  # the module or method through which the component was entered

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Stand before every entry, until the end of the block."""
        names = [name for name in ENTRY_METHODS if callable(getattr(type(self._module), name, None))]
        with ExitStack() as stack:
            stack.callback(self._leave)  # what an interrupt left open
            for name in names:
                stack.enter_context(self._watched_method(name))
            for path, part in self._module.named_modules():
                stack.callback(part.register_forward_pre_hook(self._on_call(path), prepend=True).remove)
                stack.callback(part.register_forward_hook(self._on_return, always_call=True).remove)
            yield

    @contextmanager
    def _watched_method(self, name: str) -> Iterator[None]:
        attributes = vars(self._module)
        before = {name: attributes[name]} if name in attributes else {}  # another's hook
        attributes[name] = watched = self._in_phase(name, getattr(self._module, name))
        try:
            yield
        finally:
            if attributes.get(name) is watched:  # else the hook below was taken away, or another put on top
                del attributes[name]
                attributes.update(before)

    def _on_call(self, path: str) -> Callable[[torch.nn.Module, Any], None]:
        def enter(part: torch.nn.Module, _args: Any) -> None:
            self._enter(part, path)

        return enter

    def _on_return(self, part: torch.nn.Module, _args: Any, _output: Any) -> None:
        if self._inside is part:
            self._leave()

    def _in_phase(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call_in_phase(*args: Any, **kwargs: Any) -> Any:
            entered = self._enter(method, name)
            try:
                return method(*args, **kwargs)
            finally:
                if entered:
                    self._leave()

        return call_in_phase

    def _enter(self, entry: object, path: str) -> bool:
        """Start a phase unless the component is running already; tell whether one was started."""
        if self._inside is not None:
            return False
        self._inside = entry
        self._ledger.enter_phase(qualified(self._name, path))
        return True

    def _leave(self) -> None:
        if self._inside is not None:
            self._inside = None
            self._ledger.exit_phase()
