from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dmconfig.catalog import find_pipeline, known_ids
from dmconfig.footprint import Footprint, fp32_patterns, measure_tensors
from dmconfig.weights import find_weights, read_tensors
from tests.sparse_weights import KEPT_IN_FP32, write_sparse_pipeline

DTYPES = ("float32", "float16", "bfloat16")
CANONICAL_IDS = sorted({pipeline.hub_id for pipeline in map(find_pipeline, known_ids()) if pipeline})


def test_find_pipeline_flux_has_its_public_sizes() -> None:
    """The figures are those of the public model: 11,901,408,320 parameters in the transformer, and so on."""
    flux = find_pipeline("black-forest-labs/FLUX.1-dev")
    assert flux is not None
    assert flux.class_name == "FluxPipeline"
    assert [part.name for part in flux.components] == [
        "scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae",
    ]  # fmt: skip
    assert {part.name: dict(part.bytes_by_dtype) for part in flux.components if part.is_module} == {
        "text_encoder": {"float32": 492241920, "float16": 246120960, "bfloat16": 246120960},
        # 1,006,632,960 parameters of T5's wo stay float32 in float16
        "text_encoder_2": {"float32": 19049242624, "float16": 11537887232, "bfloat16": 9524621312},
        "transformer": {"float32": 47605633280, "float16": 23802816640, "bfloat16": 23802816640},
        "vae": {"float32": 335278732, "float16": 167639366, "bfloat16": 167639366},
    }


def test_find_pipeline_alias_is_the_canonical_pipeline() -> None:
    """An old or mirrored id answers with the same entry."""
    assert find_pipeline("runwayml/stable-diffusion-v1-5") is find_pipeline(
        "stable-diffusion-v1-5/stable-diffusion-v1-5"
    )


def test_find_pipeline_unknown_is_none() -> None:
    """An id that is not packaged is no error here."""
    assert find_pipeline("nobody/nothing") is None


def test_known_ids_are_sorted_and_all_found() -> None:
    """Every id, aliases too, leads to a pipeline; there are 29 pipelines."""
    ids = known_ids()
    assert list(ids) == sorted(set(ids))
    assert len(CANONICAL_IDS) == 29
    assert all(find_pipeline(hub_id) for hub_id in ids)


@pytest.mark.parametrize("hub_id", known_ids())
def test_entries_are_consistent(hub_id: str) -> None:
    """Modules have three sizes in the order they must have, the rest has none."""
    pipeline = find_pipeline(hub_id)
    assert pipeline is not None
    assert any(part.is_module for part in pipeline.components)
    for part in pipeline.components:
        if not part.is_module:
            assert not part.bytes_by_dtype
            assert not part.largest_leaf_bytes
            continue
        assert tuple(part.bytes_by_dtype) == tuple(part.largest_leaf_bytes) == DTYPES
        size, leaf = part.bytes_by_dtype, part.largest_leaf_bytes
        assert size["float32"] / 2 <= size["bfloat16"] <= size["float16"] < size["float32"]
        assert all(0 < leaf[dtype] < size[dtype] for dtype in DTYPES)
        assert part.stored_dtype in DTYPES


def test_footprint_says_what_it_is() -> None:
    """Without a dtype it is as stored; a dtype the catalogue has no figure for is none."""
    sdxl = find_pipeline("stabilityai/stable-diffusion-xl-base-1.0")
    assert sdxl is not None
    unet, scheduler = sdxl.component("unet"), sdxl.component("scheduler")
    assert unet is not None
    assert scheduler is not None
    assert unet.footprint(None) == Footprint(
        nbytes=2567463684 * 4,
        dtype="float32",
        stored_dtype="float32",
        largest_leaf_bytes=117969920,
        largest_block_bytes=unet.largest_block_bytes["float32"],
        outside_blocks_bytes=unet.outside_blocks_bytes["float32"],
        needs_cast=False,
        measured_from="catalogue",
    )
    assert unet.footprint("float64") is None
    assert scheduler.footprint("float16") is None
    assert sdxl.component("transformer") is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hub_id", CANONICAL_IDS)
def test_sparse_pipeline_measures_as_the_catalogue_says(tmp_path: Path, hub_id: str, dtype: str) -> None:
    """Headers of any stored dtype lead, by the fp32 rules, to the catalogue's size at every dtype; no disk is used."""
    write_sparse_pipeline(tmp_path, hub_id, dtype)
    pipeline = find_pipeline(hub_id)
    assert pipeline is not None
    for part in pipeline.components:
        if not part.is_module:
            continue
        files = find_weights(tmp_path / part.name, library=part.library, variant=None)
        assert files is not None
        tensors = read_tensors(files)
        assert sum(tensor.nbytes for tensor in tensors) == part.bytes_by_dtype[dtype]
        _, keep = KEPT_IN_FP32.get(part.class_name, ("", []))
        for target in DTYPES:
            patterns = fp32_patterns(library=part.library, dtype=target, keep=keep, keep_strict=None)
            measured = measure_tensors(tensors, dtype=target, keep_in_fp32=patterns)
            assert measured.nbytes == part.bytes_by_dtype[target], (part.name, target)
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*")) < 2**20


def test_finding_a_pipeline_needs_no_torch() -> None:
    """The catalogue answers without torch or a library that imports it."""
    code = (
        "import sys, dmconfig.catalog as catalog\n"
        "assert catalog.find_pipeline('black-forest-labs/FLUX.1-dev')\n"
        "assert not {'torch', 'diffusers', 'transformers', 'accelerate'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
