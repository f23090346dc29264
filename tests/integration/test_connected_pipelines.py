"""Pipelines that are made of several (``_load_connected_pipes``): planned, loaded and placed as if they were one.

The reference is the same pipeline on the cpu, its components loaded one by one and put together as diffusers does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dmconfig import load_from_yaml, plan_from_yaml, to_spec, unload
from dmconfig.assembly import assumed_order
from dmconfig.checked import check_file
from dmconfig.errors import Code, SpecError
from dmconfig.facts import PipelineFacts, known_pipelines, pipeline_facts
from dmconfig.load import plan_for
from dmconfig.pinning import pin
from dmconfig.rehearse import rehearse
from dmconfig.rehearse.script import Script, Settings
from tests.conftest import inventory, only_problem
from tests.loopback_hub import Hub
from tests.tiny_combined import CLASSES, by_hand, draw_combined, write_combined
from tests.virtual_devices import MakeMachine

EVERY = [(kind, name) for kind, names in CLASSES.items() for name in names]
BESIDE = "connected: {prior: {source: ./prior}}"
TWO_DEVICES = "device_map: {prior_prior: cuda:0, default: cuda:1}"
WITHOUT_AN_ORDER = [
    facts
    for facts in map(pipeline_facts, known_pipelines())
    if facts is not None and facts.model_cpu_offload_seq is None
]
CARD = "---\nlicense: apache-2.0\nprior:\n- tiny/prior\ntags: [text-to-image]\n---\n# A decoder\n"


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """All pictures are made by one thread, so that they are the same bit for bit."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder and a prior of each kind."""
    root = tmp_path_factory.mktemp("combined")
    return {kind: write_combined(kind, root / kind) for kind in CLASSES}


def spec(folder: Path, class_name: str, more: str = BESIDE, rest: str = "", source: str = "./decoder") -> Path:
    """A spec beside the two folders."""
    file = folder / "pipe.yaml"
    devices = "".join(f"{line}\n" for line in ("reserve: 0", rest) if line)
    file.write_text(f"version: 1\npipeline:\n  source: {source}\n  class: {class_name}\n  {more}\n{devices}")
    return file


def device_map(class_name: str) -> str:
    """Both devices, whatever the class calls what decodes."""
    decoder = "movq" if class_name.startswith("Kandinsky") else "vqgan"
    return f"device_map: {{default: cuda:1, {decoder}: cuda:0, prior_prior: cuda:0}}"


@pytest.mark.parametrize(("kind", "class_name"), EVERY)
def test_every_combined_class_on_two_devices_draws_as_by_hand(
    kind: str, class_name: str, folders: dict[str, Path], virtual_machine: MakeMachine
) -> None:
    """Its prior's components come from the connected folder, are placed like any others, and run twice alike."""
    expected = draw_combined(by_hand(class_name, folders[kind]))
    file = spec(folders[kind], class_name, rest=device_map(class_name))
    virtual_machine()

    pipe = load_from_yaml(file)

    assert type(pipe).__name__ == class_name
    assert pipe.hf_device_map["prior_prior"] == "cuda:0"
    assert set(pipe.hf_device_map.values()) == {"cuda:0", "cuda:1"}
    for _ in range(2):
        assert np.array_equal(draw_combined(pipe), expected)
    unload(pipe)


@pytest.mark.parametrize("kind", ["kandinsky", "cascade", "wuerstchen"])
def test_cpu_offload_with_hook_of_a_combined_class_draws_as_by_hand(
    kind: str, folders: dict[str, Path], virtual_machine: MakeMachine
) -> None:
    """Two of these classes have no ``model_cpu_offload_seq``: their components take turns in an assumed order."""
    class_name = CLASSES[kind][0]
    expected = draw_combined(by_hand(class_name, folders[kind]))
    file = spec(folders[kind], class_name, rest="device_map: cuda:1\nlow_memory: cpu_offload_with_hook")
    machine = virtual_machine()

    pipe = load_from_yaml(file)

    for _ in range(2):
        assert np.array_equal(draw_combined(pipe), expected)
    weights = sum(each.nbytes for each in pipe._placement.plan.assignments)
    assert machine.ledger.live_bytes("cuda:1") < weights  # what was brought has gone home
    assert {each.residency.value for each in pipe._placement.plan.assignments} == {"while_running"}
    unload(pipe)


def test_rehearsal_of_a_combined_class_runs_both_of_its_pipelines(folders: dict[str, Path]) -> None:
    """The prior on one device, the decoder on the other; each scheduler's steps are counted by its own parameter."""
    file = spec(folders["cascade"], "StableCascadeCombinedPipeline", rest=TWO_DEVICES)
    checked, machine = check_file(file), inventory(cuda=(8, 8))
    script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)

    told = rehearse(script, plan_for(checked, machine), machine, Settings(height=128, width=128))

    assert (told.failure, told.output) == (None, (1, 128, 128))
    assert [device.peak.phase.partition(".")[0] for device in told.devices] == ["prior_prior", "vqgan"]


def test_plan_of_a_class_without_an_order_says_which_is_assumed(folders: dict[str, Path]) -> None:
    """The prior first, encoders before what denoises, what decodes last; a class that says its order has no remark."""
    cascade = plan_from_yaml(spec(folders["cascade"], "StableCascadeCombinedPipeline", rest="device_map: cpu"))
    said = plan_from_yaml(spec(folders["kandinsky"], "KandinskyCombinedPipeline", rest="device_map: cpu"))

    order = "prior_text_encoder, prior_prior, text_encoder, decoder, vqgan"
    remark = f"StableCascadeCombinedPipeline does not say in which order its components run; taken to be: {order}"
    assert [note for note in cascade.notes if "order" in note] == [remark]
    assert not [note for note in said.notes if "order" in note]


@pytest.mark.parametrize("facts", WITHOUT_AN_ORDER, ids=lambda facts: facts.class_name)
def test_every_class_without_an_order_gets_one_of_all_its_components(facts: PipelineFacts) -> None:
    """Nothing is lost, and nothing that decodes runs before what denoises."""
    names = [slot.name for slot in facts.slots]

    order = assumed_order(names)

    assert sorted(order) == sorted(names)
    for denoiser in ("unet", "transformer", "decoder"):
        for last in ("vae", "vqvae", "vqgan", "vocoder"):
            assert not {denoiser, last} <= set(names) or order.index(denoiser) < order.index(last)


def test_combined_of_two_repositories_is_fetched_as_the_model_card_says(
    folders: dict[str, Path], hub: Hub, tmp_path: Path, virtual_machine: MakeMachine
) -> None:
    """The card of the decoder names the prior: its index and weights are downloaded, and what runs is the same."""
    hub.add("tiny/decoder", folders["cascade"] / "decoder", {"README.md": CARD.encode()})
    hub.add("tiny/prior", folders["cascade"] / "prior", {"more/model.safetensors": b"not needed"})
    name = "StableCascadeCombinedPipeline"
    expected = draw_combined(by_hand(name, folders["cascade"]))
    file = spec(tmp_path, name, "dtype: auto", device_map(name), source="tiny/decoder")
    virtual_machine()

    pipe = load_from_yaml(file)

    assert np.array_equal(draw_combined(pipe), expected)
    assert "more/model.safetensors" not in hub.downloaded("tiny/prior")
    (remark,) = [note for note in pipe._placement.plan.notes if note.startswith("not pinned")]
    assert "tiny/decoder, tiny/prior" in remark
    unload(pipe)


def test_connected_source_at_a_commit_is_pinned_and_one_of_the_card_must_not_move(
    folders: dict[str, Path], hub: Hub, tmp_path: Path
) -> None:
    """With ``allow_moving_revision: false`` the card's id is refused, and the same at a commit in the file is not."""
    decoder = hub.add("tiny/decoder", folders["cascade"] / "decoder", {"README.md": CARD.encode()}).commit
    prior = hub.add("tiny/prior", folders["cascade"] / "prior").commit
    name, pinned = "StableCascadeCombinedPipeline", "allow_moving_revision: false"
    file = spec(tmp_path, name, f"revision: {decoder}", pinned, source="tiny/decoder")

    with pytest.raises(SpecError) as caught:
        check_file(file, ask_hub=True)
    assert {problem.code for problem in caught.value.problems} == {Code.MOVING_REVISION}
    assert "has 'prior_prior' in tiny/prior, which is no commit" in str(caught.value)

    more = f"revision: {decoder}\n  connected: {{prior: {{source: tiny/prior, revision: {prior}}}}}"
    assembly = check_file(spec(tmp_path, name, more, pinned, source="tiny/decoder"), ask_hub=True).assembly
    (part,) = [each for each in assembly.components if each.name == "prior_prior"]
    assert (part.source.revision, part.class_name) == (prior, "StableCascadeUNet")


def test_offline_combined_that_names_every_component_asks_nothing(
    folders: dict[str, Path], hub: Hub, tmp_path: Path
) -> None:
    """Where the file gives all of the prior's components, nobody has to say where the prior is."""
    parts = ("prior", "text_encoder", "tokenizer", "scheduler")
    prior = folders["cascade"] / "prior"
    more = {"tokenizer": ", class: CLIPTokenizer"}
    lines = "".join(f"\n  prior_{name}: {{source: {prior}, subfolder: {name}{more.get(name, '')}}}" for name in parts)
    file = spec(tmp_path, "StableCascadeCombinedPipeline", "dtype: auto", f"components:{lines}", "tiny/decoder")
    hub.add("tiny/decoder", folders["cascade"] / "decoder")

    assert check_file(file, ask_hub=True).assembly.absent == ("prior_feature_extractor", "prior_image_encoder")
    assert hub.downloaded("tiny/decoder") == ["model_index.json"]


def test_pin_writes_the_commit_of_a_connected_pipeline(folders: dict[str, Path], hub: Hub, tmp_path: Path) -> None:
    """Beside its source, as for any other hub id."""
    decoder = hub.add("tiny/decoder", folders["cascade"] / "decoder").commit
    prior = hub.add("tiny/prior", folders["cascade"] / "prior").commit
    more = f"revision: {decoder}\n  connected:\n    prior:\n      source: tiny/prior"
    file = spec(tmp_path, "StableCascadeCombinedPipeline", more, source="tiny/decoder")

    pin(file).write()

    assert f"      source: tiny/prior\n      revision: {prior}\n" in file.read_text()


@pytest.mark.parametrize("kind", ["kandinsky", "cascade"])
def test_exported_spec_of_a_combined_pipeline_loads_the_same(kind: str, folders: dict[str, Path]) -> None:
    """The connected source is told by the components that came from it; what has no weights is compared with it."""
    pipe = load_from_yaml(spec(folders[kind], CLASSES[kind][0], rest="device_map: cpu"))
    export = to_spec(pipe, folders[kind])
    file = folders[kind] / "exported.yaml"
    file.write_text(export.text())

    assert export.unknown == ()
    assert export.plain()["pipeline"]["connected"] == {"prior": {"source": "./prior"}}
    assert "components" not in export.plain()
    assert np.array_equal(draw_combined(load_from_yaml(file)), draw_combined(pipe))


# What is wrong


def test_connected_pipeline_that_nobody_names_is_asked_for_once(folders: dict[str, Path]) -> None:
    """One problem, not one per component of the prior."""
    with pytest.raises(SpecError) as caught:
        check_file(spec(folders["kandinsky"], "KandinskyCombinedPipeline", "dtype: auto"))

    problem = only_problem(caught.value)
    assert problem.code is Code.CONNECTED_NOT_TOLD
    assert problem.what == "KandinskyCombinedPipeline has a prior pipeline, and where that comes from is not told"
    assert problem.fix == "add pipeline.connected: {prior: {source: ...}} with its folder or hub id"


def test_connected_pipeline_of_a_class_that_has_none_is_refused(folders: dict[str, Path]) -> None:
    """A key that would mean nothing is told."""
    with pytest.raises(SpecError) as caught:
        check_file(spec(folders["kandinsky"], "KandinskyPipeline"))

    problem = only_problem(caught.value)
    assert problem.what == "KandinskyPipeline has no connected pipeline 'prior'"
    assert problem.path == ("pipeline", "connected", "prior")


def test_connected_folder_that_is_not_there_is_told_at_its_place(folders: dict[str, Path]) -> None:
    """The path of the file is the one of the connected source."""
    missing = "connected: {prior: {source: ./prio}}"
    with pytest.raises(SpecError) as caught:
        check_file(spec(folders["kandinsky"], "KandinskyCombinedPipeline", missing))

    problem = only_problem(caught.value)
    assert problem.path == ("pipeline", "connected", "prior", "source")
    assert problem.code is Code.SOURCE_NOT_FOUND
    assert "did you mean 'prior'" in problem.fix


def test_path_in_a_model_card_is_not_followed(folders: dict[str, Path], tmp_path: Path) -> None:
    """Files of a pipeline do not lead to folders of the machine."""
    (tmp_path / "decoder").symlink_to(folders["wuerstchen"] / "decoder")
    card = folders["wuerstchen"] / "decoder" / "README.md"
    card.write_text(CARD.replace("tiny/prior", "../prior"))
    try:
        with pytest.raises(SpecError) as caught:
            check_file(spec(tmp_path, "WuerstchenCombinedPipeline", "dtype: auto"))
    finally:
        card.unlink()

    problem = only_problem(caught.value)
    assert problem.code is Code.OUTSIDE_SOURCE
    assert problem.fix == "give pipeline.connected.prior a source"
