"""Write ``dmconfig/data/layouts``: how the components of the catalogue are laid out, made of the packaged configs.

Every component of diffusers is built on the meta device, from its config alone, and its elements are counted module by
module. Run it after a change of the configs or of what is packaged of them:

    make layouts
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dmconfig.catalog import CatalogPipeline, find_pipeline, known_ids
from dmconfig.configs import config_folder
from dmconfig.facts import class_facts
from dmconfig.footprint import build_on_meta, fp32_patterns, kept_in_fp32
from dmconfig.layouts import file_name, fold

TARGET = Path(__file__).parents[1] / "dmconfig" / "data" / "layouts"


def main() -> None:
    """Write one file per pipeline."""
    TARGET.mkdir(exist_ok=True)
    pipelines = {pipeline.hub_id: pipeline for name in known_ids() if (pipeline := find_pipeline(name))}
    for hub_id, pipeline in sorted(pipelines.items()):
        text = json.dumps(layouts_of(pipeline), separators=(",", ":"))
        (TARGET / file_name(hub_id)).write_text(text + "\n", encoding="utf-8")
        print(f"{hub_id}: {len(text)} characters")


def layouts_of(pipeline: CatalogPipeline) -> dict[str, Any]:
    """Return the entry of every diffusers component with weights."""
    return {
        part.name: {
            "class": part.class_name,
            "can_split": _facts(part.class_name).no_split_modules is not None,
            "modules": fold(element_counts(pipeline.hub_id, part.name, part.class_name)),
        }
        for part in pipeline.components
        if part.is_module and part.library == "diffusers"
    }


def element_counts(hub_id: str, component: str, class_name: str) -> dict[str, int | list[int]]:
    """Return how many elements each module holds itself, those that stay float32 apart where there are any.

    What is not floating stays as it is too, and counts by its bytes: an int64 as two elements of float32.
    """
    folder = config_folder(hub_id)
    assert folder is not None  # noqa: S101 - every pipeline of the catalogue has one
    module = build_on_meta(folder / component, "diffusers", class_name, "bfloat16")
    keep = _facts(class_name).keep_in_fp32_modules
    patterns = fp32_patterns(library="diffusers", dtype="bfloat16", keep=keep, keep_strict=())
    counts: dict[str, tuple[int, int]] = {}
    for name, tensor in module.state_dict().items():
        path, (kept, cast) = name.rpartition(".")[0], counts.get(name.rpartition(".")[0], (0, 0))
        if not tensor.is_floating_point():
            counts[path] = (kept + math.ceil(tensor.nbytes / 4), cast)
        elif kept_in_fp32(name, patterns):
            counts[path] = (kept + tensor.numel(), cast)
        else:
            counts[path] = (kept, cast + tensor.numel())
    return {path: [kept, cast] if kept else cast for path, (kept, cast) in counts.items()}


def _facts(class_name: str) -> Any:
    facts = class_facts("diffusers", class_name)
    assert facts is not None  # noqa: S101 - as above
    return facts


if __name__ == "__main__":
    main()
