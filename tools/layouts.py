"""Write ``dmconfig/data/layouts``: how the components of the catalogue are laid out, made of the packaged configs.

Every component is built on the meta device, from its config alone, and its elements are counted module by module. Run
it after a change of the configs or of what is packaged of them, and when transformers names its modules anew:

    make layouts
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dmconfig.catalog import CatalogPipeline, find_pipeline, known_ids
from dmconfig.configs import config_folder
from dmconfig.facts import class_facts
from dmconfig.footprint import build_on_meta, fp32_patterns, kept_in_fp32
from dmconfig.layout import layout_of
from dmconfig.layouts import BY_CONFIG, file_name, fingerprint, fold
from dmconfig.stored import read_config

TARGET = Path(__file__).parents[1] / "dmconfig" / "data" / "layouts"


def main() -> None:
    """Write one file per pipeline."""
    TARGET.mkdir(exist_ok=True)
    pipelines = {pipeline.hub_id: pipeline for name in known_ids() if (pipeline := find_pipeline(name))}
    for hub_id, pipeline in sorted(pipelines.items()):
        text = json.dumps(layouts_of(pipeline), separators=(",", ":"))
        (TARGET / file_name(hub_id)).write_text(text + "\n", encoding="utf-8")
        print(f"{hub_id}: {len(text)} characters")
    entries = dict(entry for pipeline in pipelines.values() for entry in entries_by_config(pipeline))
    text = json.dumps(dict(sorted(entries.items())), separators=(",", ":"))
    (TARGET / BY_CONFIG).write_text(text + "\n", encoding="utf-8")
    print(f"by config: {len(text)} characters")


def entries_by_config(pipeline: CatalogPipeline) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entry of every other component with weights, and what its config says."""
    for part in pipeline.components:
        if not part.is_module or part.library == "diffusers":
            continue
        folder = config_folder(pipeline.hub_id)
        assert folder is not None  # noqa: S101 - as above
        module = build_on_meta(folder / part.name, part.library, part.class_name, "bfloat16")
        stored = {name.rpartition(".")[0] for name in module.state_dict()}
        laid_out = layout_of(module, "bfloat16").modules
        yield (
            fingerprint(read_config(folder / part.name), part.class_name),
            {
                "class": part.class_name,
                "can_split": bool(module._no_split_modules),
                "modules": fold(own_elements(module)),
                "ties": {each.path: each.shares_with for each in laid_out if each.shares_with and each.path in stored},
                "whole": [path for path, below in module.named_modules() if stays_whole(path, below, module)],
            },
        )


def stays_whole(path: str, module: Any, root: Any) -> bool:
    """Tell whether a class says so of a module that is neither a member of a list nor a single layer."""
    is_named = type(module).__name__ in root._no_split_modules
    return is_named and any(True for _ in module.children()) and not path.rpartition(".")[2].isdigit()


def own_elements(module: Any) -> dict[str, int | list[int]]:
    """Return how many elements each module holds itself that no other holds before it."""
    stored, counts, seen = module.state_dict().keys(), dict[str, tuple[int, int]](), set[int]()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in stored and id(tensor) not in seen:
            seen.add(id(tensor))
            _count(counts, name, tensor, kept=False)
    return _written(counts)


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
        _count(counts, name, tensor, kept=kept_in_fp32(name, patterns))
    return _written(counts)


def _count(counts: dict[str, tuple[int, int]], name: str, tensor: Any, *, kept: bool) -> None:
    path = name.rpartition(".")[0]
    before = counts.get(path, (0, 0))
    if not tensor.is_floating_point():
        counts[path] = (before[0] + math.ceil(tensor.nbytes / 4), before[1])
    else:
        counts[path] = (before[0] + tensor.numel() * kept, before[1] + tensor.numel() * (not kept))


def _written(counts: Mapping[str, tuple[int, int]]) -> dict[str, int | list[int]]:
    return {path: [kept, cast] if kept else cast for path, (kept, cast) in counts.items()}


def _facts(class_name: str) -> Any:
    facts = class_facts("diffusers", class_name)
    assert facts is not None  # noqa: S101 - as above
    return facts


if __name__ == "__main__":
    main()
