"""Tests of made-up cases: one test goes through all of its seeds, and a failure names the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def over_seeds(seeds: Iterable[int]) -> Callable[[Callable[[int], None]], Callable[[], None]]:
    """Make one test of a test for one seed."""

    def decorate(test: Callable[[int], None]) -> Callable[[], None]:
        def every_seed() -> None:
            for seed in seeds:
                try:
                    test(seed)
                except BaseException as error:
                    error.add_note(f"the seed was {seed}")
                    raise

        every_seed.__name__, every_seed.__doc__ = test.__name__, test.__doc__
        every_seed.__module__, every_seed.__qualname__ = test.__module__, test.__qualname__
        return every_seed

    return decorate
