from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmconfig.errors import Code, SourceError
from dmconfig.source import Entry, Source, locate_source, model_class_in, read_index, read_json
from tests.conftest import EXAMPLES, only_problem

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"], "image_encoder": [None, None]}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Give a function that puts a snapshot into a hub cache of the test's own."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(hub_id: str, commit: str = COMMIT, *, ref: str | None = "main", index: Any = INDEX) -> Path:
        repository = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "model_index.json").write_text(json.dumps(index))
        if ref:
            (repository / "refs").mkdir(exist_ok=True)
            (repository / "refs" / ref).write_text(f"{commit}\n")
        return snapshot

    return put


def pipeline_folder(folder: Path, index: object = INDEX) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def refusal(text: str, folder: Path, revision: str | None = None) -> tuple[Code, str, str]:
    with pytest.raises(SourceError) as caught:
        locate_source(text, folder=folder, revision=revision)
    problem = only_problem(caught.value)
    return problem.code, problem.what, problem.fix


@pytest.mark.parametrize("text", ["./models/flux", "../specs/models/flux", "./models/../models/flux/", "~/models/flux"])
def test_locate_source_folder_starts_where_told(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder starts in the given folder, ~ in the user's; the current folder does not matter."""
    specs = tmp_path / "specs"
    flux = pipeline_folder(specs / "models" / "flux")
    monkeypatch.setenv("HOME", str(specs))
    source = locate_source(text, folder=specs)
    assert (source.text, source.folder, source.hub_id) == (text, flux, None)


def test_locate_source_absolute_and_dot(tmp_path: Path) -> None:
    """An absolute folder is itself; a dot is the folder of the file."""
    assert locate_source(str(tmp_path), folder=Path("/")).folder == tmp_path
    assert locate_source(".", folder=tmp_path).folder == tmp_path


def test_locate_source_folder_that_is_not_there_suggests_a_sibling(tmp_path: Path) -> None:
    """A misspelt folder is answered with its nearest neighbour."""
    pipeline_folder(tmp_path / "flux-dev")
    assert refusal("./flux-dv", tmp_path) == (
        Code.SOURCE_NOT_FOUND,
        f"there is no folder {tmp_path / 'flux-dv'}",
        f"did you mean 'flux-dev' in {tmp_path}?",
    )
    assert refusal("./no/such/parent", tmp_path)[2] == f"check the path; it starts in {tmp_path}"


def test_locate_source_file_of_weights(tmp_path: Path) -> None:
    """A file of weights is a source; a pipeline's index and other files are not, and it is told what is."""
    for name in ("model.safetensors", "model.gguf", "model.ckpt", "model_index.json", "notes.txt"):
        (tmp_path / name).touch()
    source = locate_source("./model.safetensors", folder=tmp_path)
    assert (source.folder, source.file, source.path) == (tmp_path, "model.safetensors", tmp_path / "model.safetensors")
    assert [locate_source(f"./model.{end}", folder=tmp_path).is_pickle for end in ("ckpt", "gguf")] == [True, False]
    assert refusal("./model_index.json", tmp_path)[1:] == (
        "./model_index.json is the index of a pipeline", f"write its folder: {tmp_path}",
    )  # fmt: skip
    assert refusal("./notes.txt", tmp_path)[1:] == (
        "./notes.txt is a file, and not one of weights", "name a folder, or a file that ends in .safetensors or .gguf",
    )  # fmt: skip
    assert refusal("./model-2.safetensors", tmp_path)[1] == f"there is no file {tmp_path / 'model-2.safetensors'}"


def test_locate_source_file_on_the_hub(hub: Callable[..., Path], tmp_path: Path) -> None:
    """A hub id with a file behind it is that file; the address of its page is answered with how to write it."""
    snapshot = hub("org/name")
    (snapshot / "a").mkdir()
    (snapshot / "a" / "flux-Q4_K_S.gguf").touch()
    source = locate_source("org/name/a/flux-Q4_K_S.gguf", folder=tmp_path, revision=COMMIT)
    assert (source.hub_id, source.file, source.is_gguf) == ("org/name", "a/flux-Q4_K_S.gguf", True)
    assert source.path == snapshot / "a" / "flux-Q4_K_S.gguf"
    assert locate_source("org/name/other.safetensors", folder=tmp_path).path is None
    page = "https://example.org/org/name/blob/main/a/flux-Q4_K_S.gguf"
    assert refusal(page, tmp_path)[2] == "write org/name/a/flux-Q4_K_S.gguf with revision: main"
    assert refusal("org/name/../x.safetensors", tmp_path)[0] is Code.SOURCE_NOT_FOUND


@pytest.mark.parametrize("text", ["flux", "a/b/c", "", "a b/c", "/", "models\\flux", "-a/b", "a/"])
def test_locate_source_neither_folder_nor_hub_id_is_refused(text: str, tmp_path: Path) -> None:
    """What is written like neither is refused, with both ways to write it."""
    if text == "/":
        assert locate_source(text, folder=tmp_path).folder == Path("/")
        return
    code, what, fix = refusal(text, tmp_path)
    assert (code, what) == (Code.SOURCE_NOT_FOUND, f"{text!r} is neither a folder nor a hub id")
    assert fix == f"write ./{text} for a folder beside the file, or organisation/name for a hub id"


@pytest.mark.parametrize("text", ["./" + "a" * 300, "~nosuchuser/models/flux"])
def test_locate_source_path_the_system_refuses_is_a_problem(text: str, tmp_path: Path) -> None:
    """A name longer than a file system takes and the home of nobody are folders that are not there."""
    assert refusal(text, tmp_path)[0] is Code.SOURCE_NOT_FOUND


def test_locate_source_address_of_a_page_is_answered_with_its_hub_id(tmp_path: Path) -> None:
    """A copied address is no source, and the hub id in it is shown."""
    code, _, fix = refusal("https://example.org/org/name/tree/main", tmp_path)
    assert (code, fix) == (Code.SOURCE_NOT_FOUND, "write the hub id in it: org/name")


def test_locate_source_hub_id_that_is_also_a_folder_is_refused(tmp_path: Path) -> None:
    """Which of the two is meant must not depend on the machine."""
    pipeline_folder(tmp_path / "org" / "name")
    code, what, fix = refusal("org/name", tmp_path)
    assert (code, what) == (Code.SOURCE_NOT_FOUND, "'org/name' reads as a hub id, and a folder of that name exists")
    assert fix == "write ./org/name if the folder is meant"


def test_locate_source_hub_id_not_here_has_no_folder(hub: Callable[..., Path], tmp_path: Path) -> None:
    """A hub id is a source also when nothing of it is on this machine."""
    source = locate_source("org/name", folder=tmp_path, revision="v1")
    assert (source.hub_id, source.folder, source.revision) == ("org/name", None, "v1")


@pytest.mark.parametrize(("revision", "found"), [(None, True), ("main", True), (COMMIT, True), ("other", False)])
def test_locate_source_snapshot_of_the_revision(
    hub: Callable[..., Path], tmp_path: Path, revision: str | None, found: bool
) -> None:
    """A branch is followed to its commit; a commit is itself; another branch is not on this machine."""
    snapshot = hub("org/name")
    source = locate_source("org/name", folder=tmp_path, revision=revision)
    assert source.folder == (snapshot if found else None)


def test_read_index_of_a_snapshot_without_index_is_the_catalogues(hub: Callable[..., Path], tmp_path: Path) -> None:
    """A download that was broken off before the index says nothing about the pipeline; the catalogue still does."""
    hub_id = "black-forest-labs/FLUX.1-dev"
    (hub(hub_id) / "model_index.json").unlink()
    assert read_index(locate_source(hub_id, folder=tmp_path)).class_name == "FluxPipeline"


def test_read_index_of_a_folder(tmp_path: Path) -> None:
    """Class, components, left-out components and other settings are told apart; private keys are none."""
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": "0.42.1",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "safety_checker": [None, None],
        "requires_safety_checker": False,
        "sizes": [1, 2],
    }
    read = read_index(Source(text="./x", folder=pipeline_folder(tmp_path, index)))
    assert read.class_name == "StableDiffusionPipeline"
    assert dict(read.entries) == {
        "unet": Entry(library="diffusers", class_name="UNet2DConditionModel"),
        "safety_checker": None,
    }
    assert dict(read.config) == {"requires_safety_checker": False, "sizes": [1, 2]}


def test_read_index_of_the_example() -> None:
    """The example's pipeline is read."""
    read = read_index(locate_source("./digits/pipeline", folder=EXAMPLES))
    assert read.class_name == "StableDiffusionPipeline"
    assert read.entries["unet"] == Entry(library="diffusers", class_name="UNet2DConditionModel")


def test_read_index_of_the_catalogue(hub: Callable[..., Path], tmp_path: Path) -> None:
    """A well-known hub id needs no download to say what is in it; a snapshot on this machine comes first."""
    hub_id = "black-forest-labs/FLUX.1-dev"
    read = read_index(locate_source(hub_id, folder=tmp_path))
    assert read.class_name == "FluxPipeline"
    assert read.entries["text_encoder_2"] == Entry(library="transformers", class_name="T5EncoderModel")
    hub(hub_id, index={"_class_name": "Mine"})
    assert read_index(locate_source(hub_id, folder=tmp_path)).class_name == "Mine"


def test_read_index_unknown_hub_id_suggests_and_says_how_to_fetch(hub: Callable[..., Path], tmp_path: Path) -> None:
    """A hub id that is neither here nor known is refused with its near namesake and the command that fetches it."""
    with pytest.raises(SourceError) as caught:
        read_index(locate_source("black-forest-labs/FLUX.1-dv", folder=tmp_path))
    problem = only_problem(caught.value)
    assert problem.code is Code.SIZES_UNKNOWN
    assert problem.fix.startswith("did you mean 'black-forest-labs/FLUX.1-dev'? Otherwise ")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "is not a pipeline: it has no model_index.json"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe\xfa", "cannot be read as JSON"),
        (b"[]", "does not hold a JSON object"),
        (b"{}", "does not name a pipeline class (_class_name)"),
        (b'{"_class_name": 1}', "does not name a pipeline class (_class_name)"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_read_index_damaged_is_refused(tmp_path: Path, content: bytes | None, what: str) -> None:
    """A folder without an index, or with one that is damaged, is no pipeline; the file is named."""
    if content is not None:
        (tmp_path / "model_index.json").write_bytes(content)
    with pytest.raises(SourceError) as caught:
        read_index(Source(text="./x", folder=tmp_path))
    problem = only_problem(caught.value)
    assert problem.code is Code.NOT_A_PIPELINE
    assert what in problem.what
    assert str(tmp_path) in problem.what


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"_class_name": "AutoencoderKL"}}, "AutoencoderKL"),
        ({"config.json": {"architectures": ["CLIPTextModel", "Other"]}}, "CLIPTextModel"),
        ({"scheduler_config.json": {"_class_name": "DDIMScheduler"}}, "DDIMScheduler"),
        ({"config.json": {"architectures": []}}, None),
        ({"config.json": {"hidden_size": 3}}, None),
        ({"other.json": {"_class_name": "X"}}, None),
        ({}, None),
    ],
)
def test_model_class_in_reads_its_config(tmp_path: Path, files: dict[str, Any], expected: str | None) -> None:
    """A class of diffusers, an architecture of transformers; a config that names none, or no config, is None."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert model_class_in(tmp_path) == expected


def test_read_json_missing_file_is_a_problem(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(SourceError, match=r"nothing\.json cannot be read as JSON"):
        read_json(tmp_path / "nothing.json")
