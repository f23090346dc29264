"""The packaged layouts against the packaged configs they were made of, and against the catalogue's figures."""

from __future__ import annotations

import functools
import importlib.resources
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dmconfig.catalog import CatalogComponent, CatalogPipeline, find_pipeline, known_ids
from dmconfig.configs import config_folder
from dmconfig.facts import class_facts
from dmconfig.footprint import build_on_meta, fp32_patterns, module_bytes
from dmconfig.layout import Layout, layout_of, nearest_ancestor
from dmconfig.layouts import file_name, fingerprint, fold, layout_by_config, packaged_layout, unfold
from dmconfig.plan.cuts import Blocks, Cut
from dmconfig.plan.requests import Place
from dmconfig.plan.split import part_loads
from dmconfig.stored import read_config
from tests.seeds import over_seeds

DTYPES = ("float32", "float16", "bfloat16")
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
CANONICAL_IDS = sorted({pipeline.hub_id for pipeline in map(find_pipeline, known_ids()) if pipeline})
QUICK = [  # one that keeps layers in float32, one of blocks in one list, one that is no transformer
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
    "stable-diffusion-v1-5/stable-diffusion-v1-5",
]

Counts = dict[str, int | list[int]]


def pipeline_of(hub_id: str) -> CatalogPipeline:
    pipeline = find_pipeline(hub_id)
    assert pipeline is not None
    return pipeline


def diffusers_parts(hub_id: str) -> list[CatalogComponent]:
    return [part for part in pipeline_of(hub_id).components if part.is_module and part.library == "diffusers"]


@functools.cache
def packaged(hub_id: str) -> dict[str, Any]:
    file = importlib.resources.files("dmconfig").joinpath(f"data/layouts/{file_name(hub_id)}")
    entries: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return entries


# --- folding ---


def random_counts(rng: random.Random, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int | list[int]]]:
    """A tree of modules with weights: named ones and lists of alike and of unlike members, parents with their own."""
    for index in range(rng.randint(1, 3)):
        path = f"{prefix}{rng.choice(['a', 'b', 'norm', 'blocks'])}{index}"
        count: int | list[int] = rng.randint(0, 5) if rng.random() < 0.5 else [1, rng.randint(0, 3)]
        kind = rng.choice(["leaf", "leaf", "parent", "list", "alike"] if depth < 3 else ["leaf"])
        if kind == "leaf" or rng.random() < 0.2:
            yield path, count
        if kind == "parent":
            yield from random_counts(rng, f"{path}.", depth + 1)
        if kind == "list":
            for member in range(rng.randint(1, 12)):
                yield f"{path}.{member}.x", rng.randint(1, 2)
        if kind == "alike":
            member_counts = [*random_counts(rng, "", depth + 1)]
            for member in range(rng.randint(1, 12)):
                yield from ((f"{path}.{member}.{below}", count) for below, count in member_counts)


@over_seeds(range(300))
def test_unfold_is_the_inverse_of_fold(seed: int) -> None:
    """Every module comes back with its count, in its place, also by way of a file."""
    counts = dict(random_counts(random.Random(seed)))  # noqa: S311 - toy numbers
    before = dict(counts)
    tree = json.loads(json.dumps(fold(counts)))
    assert counts == before
    assert dict(unfold(tree)) == counts
    assert members(path for path, _ in unfold(tree)) == members(counts)


def members(paths: Iterable[str]) -> dict[str, list[str]]:
    """The members of each module in their order."""
    found: dict[str, dict[str, None]] = {}
    for path in paths:
        words = path.split(".")
        for depth, word in enumerate(words):
            found.setdefault(".".join(words[:depth]), {})[word] = None
    return {parent: [*names] for parent, names in found.items()}


def test_random_counts_have_lists_that_fold() -> None:
    """The trees above are not all without repetition."""
    trees = [fold(dict(random_counts(random.Random(seed)))) for seed in range(300)]  # noqa: S311 - toy numbers
    assert sum('"repeat"' in json.dumps(tree) for tree in trees) > 100


def test_fold_writes_members_that_are_alike_once() -> None:
    """Twenty blocks are one, twenty times; a last one that differs, or a list of one, is written out."""
    alike: Counts = {f"blocks.{index}.{name}": size for index in range(20) for name, size in (("norm", 1), ("mlp", 5))}
    assert fold(alike) == {"blocks": {"repeat": 20, "of": {"norm": 1, "mlp": 5}}}
    assert fold({"blocks.0.mlp": 5, "blocks.1.mlp": 6}) == {"blocks": {"0": {"mlp": 5}, "1": {"mlp": 6}}}
    assert fold({"blocks.0.mlp": 5}) == {"blocks": {"0": {"mlp": 5}}}


def test_fold_members_of_other_numbers_are_written_out() -> None:
    """A list that does not begin at 0, or has a gap (members without weights), keeps its numbers."""
    for numbers in ([1, 2], [0, 2]):
        counts: Counts = {f"net.{number}.proj": 7 for number in numbers}
        assert fold(counts) == {"net": {str(number): {"proj": 7} for number in numbers}}
        assert dict(unfold(fold(counts))) == counts


def test_fold_module_with_weights_of_its_own_and_below() -> None:
    """What a parent holds itself stands under an empty name, at the root too."""
    counts: Counts = {"": 3, "table": 2, "blocks": 1, "blocks.0.x": 5, "blocks.1.x": 5}
    assert dict(unfold(fold(counts))) == counts


# --- what is packaged ---


@pytest.mark.parametrize("hub_id", CANONICAL_IDS)
def test_packaged_layouts_are_of_every_diffusers_component(hub_id: str) -> None:
    """Each component of diffusers that has weights has a layout of its class, and nothing else has."""
    entries = packaged(hub_id)
    assert {name: entry["class"] for name, entry in entries.items()} == {
        part.name: part.class_name for part in diffusers_parts(hub_id)
    }
    for part in diffusers_parts(hub_id):
        facts = class_facts("diffusers", part.class_name)
        assert facts is not None
        assert entries[part.name]["can_split"] == (facts.no_split_modules is not None)


@pytest.mark.parametrize("hub_id", CANONICAL_IDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packaged_layout_sums_to_the_bytes_of_the_catalogue(hub_id: str, dtype: str) -> None:
    """All modules together are as large as the component is known to be at that dtype."""
    for part in diffusers_parts(hub_id):
        layout = packaged_layout(hub_id, part.name, part.class_name, dtype)
        assert layout is not None
        assert sum(module.own_bytes for module in layout.modules) == part.bytes_by_dtype[dtype]


@pytest.mark.parametrize("hub_id", CANONICAL_IDS)
def test_packaged_layout_blocks_are_in_a_sound_order(hub_id: str) -> None:
    """Parents come before their children and members of lists in their order; blocks and what is outside are all."""
    for part in diffusers_parts(hub_id):
        layout = packaged_layout(hub_id, part.name, part.class_name, "bfloat16")
        assert layout is not None
        seen: set[str] = set()
        numbers: dict[str, int] = {}
        for module in layout.modules:
            assert module.path not in seen
            parent, _, last = module.path.rpartition(".")
            assert not module.path or parent in seen
            seen.add(module.path)
            if last.isdigit():
                assert numbers.get(parent, -1) < int(last)
                numbers[parent] = int(last)
        blocks = layout.blocks()
        total = sum(module.own_bytes for module in layout.modules)
        assert sum(block.nbytes for block in blocks) + layout.outside_blocks_bytes == total
        assert len(blocks) > 3


@pytest.mark.parametrize(
    ("hub_id", "component", "class_name", "dtype"),
    [
        ("nobody/nothing", "unet", "UNet2DConditionModel", "float16"),
        (QUICK[2], "text_encoder", "CLIPTextModel", "float16"),  # of transformers
        (QUICK[2], "unet", "UNet2DModel", "float16"),  # another class than the pipeline's
        (QUICK[2], "unet", "UNet2DConditionModel", "float8_e4m3fn"),
        (QUICK[2], "tokenizer", "CLIPTokenizer", "float16"),
    ],
)
def test_packaged_layout_of_what_is_not_packaged(hub_id: str, component: str, class_name: str, dtype: str) -> None:
    """There is none, rather than a wrong one."""
    assert packaged_layout(hub_id, component, class_name, dtype) is None


def test_packaged_layout_of_an_alias_is_that_of_the_pipeline() -> None:
    """An old id answers as the pipeline does."""
    names = ("unet", "UNet2DConditionModel", "float16")
    alias = packaged_layout("runwayml/stable-diffusion-v1-5", *names)
    assert alias is not None
    assert alias == packaged_layout("stable-diffusion-v1-5/stable-diffusion-v1-5", *names)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "hub_id", [pytest.param(hub_id, marks=() if hub_id in QUICK else pytest.mark.slow) for hub_id in CANONICAL_IDS]
)
def test_packaged_layout_is_what_its_config_builds(hub_id: str) -> None:
    """Built on the meta device from its config, every module has the layout's bytes, in the class's order."""
    folder = config_folder(hub_id)
    assert folder is not None
    for part in diffusers_parts(hub_id):
        built = build(str(folder / part.name), part.class_name)
        for dtype in DTYPES:
            layout = packaged_layout(hub_id, part.name, part.class_name, dtype)
            assert layout is not None
            known = {module.path: module.own_bytes for module in layout.modules if module.own_bytes}
            stored = stored_bytes(built, dtype)
            assert known == stored
            assert members(known)[""] == members(stored)[""]


def build(folder: str, class_name: str) -> Any:
    import diffusers
    import torch

    cls = getattr(diffusers, class_name)
    with torch.device("meta"):
        return cls.from_config(cls.load_config(folder))


def stored_bytes(module: Any, dtype: str) -> Counter[str]:
    """The bytes of each module's own stored tensors once loaded; those that its class keeps are float32."""
    kept = {*(module._keep_in_fp32_modules or ())}
    found: Counter[str] = Counter()
    for name, tensor in module.state_dict().items():
        width = 4 if kept & {*name.split(".")} else WIDTHS[dtype]
        found[name.rpartition(".")[0]] += tensor.numel() * (width if tensor.is_floating_point() else tensor.itemsize)
    return +found


# --- components of transformers, by what their config says ---


def encoders() -> Iterator[tuple[str, CatalogComponent]]:
    """Every component of another library, once for each config."""
    seen: set[str] = set()
    for hub_id in CANONICAL_IDS:
        for part in pipeline_of(hub_id).components:
            if part.is_module and part.library != "diffusers":
                key = fingerprint(read_config(folder_of(hub_id, part.name)), part.class_name)
                if key not in seen:
                    seen.add(key)
                    yield hub_id, part


def folder_of(hub_id: str, component: str) -> Path:
    folder = config_folder(hub_id)
    assert folder is not None
    return folder / component


def known(hub_id: str, part: CatalogComponent, dtype: str, **changes: Any) -> Layout | None:
    """The layout of an encoder with its own config, or with one that differs."""
    facts = class_facts(part.library, part.class_name)
    assert facts is not None
    keep, strict = facts.keep_in_fp32_modules, facts.keep_in_fp32_modules_strict
    return layout_by_config(
        {**read_config(folder_of(hub_id, part.name)), **changes},
        part.class_name,
        dtype,
        members=facts.members,
        keep_in_fp32=fp32_patterns(library=part.library, dtype=dtype, keep=keep, keep_strict=strict),
    )


ENCODERS = {f"{hub_id}-{part.name}": (hub_id, part) for hub_id, part in encoders()}
T5 = next(each for each in ENCODERS.values() if each[1].class_name == "T5EncoderModel")
QUICKLY_BUILT = ("CLIPTextModel", "T5EncoderModel")


@pytest.mark.parametrize(("hub_id", "part"), [pytest.param(*each, id=name) for name, each in ENCODERS.items()])
def test_layout_by_config_sums_to_the_bytes_of_the_catalogue(hub_id: str, part: CatalogComponent) -> None:
    """All modules together are as large as the component is known to be, but for buffers that are in no file."""
    for dtype in DTYPES:
        layout = known(hub_id, part, dtype)
        assert layout is not None
        assert layout.can_split
        size = part.bytes_by_dtype[dtype]
        assert 0 <= size - sum(module.own_bytes for module in layout.modules) < 20_000_000


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("hub_id", "part"),
    [pytest.param(*each, id=name, marks=() if each[1].class_name in QUICKLY_BUILT else pytest.mark.slow)
     for name, each in ENCODERS.items()],
)  # fmt: skip
def test_layout_by_config_is_what_its_config_builds(hub_id: str, part: CatalogComponent) -> None:
    """Built on the meta device, every module has these bytes in its stored tensors, and shares the same ones."""
    for dtype in DTYPES:
        module = build_on_meta(folder_of(hub_id, part.name), part.library, part.class_name, dtype)
        stored, sizes = module.state_dict().keys(), dict(module_bytes(module, dtype))
        own: Counter[str] = Counter()
        for name, nbytes in sizes.items():
            own[name.rpartition(".")[0]] += nbytes * (name in stored)
        layout = known(hub_id, part, dtype)
        assert layout is not None
        assert {each.path: each.own_bytes for each in layout.modules if each.own_bytes} == +own
        built = {each.path: each.shares_with for each in layout_of(module, dtype).modules if each.shares_with}
        assert {each.path: each.shares_with for each in layout.modules if each.shares_with} == built


def test_layout_by_config_is_known_by_what_builds_the_component() -> None:
    """What a config says of dtypes and versions does not matter; another width, class or version of the class does."""
    hub_id, part = T5
    assert known(hub_id, part, "bfloat16", torch_dtype="float32", transformers_version="5.0") is not None
    assert known(hub_id, part, "bfloat16", d_ff=1) is None
    assert known(hub_id, part, "float8_e4m3fn") is None
    config = read_config(folder_of(hub_id, part.name))
    assert (
        layout_by_config(config, "UMT5EncoderModel", "bfloat16", members=["shared", "encoder"], keep_in_fp32=()) is None
    )
    assert layout_by_config(config, part.class_name, "bfloat16", members=["model"], keep_in_fp32=()) is None


def test_layout_by_config_cut_keeps_a_shared_weight_in_one_place() -> None:
    """T5's embedding, which two modules have, is in one part whichever card the blocks are on."""
    hub_id, part = T5
    layout = known(hub_id, part, "bfloat16")
    assert layout is not None
    blocks, total = Blocks(layout), sum(module.own_bytes for module in layout.modules)
    row = blocks.rows[0]
    for first in range(row.count):
        cut = Cut("cuda:0", row, (("cuda:0", first), ("cuda:1", row.count)), (), {}, 0, 0.0)
        places = blocks.places(cut)
        here, there = (places[nearest_ancestor(path, places)] for path in ("shared", "encoder.embed_tokens"))
        assert here == there == Place("cuda:0" if first else "cuda:1")
        loads = part_loads(layout, places, stays=False)
        assert sum(load.nbytes for load in loads.values()) == total
