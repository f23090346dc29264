"""Stable Diffusion with a style beside the prompt: a pipeline class of one's own, for ``pipeline.custom_pipeline``.

docs/recipes.md has a file that names it. It is run because that file says why it is trusted.
"""

from __future__ import annotations

from typing import Any

from diffusers import StableDiffusionPipeline


class StyledPipeline(StableDiffusionPipeline):
    """Draws ``prompt``, in ``style``."""

    def __call__(self, prompt: str, style: str = "", **kwargs: Any) -> Any:
        """Return what the pipeline makes of both; the other arguments are those of Stable Diffusion."""
        return super().__call__(f"{prompt} {style}".strip(), **kwargs)
