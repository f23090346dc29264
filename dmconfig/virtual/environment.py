"""What the rest of the process sees while a machine is active: torch.cuda, torch.accelerator, the libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch

from dmconfig.virtual.cuda import accelerator_functions, cuda_functions
from dmconfig.virtual.generator import VirtualGenerator
from dmconfig.virtual.loading import refusing_load, refusing_resize
from dmconfig.virtual.patching import replaced
from dmconfig.virtual.quantised import gguf_parameters
from dmconfig.virtual.state import MachineState

_C: Any = torch._C

# Modules that ask torch for its devices when they are imported, or once and for all in a cache. They are imported
# before anything is patched, so that what they keep is the truth about the real host.
_DIFFUSERS_PIPELINES = "diffusers.pipelines.pipeline_utils"
_TRANSFORMERS_LOADING = "transformers.modeling_utils"
_CACHING_MODULES = ("accelerate.utils.imports", "transformers.utils.import_utils")


@contextmanager
def virtual_environment(state: MachineState) -> Iterator[None]:
    """Make torch, diffusers, transformers and accelerate see the machine's devices; undone at the end."""
    pipelines, loading = import_module(_DIFFUSERS_PIPELINES), import_module(_TRANSFORMERS_LOADING)
    for name in _CACHING_MODULES:
        import_module(name)
    with ExitStack() as stack:
        stack.callback(_clear_caches)  # first in, last out: once everything is as it was
        stack.enter_context(_accelerate_state_kept())
        stack.enter_context(replaced(torch.cuda, cuda_functions(state)))
        stack.enter_context(replaced(torch.accelerator, accelerator_functions(state)))
        stack.enter_context(replaced(torch, {"Generator": VirtualGenerator, "load": refusing_load()}))
        stack.enter_context(replaced(torch.UntypedStorage, {"resize_": refusing_resize(state)}))
        stack.enter_context(replaced(_C._nn, {"_parse_to": _parse_to(state)}))
        stack.enter_context(replaced(torch.nn.Parameter, {"__new__": _new_parameter(state)}))
        stack.enter_context(gguf_parameters())
        stack.enter_context(_buffers_marked(state))
        # computed when diffusers was imported, from the real host
        stack.enter_context(replaced(pipelines, {"SUPPORTED_DEVICE_MAP": ["balanced", "cuda", "cpu"]}))
        # there is no caching allocator to warm up, and on a device of less than 1.2 GiB it asks for negative bytes
        stack.enter_context(replaced(loading, {"caching_allocator_warmup": lambda *_args, **_kwargs: None}))
        _clear_caches()
        yield


def _parse_to(state: MachineState) -> Callable[..., Any]:
    """Return what nn.Module.to parses its arguments with, normalising the device (0, "cuda") for C++."""
    parse = _C._nn._parse_to

    def parse_normalised(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (int, str, torch.device)):
            args = (state.normalise(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": state.normalise(kwargs["device"])}
        return parse(*args, **kwargs)

    return parse_normalised


def _new_parameter(state: MachineState) -> Any:
    """Return a constructor of parameters that tells the ledger: this memory holds weights."""
    create = torch.nn.Parameter.__new__

    def create_marked(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameter: torch.Tensor = create(cls, *args, **kwargs)
        state.mark_weights(parameter)
        return parameter

    return staticmethod(create_marked)


@contextmanager
def _buffers_marked(state: MachineState) -> Iterator[None]:
    """Count buffers as weights too, from the moment a module registers them."""

    def mark(_module: torch.nn.Module, _name: str, buffer: torch.Tensor | None) -> None:
        if buffer is not None:
            state.mark_weights(buffer)

    hook = torch.nn.modules.module.register_module_buffer_registration_hook(mark)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _accelerate_state_kept() -> Iterator[None]:
    """Put accelerate's process-wide state back: made inside, it would remember a virtual device for ever."""
    shared: dict[str, Any] = import_module("accelerate.state").PartialState._shared_state
    before = dict(shared)
    try:
        yield
    finally:
        shared.clear()
        shared.update(before)


def _clear_caches() -> None:
    """Forget what the libraries have remembered about devices, on the way in and on the way out."""
    torch_utils = import_module("diffusers.utils.torch_utils")
    backend = getattr(torch_utils, "TorchDeviceBackend", None)  # diffusers has it since some release after 0.38
    detect = torch_utils.get_device if backend is None else backend._detect_device_type
    detect.cache_clear()
    for module_name in _CACHING_MODULES:
        for name, value in list(vars(sys.modules[module_name]).items()):
            if name.startswith("is_") and hasattr(value, "cache_clear"):
                value.cache_clear()
