"""Random numbers on virtual devices: drawn on the host, but only for the device the generator says."""

from __future__ import annotations

from typing import Any, Self

import torch

_RealGenerator = torch.Generator
_create: Any = torch.Generator.__new__


_Meta: Any = type(torch.Generator)  # a metaclass of its own, in some versions of torch


class _AlsoReal(_Meta):  # type: ignore[misc]
    # A generator made before the machine began must still be a torch.Generator while this class goes by that name.
    def __instancecheck__(cls, instance: object) -> bool:  # noqa: N805
        return isinstance(instance, _RealGenerator)


class VirtualGenerator(torch.Generator, metaclass=_AlsoReal):
    """Stands in for ``torch.Generator``: one of a virtual cuda device draws the numbers of a host generator."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> Self:
        """Make a generator of a device, given in any of torch's forms."""
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        virtual = wanted.type == "cuda"
        generator: Self = _create(cls, device="cpu" if virtual else wanted)
        generator._device = torch.device("cuda", wanted.index or 0) if virtual else wanted
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device whose tensors this generator may fill."""
        return self._device
