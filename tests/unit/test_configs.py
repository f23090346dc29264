"""The packaged configs against the packaged figures: every pipeline has them, and they lead to the same sizes."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from dmconfig.catalog import CatalogPipeline, find_pipeline, known_ids
from dmconfig.configs import config_folder
from dmconfig.footprint import build_on_meta, group_sizes, measure_configs, module_bytes

DTYPES = ("float32", "float16", "bfloat16")
CANONICAL_IDS = sorted({pipeline.hub_id for pipeline in map(find_pipeline, known_ids()) if pipeline})
# pipelines that are quickly built, and the bytes of what their classes make anew, which no file stores
SMALL = {
    # T5, which keeps layers in float32 in float16; a table of 64 x 64 positions, 1152 wide, in float32
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": {"text_encoder": 0, "transformer": 64 * 64 * 1152 * 4, "vae": 0},
    # layers that stay in float32; sines and cosines of 1024 positions, 128 wide, in float32
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {"text_encoder": 0, "transformer": 2 * 1024 * 128 * 4, "vae": 0},
    # a class of a pipeline's own; the numbers of 257 and 77 positions, in int64
    "stable-diffusion-v1-5/stable-diffusion-v1-5": {
        "safety_checker": 257 * 8, "text_encoder": 77 * 8, "unet": 0, "vae": 0,
    },
}  # fmt: skip


def pipeline_of(hub_id: str) -> CatalogPipeline:
    pipeline = find_pipeline(hub_id)
    assert pipeline is not None
    return pipeline


@pytest.mark.parametrize("hub_id", known_ids())
def test_config_folder_every_known_id_has_the_configs_of_its_components(hub_id: str) -> None:
    """Index and catalogue name the same components of the same classes, and each with weights has a config."""
    folder, pipeline = config_folder(hub_id), pipeline_of(hub_id)
    assert folder is not None
    assert folder.name == pipeline.hub_id.replace("/", "--")
    index = json.loads((folder / "model_index.json").read_bytes())
    named = {name: tuple(value) for name, value in index.items() if isinstance(value, list) and value[0]}
    assert index["_class_name"] == pipeline.class_name
    assert named == {part.name: (part.library, part.class_name) for part in pipeline.components}
    with_config = {file.parent.name for file in folder.glob("*/config.json")}
    assert with_config == {part.name for part in pipeline.components if part.is_module}
    assert (folder / ("prior_scheduler" if "prior_scheduler" in named else "scheduler")).is_dir()


def test_config_folder_of_an_alias_is_that_of_the_pipeline() -> None:
    """An old id answers as the catalogue does; an unknown one has no folder."""
    assert config_folder("runwayml/stable-diffusion-v1-5") == config_folder(
        "stable-diffusion-v1-5/stable-diffusion-v1-5"
    )
    assert config_folder("nobody/nothing") is None


def test_config_folder_files_are_compact_and_name_no_path() -> None:
    """What is packaged is small, and says nothing of the machine it was written on."""
    folder = config_folder("black-forest-labs/FLUX.1-dev")
    assert folder is not None
    files = list(folder.parent.rglob("*.json"))
    assert sum(file.stat().st_size for file in files) < 200_000
    for file in files:
        assert ": " not in file.read_text(encoding="utf-8"), file
        assert not json.loads(file.read_bytes()).get("_name_or_path"), file


def test_config_folder_there_is_none_without_a_pipeline() -> None:
    """No folder is left over of a pipeline that the catalogue has not."""
    folder = config_folder(CANONICAL_IDS[0])
    assert folder is not None
    folders = {entry.name for entry in folder.parent.iterdir() if entry.is_dir()}
    assert folders == {hub_id.replace("/", "--") for hub_id in CANONICAL_IDS}


@functools.cache
def stored_sizes(config: str, folder: Path, library: str, class_name: str, dtype: str) -> dict[str, int]:
    """Return the sizes of what a component stores, by its class built on the meta device; equal configs once."""
    module = build_on_meta(folder, library, class_name, dtype)
    stored = module.state_dict().keys()
    return group_sizes((name, nbytes) for name, nbytes in module_bytes(module, dtype) if name in stored)


@pytest.mark.parametrize(
    "hub_id", [pytest.param(each, marks=() if each in SMALL else pytest.mark.slow) for each in CANONICAL_IDS]
)
def test_packaged_configs_lead_to_the_figures_of_the_catalogue(hub_id: str) -> None:
    """Built on the meta device, every component stores the catalogue's bytes, to the byte, at every dtype."""
    folder, pipeline = config_folder(hub_id), pipeline_of(hub_id)
    assert folder is not None
    for part in pipeline.components:
        for dtype in DTYPES if part.is_module else ():
            expected = part.footprint(dtype)
            assert expected is not None
            config = (folder / part.name / "config.json").read_text(encoding="utf-8")
            sizes = stored_sizes(config, folder / part.name, part.library, part.class_name, dtype)
            assert {name: getattr(expected, name) for name in sizes} == sizes, (part.name, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hub_id", SMALL)
def test_measure_configs_of_the_packaged_configs_is_the_catalogue_and_buffers(hub_id: str, dtype: str) -> None:
    """What a plan of these folders counts: the catalogue's bytes, and the few that classes make anew on loading."""
    folder, pipeline = config_folder(hub_id), pipeline_of(hub_id)
    assert folder is not None
    differences = {}
    for part in pipeline.components:
        expected = part.footprint(dtype)
        if expected is not None:
            measured = measure_configs(folder / part.name, part.library, part.class_name, dtype)
            differences[part.name] = measured.nbytes - expected.nbytes
    assert differences == SMALL[hub_id]
