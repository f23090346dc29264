"""How components are laid out, held against the tensors of real ones: tiny, of the real classes, loaded from disk."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers

from dmconfig.errors import SourceError
from dmconfig.layout import Layout, is_within, lay_out, layout_of, layout_of_tensors, nearest_ancestor
from tests.conftest import only_problem
from tests.tiny_pipelines import KINDS, write_tiny


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A component as its own class loads it, and its layout as its folder tells it."""

    name: str
    module: Any
    layout: Layout


@dataclass(slots=True)
class Tiny:
    """The tiny pipelines and their components, each made when it is first asked for."""

    folder: Path
    _components: dict[tuple[str, str], list[Loaded]] = field(default_factory=dict)

    def pipeline(self, kind: str) -> Path:
        """Return the folder of a kind."""
        folder = self.folder / kind
        return folder if folder.exists() else write_tiny(kind, folder)

    def components(self, kind: str, dtype: str = "float32") -> list[Loaded]:
        """Return the components of diffusers and transformers that have weights."""
        if (kind, dtype) not in self._components:
            self._components[kind, dtype] = [*_load(self.pipeline(kind), dtype)]
        return self._components[kind, dtype]

    def component(self, kind: str, name: str) -> Loaded:
        """Return one of them."""
        return next(each for each in self.components(kind) if each.name == name)


def _load(folder: Path, dtype: str) -> Iterator[Loaded]:
    index: dict[str, Any] = json.loads((folder / "model_index.json").read_bytes())
    for name, (library, class_name) in ((name, entry) for name, entry in index.items() if isinstance(entry, list)):
        if library in ("diffusers", "transformers") and [*(folder / name).glob("*.safetensors")]:
            cls = getattr(diffusers if library == "diffusers" else transformers, class_name)
            module = cls.from_pretrained(folder / name, dtype=getattr(torch, dtype))
            yield Loaded(name=name, module=module, layout=lay_out(folder / name, library, class_name, dtype))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny pipelines, written once for the module."""
    return Tiny(tmp_path_factory.mktemp("tiny"))


def own_bytes(module: torch.nn.Module) -> Counter[str]:
    """The bytes of each module's own tensors; torch names a tensor that several hold by the first of them."""
    found: Counter[str] = Counter()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found[name.rpartition(".")[0]] += tensor.numel() * tensor.element_size()
    return found


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("wan", "float16"), ("flux", "float16")]
)
def test_layout_is_that_of_the_loaded_component(kind: str, dtype: str, tiny: Tiny) -> None:
    """Built from its config alone, it has the modules of the loaded one in the same order, with the same bytes each."""
    found = tiny.components(kind, dtype)

    assert len(found) >= 3
    for each in found:
        paths = [path for path, _ in each.module.named_modules(remove_duplicate=False)]
        assert [module.path for module in each.layout.modules] == paths, each.name
        assert Counter({module.path: module.own_bytes for module in each.layout.modules}) == own_bytes(each.module)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_below_a_path_are_those_of_its_tensors(kind: str, tiny: Tiny) -> None:
    """For every module of every component: what the layout says is below it is what its own tensors weigh."""
    for each in tiny.components(kind):
        own = own_bytes(each.module)
        for module in each.layout.modules:
            below = sum(
                size for path, size in own.items() if f"{path}.".startswith(f"{module.path}.") or not module.path
            )
            assert sum(inner.own_bytes for inner in each.layout.below(module.path)) == below


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_part_a_component(kind: str, tiny: Tiny) -> None:
    """Every module with weights is in one block, or is a parent of blocks; blocks come in the order of the class."""
    for each in tiny.components(kind):
        layout, blocks = each.layout, each.layout.blocks()
        paths = [module.path for module in layout.modules]
        assert [paths.index(block.path) for block in blocks] == sorted(paths.index(block.path) for block in blocks)
        for module in layout.modules:
            around = [block for block in blocks if is_within(module.path, block.path)]
            within = [block for block in blocks if is_within(block.path, module.path)]
            if module.own_bytes:
                assert len(around) == 1 or (not around and within), f"{each.name}.{module.path}"
            assert len(around) <= 1
        assert sum(block.nbytes for block in blocks) + layout.outside_blocks_bytes == own_bytes(each.module).total()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_what_the_class_keeps_whole(kind: str, tiny: Tiny) -> None:
    """No block ends inside a module that the class keeps whole, and none begins above one that could be cut."""
    for each in tiny.components(kind):
        keep = each.module._no_split_modules
        assert each.layout.can_split == (keep is not None)
        blocks = [block.path for block in each.layout.blocks()]
        for path, module in each.module.named_modules():
            if type(module).__name__ in (keep or ()):
                assert sum(is_within(path, block) for block in blocks) == 1, f"{each.name}.{path}"
        for path in blocks:
            module = each.module.get_submodule(path)
            assert type(module).__name__ in (keep or ()) or not [*module.children()], f"{each.name}.{path}"


def test_layers_are_measured_by_the_largest(tiny: Tiny) -> None:
    """The largest layer of a block is the module in it whose own tensors weigh most."""
    transformer = tiny.component("flux", "transformer")
    own = own_bytes(transformer.module)
    for block in transformer.layout.blocks():
        assert block.largest_leaf_bytes == max(own[path] for path in own if is_within(path, block.path))


def test_a_tied_weight_counts_once_and_names_its_holder(tiny: Tiny) -> None:
    """T5's embeddings are one weight under two names; the second is a block without bytes that goes with the first."""
    encoder = tiny.component("flux", "text_encoder_2")
    blocks = {block.path: block for block in encoder.layout.blocks()}

    assert encoder.module.shared.weight is encoder.module.encoder.embed_tokens.weight
    table = encoder.module.shared.weight
    assert blocks["shared"].nbytes == table.numel() * table.element_size()
    assert blocks["shared"].shares_with is None
    assert blocks["encoder.embed_tokens"].nbytes == 0
    assert blocks["encoder.embed_tokens"].shares_with == "shared"
    assert {block.shares_with for path, block in blocks.items() if path != "encoder.embed_tokens"} == {None}


class Toy(torch.nn.Module):
    """What ``layout_of`` asks of a class of transformers, in float32."""

    _keep_in_fp32_modules = None
    _no_split_modules = ("Sequential",)


def test_a_module_in_two_places_is_one_weight() -> None:
    """Before transformers 5, T5's encoder held the very embeddings of the model: the same rule as for a tied weight."""
    toy = Toy()
    toy.shared = torch.nn.Embedding(3, 4)
    toy.encoder = torch.nn.ModuleDict({"embed_tokens": toy.shared, "norm": torch.nn.LayerNorm(4)})

    layout = layout_of(toy, "float32")

    assert [(block.path, block.nbytes, block.shares_with) for block in layout.blocks()] == [
        ("shared", 48, None),
        ("encoder.embed_tokens", 0, "shared"),
        ("encoder.norm", 32, None),
    ]


def test_a_weight_shared_within_a_block_is_the_block_s_own_affair() -> None:
    """A tie between two layers of one block does not bind the block to another."""
    toy = Toy()
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(3)]
    layers[1].weight = layers[2].weight = layers[0].weight
    toy.block, toy.head = torch.nn.Sequential(*layers[:2]), layers[2]

    blocks = layout_of(toy, "float32").blocks()

    assert [(block.path, block.nbytes, block.shares_with) for block in blocks] == [
        ("block", 64, None),
        ("head", 0, "block.0"),
    ]


def test_what_parents_of_blocks_own_is_in_none() -> None:
    """A table of the component itself, and buffers, stored or not, are counted outside its blocks."""
    toy = Toy()
    toy.table = torch.nn.Parameter(torch.zeros(5))
    toy.register_buffer("positions", torch.zeros(3, dtype=torch.int64), persistent=False)
    toy.layer = torch.nn.Linear(2, 2)

    layout = layout_of(toy, "float32")

    assert layout.outside_blocks_bytes == 5 * 4 + 3 * 8
    assert [block.path for block in layout.blocks()] == ["layer"]
    assert layout.has("layer")
    assert not layout.has("lay")


def test_a_class_without_word_of_blocks_cannot_be_split(tiny: Tiny) -> None:
    """LTX's transformer does not say which of its modules stay whole; its layers are known all the same."""
    transformer = tiny.component("ltx", "transformer")
    assert transformer.module._no_split_modules is None
    assert not transformer.layout.can_split


def test_a_config_that_its_class_refuses_is_told(tiny: Tiny, tmp_path: Path) -> None:
    """The problem names the component, its class and the class's own words."""
    config = json.loads((tiny.pipeline("sd") / "unet" / "config.json").read_bytes())
    folder = tmp_path / "unet"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "down_block_types": ["NoSuchBlock"] * 2}))

    with pytest.raises(SourceError) as caught:
        lay_out(folder, "diffusers", "UNet2DConditionModel", "float32")

    problem = only_problem(caught.value)
    assert problem.what == "unet cannot be split: UNet2DConditionModel cannot be built from its config.json"
    assert problem.why == "ValueError: NoSuchBlock does not exist."
    assert problem.origin == str(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_tell_the_layout_of_a_diffusers_component(kind: str, tiny: Tiny) -> None:
    """The names in its files give the same bytes per module, in whole blocks that never cut what the class keeps."""
    for each in tiny.components(kind):
        if not isinstance(each.module, diffusers.ModelMixin):
            continue
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in each.module.state_dict().items()}
        order = [name for name, _ in each.module.named_children()]
        shuffled = sorted(sizes.items(), key=lambda item: item[0][::-1])
        layout = layout_of_tensors(shuffled, order=order, can_split=each.layout.can_split)

        own: Counter[str] = Counter()
        for name, nbytes in sizes.items():
            own[name.rpartition(".")[0]] += nbytes
        assert Counter({module.path: module.own_bytes for module in layout.modules}) == own
        assert layout.can_split == each.layout.can_split
        blocks = [block.path for block in layout.blocks()]
        for path, module in each.module.named_modules():
            if type(module).__name__ in (each.module._no_split_modules or ()):
                assert sum(is_within(path, block) for block in blocks) == 1, f"{each.name}.{path}"
        members = [block.partition(".")[0] for block in blocks]
        assert members == sorted(members, key=order.index)


def test_tensors_of_a_list_come_by_number() -> None:
    """The tenth block is after the second, and a block's layers are one block."""
    sizes = [(f"blocks.{index}.{layer}.weight", 1) for index in (10, 2, 1) for layer in ("ff", "attn.0")]
    layout = layout_of_tensors([*sizes, ("table", 3), ("head.weight", 2)], order=["blocks", "head"], can_split=True)

    assert [(block.path, block.nbytes) for block in layout.blocks()] == [
        ("blocks.1", 2),
        ("blocks.2", 2),
        ("blocks.10", 2),
        ("head", 2),
    ]
    assert layout.outside_blocks_bytes == 3


@pytest.mark.parametrize(
    ("path", "ancestor", "within"),
    [
        ("blocks.1", "blocks.1", True),
        ("blocks.1.norm", "blocks.1", True),
        ("blocks.10", "blocks.1", False),
        ("blocks", "blocks.1", False),
        ("blocks", "", True),
        ("", "", True),
        ("", "blocks", False),
    ],
)
def test_is_within_goes_by_whole_words(path: str, ancestor: str, within: bool) -> None:
    """A path is within another when it is that or below it, and everything is within the empty one."""
    assert is_within(path, ancestor) is within


def test_nearest_ancestor_is_the_longest() -> None:
    """Of several paths around one, the longest; the empty one where none is."""
    paths = {"blocks": 0, "blocks.1": 0}
    assert nearest_ancestor("blocks.1.norm.weight", paths) == "blocks.1"
    assert nearest_ancestor("blocks.10.norm", paths) == "blocks"
    assert nearest_ancestor("norm", paths) == ""
