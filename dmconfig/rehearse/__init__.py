"""A deployment run before it exists: the pipeline's own code on virtual accelerators, without weights.

script     what is rehearsed, and what is asked of it
skeleton   the pipeline, built from configs on the meta device
adapters   adapters, without their data
quantised  weights that are packed
standins   tokenizers and processors that are not on this machine
inputs     the arguments of the call, and its steps
rehearsal  the run
scaling    what moves in a whole generation, told from a few steps
figures    what the run took, by device, phase and link
margins    what comes on top of tensors
outputs    what came out, held against what was asked for
failures   what went wrong, where, and what to do
remedies   what would make it fit, each rehearsed in turn
model      the values of a rehearsal
report     a rehearsal as text and as JSON
page       a rehearsal as a page for a browser
settling   plan and rehearsal in turn until they agree
remembered what they agreed on, kept between runs
reserve    the reserve of a file that leaves it to that
sweeping   the largest setting that fits
table      a sweep as text and as JSON
apart      all of it where real accelerators are

What is remembered is told without torch, so names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmconfig.rehearse.model import Rehearsal as Rehearsal
    from dmconfig.rehearse.page import rehearsal_page as rehearsal_page
    from dmconfig.rehearse.rehearsal import rehearse as rehearse
    from dmconfig.rehearse.report import rehearsal_data as rehearsal_data
    from dmconfig.rehearse.report import rehearsal_schema as rehearsal_schema
    from dmconfig.rehearse.report import rehearsal_text as rehearsal_text
    from dmconfig.rehearse.script import Script as Script
    from dmconfig.rehearse.script import Settings as Settings

_HOMES = {
    "Rehearsal": "model",
    "Script": "script",
    "Settings": "script",
    "rehearsal_data": "report",
    "rehearsal_page": "page",
    "rehearsal_schema": "report",
    "rehearsal_text": "report",
    "rehearse": "rehearsal",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dmconfig.rehearse' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"dmconfig.rehearse.{_HOMES[name]}"), name)
