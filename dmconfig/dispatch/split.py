"""A component whose parts are on several devices: how tensors meet.

Every part is entered with its inputs on its own device, and what it returns stays there, so a run of blocks on one
device crosses once. Between the parts the component's own code may join what is on several devices: a residual of a
controlnet, the output of a skipped layer, its own tables. Such an operation runs on the device of its first tensor.
So any cut of any class computes what the whole does, and only the number of crossings depends on where it is cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dmconfig.dispatch.homes import CPU
from dmconfig.dispatch.layers import LayerHooks, Ties, parameters_by_path
from dmconfig.dispatch.moving import Copies, to_device
from dmconfig.plan import Part, Residency


class Split:
    """Weights of a component in parts, each of which stays on its device or is brought layer by layer."""

    def __init__(self, module: torch.nn.Module, parts: Sequence[Part], skip_keys: frozenset[str]) -> None:
        self.module, self.skip_keys = module, skip_keys
        self.parts = {part.path: part for part in parts}
        self._meeting = _Meeting()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hooks: list[LayerHooks] = []
        self._ties: Ties | None = None

    def attach(self) -> None:
        """Move every part to its place and stand before it."""
        self._ties = Ties(self.module)
        pieces = [*pieces_of(self.module, self.parts)]
        for piece in pieces:
            piece.put_weights()
        whole = [piece for piece in pieces if piece.is_whole and piece.has_tensors]  # others run where their input is
        weights = [parameters_by_path(piece.module) for piece in whole]  # before hooks hide any: two may share one
        for piece, resting in zip(whole, weights, strict=True):
            self._stand_before(piece, resting)

    def _stand_before(self, piece: Piece, weights: Mapping[str, torch.Tensor]) -> None:
        if piece.part.residency is Residency.PER_LEAF:
            hooks = LayerHooks(piece.module)
            self._hooks.append(hooks)
            hooks.attach(piece.device, weights, skip_keys=self.skip_keys)
        enter = _Entry(piece.module, piece.device, self.skip_keys, self._meeting)
        self._handles.append(piece.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        self._handles.append(piece.module.register_forward_hook(self._meeting.left_part, always_call=True))

    def bring(self) -> None:
        """Let tensors meet, until the component is left."""
        self._meeting.begin()

    def leave(self) -> None:
        """Leave operations alone again."""
        self._meeting.end()

    def rest(self) -> None:
        """Nothing to do: parts stay, or are sent home by their hooks."""

    def detach(self) -> None:
        """Take every hook off. What was brought is on the cpu; parts that stayed are where they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for hooks in self._hooks:
            hooks.detach()
        self._hooks.clear()
        if self._ties is not None:
            self._ties.restore()
        for piece in pieces_of(self.module, self.parts):
            if piece.is_whole and piece.part.residency is Residency.PER_LEAF:
                piece.module.to(CPU)


@dataclass(frozen=True, slots=True)
class Piece:
    """A module that is in one part with all below it, or, not whole, one that has parts below it."""

    path: str
    module: torch.nn.Module
    part: Part
    is_whole: bool

    @property
    def device(self) -> torch.device:
        """The device on which it runs."""
        return torch.device(self.part.execution_device)

    @property
    def has_tensors(self) -> bool:
        """Whether it or anything below it holds a tensor."""
        return any(True for _ in (*self.module.parameters(), *self.module.buffers()))

    def put_weights(self) -> None:
        """Move what it holds to where it rests: all below it, or, not whole, what it owns itself to its device."""
        if not self.is_whole:
            _move_own(self.module, self.device)
        else:
            self.module.to(CPU if self.part.residency is Residency.PER_LEAF else self.device)


def pieces_of(root: torch.nn.Module, parts: Mapping[str, Part]) -> Iterator[Piece]:
    """Yield the pieces of a module, parents first: whole ones hold all tensors but those that the others own directly.

    A list of modules is not called itself, so its members are the pieces.

    Raises: ValueError: a part is no module.
    """
    paths = {path for path, _ in root.named_modules(remove_duplicate=False)}
    for path in parts:
        if path not in paths:
            raise ValueError(f"{type(root).__name__} has no module {path!r}")
    yield from _pieces("", root, parts[""], parts)


def _pieces(path: str, module: torch.nn.Module, part: Part, parts: Mapping[str, Part]) -> Iterator[Piece]:
    prefix = f"{path}." if path else ""
    is_called = type(module).forward is not torch.nn.Module.forward
    is_whole = is_called and not any(other and other != path and other.startswith(prefix) for other in parts)
    yield Piece(path, module, part, is_whole)
    if not is_whole:
        for name, child in module.named_children():
            yield from _pieces(prefix + name, child, parts.get(prefix + name, part), parts)


class _Entry:
    """A hook that takes the inputs of a part to its device; arguments in ``skip_keys`` are handed on as they are."""

    def __init__(
        self, module: torch.nn.Module, device: torch.device, skip_keys: frozenset[str], meeting: _Meeting
    ) -> None:
        self.device, self.skip_keys, self.meeting = device, skip_keys, meeting
        names = [*inspect.signature(module.forward).parameters]
        self.skip_positions = {index for index, name in enumerate(names) if name in skip_keys}

    def __call__(
        self,
        module: torch.nn.Module,  # noqa: ARG002 - torch's
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.meeting.parts_running += 1  # first: leaving it is noted also where moving its inputs fails
        moved = tuple(
            value if index in self.skip_positions else to_device(value, self.device, move=self.meeting.copies)
            for index, value in enumerate(args)
        )
        named = {
            name: value if name in self.skip_keys else to_device(value, self.device, move=self.meeting.copies)
            for name, value in kwargs.items()
        }
        return moved, named


class _Meeting(TorchFunctionMode):
    """While a split component runs, outside its parts: operations on tensors of several devices run on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts_running = 0
        self.copies = Copies()
        self._has_begun = False

    def begin(self) -> None:
        """Look at every operation from now on."""
        self.parts_running = 0
        self.__enter__()  # type: ignore[no-untyped-call]
        self._has_begun = True

    def end(self) -> None:
        """Look at nothing more. Does nothing when it has not begun."""
        if self._has_begun:
            self._has_begun = False
            self.copies.clear()
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def left_part(self, module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002 - torch's
        """A part is done, also where it raised."""
        self.parts_running -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.parts_running and (device := _common_device(args, kwargs)) is not None:
            args, kwargs = (to_device(given, device, move=self.copies) for given in (args, kwargs))
        return func(*args, **kwargs)


def _common_device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device of the first tensor, or of the one to write to, where others are elsewhere.

    A number on the cpu goes with any device; one on an accelerator does not, but it follows what is more than a number.
    """
    tensors = [*_tensors((kwargs.get("out"), *args, *kwargs.values()))]
    bound = [tensor for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"]
    if len({tensor.device for tensor in bound}) < 2:
        return None
    return next((tensor for tensor in bound if tensor.dim()), bound[0]).device


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _move_own(module: torch.nn.Module, device: torch.device) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, tensor in module.named_buffers(recurse=False):
        module._buffers[name] = tensor.to(device)
