"""What a device takes beyond the tensors that a rehearsal counts: named, stated, never hidden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dmconfig.rehearse.model import Margin, PhasePeak
from dmconfig.units import MIB

CONTEXT_BYTES = 512 * MIB
"""The CUDA context and the kernels loaded: 0.3 to 0.6 GiB on cards of the last generations, by what users report."""
WORKSPACE_BYTES = 128 * MIB
"""cuDNN's workspace for convolutions in 16 bits: 0.11 GiB for SDXL's UNet on a Hopper card, measured by others."""
_CONVOLVING = ("unet", "vae", "movq", "controlnet")


def margins_of(phases: Sequence[PhasePeak], reserved_bytes: int) -> tuple[Margin, ...]:
    """Return the margins of a device that ran these phases; none where nothing ran.

    ``reserved_bytes`` is what the allocator's model holds beyond the highest peak.
    """
    return tuple(_margins(phases, reserved_bytes)) if any(phase.nbytes for phase in phases) else ()


def _margins(phases: Sequence[PhasePeak], reserved_bytes: int) -> Iterator[Margin]:
    yield Margin(name="context", nbytes=CONTEXT_BYTES, why="the CUDA context and its kernels")
    if any(phase.phase.startswith(_CONVOLVING) for phase in phases):
        yield Margin(name="workspace", nbytes=WORKSPACE_BYTES, why="cuDNN's workspace for convolutions, not counted")
    if reserved_bytes:
        why = "blocks that the allocator keeps for later; given back when memory is short"
        yield Margin(name="cache", nbytes=0, why=f"{why} ({reserved_bytes} bytes)")
