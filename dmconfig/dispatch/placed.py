"""The class of a placed pipeline: the diffusers class it was, with the placement as its owner.

diffusers finds a pipeline's execution device by walking components in the order of a signature, and re-installs
offloading after each call; in a mixed placement both are wrong. A subclass made at load time answers instead. It
keeps the name and module of the class it stands for, so saving and type checks see no difference.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from dmconfig.inputs import SEED, opened

if TYPE_CHECKING:
    from dmconfig.dispatch.placement import Placement

CHANGING = (
    "load_lora_weights", "unload_lora_weights", "fuse_lora", "unfuse_lora", "delete_adapters", "set_adapters",
    "load_textual_inversion", "unload_textual_inversion", "load_ip_adapter", "unload_ip_adapter",
)  # fmt: skip
"""Methods of diffusers that add, change or remove weights: they find the components without hooks, as they expect."""


class Placed:
    """What a placed pipeline of any kind answers from its placement; once released, diffusers answers again."""

    _placement: Placement | None = None
    _call: Mapping[str, Any] = MappingProxyType({})

    @property
    def _execution_device(self) -> torch.device:
        return self._placement.home if self._placement else super()._execution_device  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        """The device on which latents and embeddings live."""
        return self._placement.home if self._placement else super().device  # type: ignore[misc]

    def reset_device_map(self) -> None:
        """Undo the placement: all weights on the cpu, no hook left, and no device map."""
        if self._placement:
            self._placement.release()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the whole pipeline to one device, or cast it: this undoes the placement first."""
        if self._placement:
            self._placement.release()
        return super().to(*args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the pipeline with all of its weights, wherever they rest; the placement stays."""
        if self._placement is None:
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        with self._placement.suspended():
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


class PlacedPipeline(Placed):
    """What a placed ``DiffusionPipeline`` answers beside this; a modular pipeline has nothing of the kind."""

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

    def enable_model_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """Hand offloading to diffusers: this undoes the placement first."""
        self._hand_over(super().enable_model_cpu_offload, *args, **kwargs)  # type: ignore[misc]

    def enable_sequential_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """Hand offloading to diffusers: this undoes the placement first."""
        self._hand_over(super().enable_sequential_cpu_offload, *args, **kwargs)  # type: ignore[misc]

    def enable_group_offload(self, *args: Any, **kwargs: Any) -> None:
        """Hand offloading to diffusers: this undoes the placement first."""
        self._hand_over(super().enable_group_offload, *args, **kwargs)  # type: ignore[misc]

    def _hand_over(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._placement:
            self._placement.release()
        method(*args, **kwargs)


@functools.cache
def placed_class(cls: Any) -> type:
    """Return the placed form of a pipeline class; the same one for the same class, and a placed class itself."""
    if issubclass(cls, Placed):
        return cls  # type: ignore[no-any-return]
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    changing = {name: _changing(getattr(cls, name)) for name in CHANGING if hasattr(cls, name)}
    base = PlacedPipeline if hasattr(cls, "maybe_free_model_hooks") else Placed
    return type(cls.__name__, (base, cls), {**names, **changing, "__call__": _call_of(cls)})


def _call_of(cls: Any) -> Any:
    """The class's call, with the defaults of the file for what the caller does not give.

    A modular pipeline says nobody when its call ends, so what was brought for it is sent home here.
    """
    tells_the_end = hasattr(cls, "maybe_free_model_hooks")

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._placement is None:
            return cls.__call__(self, *args, **kwargs)
        given = _given(inspect.signature(cls.__call__).bind_partial(self, *args, **kwargs).arguments)
        defaults = _arguments(self._call)
        kwargs = {**{name: value for name, value in defaults.items() if name not in given}, **kwargs}
        try:
            return cls.__call__(self, *args, **kwargs)
        finally:
            if not tells_the_end and self._placement is not None:
                self._placement.rest()

    return call


def _given(arguments: Mapping[str, Any]) -> set[str]:
    """The names of what the caller gives: arguments, and what the state of a modular pipeline holds already."""
    values = getattr(arguments.get("state"), "values", None)
    return {*arguments, *(values if isinstance(values, Mapping) else ())}


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of the file as a call takes them: pictures read anew, and a seed a new generator, on the cpu.

    A cpu generator gives the same picture wherever the denoiser runs.
    """
    arguments = opened({name: value for name, value in call.items() if name != SEED})
    seed = call.get(SEED)
    if seed is not None:
        arguments["generator"] = [_generator(each) for each in seed] if isinstance(seed, list) else _generator(seed)
    return arguments


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _changing(method: Any) -> Any:
    """A method of diffusers that changes components, run while no hook is on them."""

    @functools.wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        placement = self._placement
        if placement is None or placement.is_suspended:
            return method(self, *args, **kwargs)
        before = _adapters_of(self)
        with placement.suspended():
            try:
                return method(self, *args, **kwargs)
            except BaseException:
                _remove_adapters(self, _adapters_of(self) - before)
                raise

    return changed


def _adapters_of(pipe: Any) -> frozenset[str]:
    """The names of the adapters on a pipeline's components."""
    by_component = pipe.get_list_adapters() if hasattr(pipe, "get_list_adapters") else {}
    return frozenset(name for names in by_component.values() for name in names)


def _remove_adapters(pipe: Any, names: frozenset[str]) -> None:
    """Take off what a load that failed had put on some components before it came to the one that refused."""
    if names:
        pipe.delete_adapters(sorted(names))
