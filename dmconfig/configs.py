"""The configs of the catalogue's pipelines, packaged, so that one can build them on the meta device without a download.

Plain folders in the diffusers layout, without weights and tokenizers. What they are is told in
``data/configs/README.md``; the sizes measured from them are the catalogue's.
"""

from __future__ import annotations

from pathlib import Path

from dmconfig.catalog import find_pipeline
from dmconfig.files import DATA

_CONFIGS = DATA / "configs"


def config_folder(hub_id: str) -> Path | None:
    """Return the folder with the configs of this hub id or alias, as the catalogue knows them; None when it has none.

    It holds ``model_index.json``, the ``config.json`` of every component with weights, and the scheduler's config.
    """
    pipeline = find_pipeline(hub_id)
    return None if pipeline is None else _CONFIGS / pipeline.hub_id.replace("/", "--")
