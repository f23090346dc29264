"""What a device takes beyond the tensors that a rehearsal counts: named, stated, never hidden.

``docs/rehearsal-accuracy.md`` holds every figure here against what others measured, and says what is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dmconfig.rehearse.model import Margin, PhasePeak
from dmconfig.units import KIB, MIB, format_bytes

CONTEXT_BYTES = 512 * MIB
"""The CUDA context and the kernels loaded: 0.2 to 0.7 GiB, by what users report. It does not count for torch."""
BLAS_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB
"""The workspace that PyTorch gives cuBLAS by default, and keeps: ``CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8``."""
_DECODERS, _CONVOLVING = ("vae", "movq", "vqgan"), ("unet", "controlnet")
"""How the names of components begin that are made of convolutions: what decodes, and what runs once per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What cards of one generation take for convolutions, and whether bfloat16 attention runs without its scores.

    Tensor cores want channels last; for tensors that are not, cuDNN copies what goes into a convolution and what comes
    out. Decoders hold three tensors of the largest size at their peak, so two more are at most two thirds of that; the
    share is a little higher, and that of UNets what it is, by what was measured. Older cards copy nothing, but have
    algorithms with workspaces of their own.
    """

    decoder_share: float = 0.0
    denoiser_share: float = 0.0
    least_bytes: int = 0
    fuses_bfloat16: bool = True


TENSOR_CORES = Generation(decoder_share=3 / 4, denoiser_share=1 / 4)
VOLTA_AND_TURING = Generation(decoder_share=3 / 4, denoiser_share=1 / 4, fuses_bfloat16=False)
PASCAL_AND_OLDER = Generation(least_bytes=512 * MIB, fuses_bfloat16=False)
_OLD = re.compile(r"\b(GTX (TITAN|[6-9]\d\d|10\d\d)|TITAN X[Pp]?|Tesla [KMP]\d+|Quadro [KMP]\d+)\b")
_MIDDLE = re.compile(r"\b(V100|T4|T40|T[456]00|T1000|TITAN (V|RTX)|GTX 16\d\d|RTX 20\d\d|Quadro (RTX|GV100|T)\b)")


def generation_of(card: str) -> Generation:
    """Return the generation of a card, by the name that torch has for it; one that is not known counts as new."""
    if _OLD.search(card):
        return PASCAL_AND_OLDER
    return VOLTA_AND_TURING if _MIDDLE.search(card) else TENSOR_CORES


def workspace_bytes(phase: PhasePeak, card: str = "") -> int:
    """Return what convolutions take beside the tensors of a phase; 0 where nothing is convolved."""
    generation = generation_of(card)
    if phase.phase.startswith(_DECODERS):
        share = generation.decoder_share
    elif phase.phase.startswith(_CONVOLVING):
        share = generation.denoiser_share
    else:
        return 0
    return max(int(share * phase.activations_bytes), generation.least_bytes) if phase.activations_bytes else 0


def margins_of(
    phases: Sequence[PhasePeak], reserved_bytes: int, *, rounding_bytes: int = 0, card: str = ""
) -> tuple[Margin, ...]:
    """Return the margins of a device that ran these phases, on top of the highest of their peaks; none where none ran.

    Args:
        phases: each with its peak.
        reserved_bytes: what the allocator's model holds beyond the highest peak.
        rounding_bytes: what it hands out beyond the highest peak, because it does not split off small rests.
        card: the name that torch has for the device; empty when only its size is known.
    """
    if not any(phase.nbytes for phase in phases):
        return ()
    return tuple(_margins(phases, reserved_bytes, rounding_bytes, card))


def _margins(phases: Sequence[PhasePeak], reserved_bytes: int, rounding_bytes: int, card: str) -> Iterator[Margin]:
    yield Margin(name="context", nbytes=CONTEXT_BYTES, why="the CUDA context and its kernels")
    yield Margin(name="blas", nbytes=BLAS_BYTES, why="the workspace of matrix products, which PyTorch keeps")
    if rounding_bytes:
        yield Margin(
            name="rounding", nbytes=rounding_bytes, why="rests of blocks that the allocator does not split off"
        )
    peak = max(phase.nbytes for phase in phases)
    beyond = max(phase.nbytes + workspace_bytes(phase, card) for phase in phases) - peak
    if beyond:
        yield Margin(name="workspace", nbytes=beyond, why="what cuDNN takes for convolutions, beyond the peak")
    if not generation_of(card).fuses_bfloat16:
        why = "not counted: this card has no fused attention for bfloat16, and then holds all scores; use float16"
        yield Margin(name="attention", nbytes=0, why=why)
    if reserved_bytes:
        why = "blocks that the allocator keeps for later; given back when memory is short"
        yield Margin(name="cache", nbytes=0, why=f"{why} ({format_bytes(reserved_bytes)})")
