"""Keeping Python's cyclic garbage collector out of the way of work that makes many objects and little garbage.

Importing the libraries and building a large pipeline make a million objects that stay. The collector looks through
them again and again while they grow, which is more than half of a first load and a fifth of a rehearsal.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Stop cyclic garbage collection for a while: for loading, which leaves nothing to collect."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Let the collector pass over all that is there already, and go on collecting what comes after.

    For running what was loaded: tensors in cycles are freed as ever, and what cannot be garbage is not searched.
    Where the caller has frozen something, all stays as it is.
    """
    is_ours = not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()
