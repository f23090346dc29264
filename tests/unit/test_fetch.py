"""Downloads with the real client against a hub on this machine; the choice of files also on listings of real ones."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import dedent

import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import are_progress_bars_disabled
from rich.console import Console

from dmconfig.checked import Checked, check_file
from dmconfig.console import ConsoleProgress
from dmconfig.errors import BuildError, Code, DMConfigError, SourceError, SpecError
from dmconfig.fetch import fetch, fetch_index, is_whole, needed_files
from dmconfig.inventory import parse_machine
from dmconfig.load import fetched, plan_for
from dmconfig.progress import Item, NoProgress
from dmconfig.source import locate_source
from dmconfig.stored import component_weights
from tests.gguf_files import gguf
from tests.loopback_hub import Hub

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "pipeline"
WITHOUT_UNET = [
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/merges.txt",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/vocab.json",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
]
UNET = ["unet/config.json", "unet/diffusion_pytorch_model.safetensors"]
DECOYS = {
    "README.md": b"decoy",
    "v1-5-pruned.safetensors": b"decoy",
    "text_encoder/model.fp16.safetensors": b"decoy",
    "text_encoder/pytorch_model.bin": b"decoy",
    "text_encoder/flax_model.msgpack": b"decoy",
    "unet/diffusion_pytorch_model.bin": b"decoy",
    "unet/diffusion_pytorch_model.non_ema.safetensors": b"decoy",
    "unet/model.onnx": b"decoy",
    "vae/diffusion_pytorch_model.safetensors.index.json": b"decoy of a sharded copy whose shards are not there",
    "vae_1_0/config.json": b"{}",
    "vae_1_0/diffusion_pytorch_model.safetensors": b"decoy",
    "safety_checker/config.json": b"{}",
    "safety_checker/model.safetensors": b"decoy",
}
BROKEN_OFF = "run it again: files that are whole are kept, only the others are downloaded"


@pytest.fixture
def spec(tmp_path: Path) -> Callable[[str], Path]:
    """Write a spec of dm/digits with more lines, in a folder of its own."""

    def write(more: str = "") -> Path:
        folder = tmp_path / "specs"
        folder.mkdir(exist_ok=True)
        file = folder / "spec.yaml"
        file.write_text(f"version: 1\npipeline:\n  source: dm/digits\n{more}")
        return file

    return write


def download(file: Path) -> Checked:
    return fetched(check_file(file, ask_hub=True), NoProgress())


def failure(file: Path) -> BuildError:
    with pytest.raises(BuildError) as caught:
        download(file)
    return caught.value


def masked(error: BuildError) -> str:
    """Return the text of error without the words of the client, which differ between its versions."""
    kinds = "HfHubHTTPError|ConnectError|ConnectionError|RemoteProtocolError|ChunkedEncodingError"
    return re.sub(rf"\b({kinds}): .*", "<the client's words>", str(error))


# The choice of files


def sdxl() -> list[str]:
    weights = ["flax_model.msgpack", "model.fp16.safetensors", "model.onnx", "model.safetensors"]
    openvino = ["openvino_model.bin", "openvino_model.xml"]
    tokenizer = ["merges.txt", "special_tokens_map.json", "tokenizer_config.json", "vocab.json"]
    unet = ["diffusion_flax_model.msgpack", "diffusion_pytorch_model.fp16.safetensors"]
    unet += ["diffusion_pytorch_model.safetensors", "model.onnx", "model.onnx_data", *openvino]
    vae = ["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.safetensors"]
    return [
        ".gitattributes",
        "LICENSE.md",
        "README.md",
        "model_index.json",
        "pipeline.png",
        "scheduler/scheduler_config.json",
        "sd_xl_base_1.0.safetensors",
        "sd_xl_base_1.0_0.9vae.safetensors",
        *(f"text_encoder/{name}" for name in ["config.json", *weights, *openvino]),
        *(f"text_encoder_2/{name}" for name in ["config.json", *weights, "model.onnx_data", *openvino]),
        *(f"tokenizer/{name}" for name in tokenizer),
        *(f"tokenizer_2/{name}" for name in tokenizer),
        *(f"unet/{name}" for name in ["config.json", *unet]),
        *(f"vae/{name}" for name in ["config.json", "diffusion_flax_model.msgpack", *vae]),
        *(f"vae_1_0/{name}" for name in ["config.json", *vae]),
        *(f"vae_decoder/{name}" for name in ["config.json", "model.onnx", *openvino]),
    ]


def flux() -> list[str]:
    shards = [f"transformer/diffusion_pytorch_model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    return [
        "ae.safetensors",
        "flux1-dev.safetensors",
        "model_index.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "text_encoder_2/config.json",
        "text_encoder_2/model-00001-of-00002.safetensors",
        "text_encoder_2/model-00002-of-00002.safetensors",
        "text_encoder_2/model.safetensors.index.json",
        "tokenizer_2/special_tokens_map.json",
        "tokenizer_2/spiece.model",
        "tokenizer_2/tokenizer.json",
        "tokenizer_2/tokenizer_config.json",
        "transformer/config.json",
        *shards,
        "transformer/diffusion_pytorch_model.safetensors.index.json",
    ]


def sd15() -> list[str]:
    names = [
        f"{stem}{variant}.{suffix}"
        for stem in ("diffusion_pytorch_model",)
        for variant in ("", ".fp16", ".non_ema")
        for suffix in ("bin", "safetensors")
    ]
    checker = ["config.json", "model.fp16.safetensors", "model.safetensors", "pytorch_model.bin"]
    return [
        "feature_extractor/preprocessor_config.json",
        "model_index.json",
        *(f"safety_checker/{name}" for name in [*checker, "pytorch_model.fp16.bin"]),
        *(f"unet/{name}" for name in ["config.json", *names]),
        "v1-inference.yaml",
        "v1-5-pruned.ckpt",
        "v1-5-pruned-emaonly.safetensors",
    ]


@pytest.mark.parametrize(
    ("files", "folder", "library", "variant", "expected"),
    [
        (sdxl(), "unet", "diffusers", None, ["config.json", "diffusion_pytorch_model.safetensors"]),
        (sdxl(), "unet", "diffusers", "fp16", ["config.json", "diffusion_pytorch_model.fp16.safetensors"]),
        (sdxl(), "vae", "diffusers", "bf16", ["config.json", "diffusion_pytorch_model.safetensors"]),
        (sdxl(), "text_encoder_2", "transformers", "fp16", ["config.json", "model.fp16.safetensors"]),
        (sd15(), "unet", "diffusers", "non_ema", ["config.json", "diffusion_pytorch_model.non_ema.safetensors"]),
        (sd15(), "safety_checker", "stable_diffusion", None, ["config.json", "model.safetensors"]),
        (
            flux(),
            "text_encoder_2",
            "transformers",
            "fp16",
            [
                "config.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            ],
        ),
    ],
)
def test_needed_files_of_a_module_are_its_config_and_one_set_of_weights(
    files: list[str], folder: str, library: str, variant: str | None, expected: list[str]
) -> None:
    """One precision is taken, never another format, another folder or a second precision."""
    assert needed_files(files, folder, library=library, variant=variant) == tuple(f"{folder}/{n}" for n in expected)


def test_needed_files_of_a_sharded_module_are_its_index_and_all_shards() -> None:
    """FLUX's transformer comes whole, and not the single file beside it."""
    shards = tuple(f"transformer/diffusion_pytorch_model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
    index = "transformer/diffusion_pytorch_model.safetensors.index.json"
    assert needed_files(flux(), "transformer") == ("transformer/config.json", *shards, index)


@pytest.mark.parametrize("form", ["model.fp16-0000{}-of-00002", "model-0000{}-of-00002.fp16"])
def test_needed_files_of_a_sharded_variant_are_its_shards_alone(form: str) -> None:
    """Both forms in which shards of a variant are named are known, and plain shards beside them are left."""
    variant = [f"{form.format(number)}.safetensors" for number in (1, 2)]
    index = "model.safetensors.index.fp16.json"
    plain = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    chosen = needed_files([*variant, index, *plain], library="transformers", variant="fp16")
    assert chosen == tuple(sorted([*variant, index]))


@pytest.mark.parametrize(
    ("files", "folder", "expected"),
    [
        (sdxl(), "tokenizer", ["merges.txt", "special_tokens_map.json", "tokenizer_config.json", "vocab.json"]),
        (sdxl(), "scheduler", ["scheduler_config.json"]),
        (sd15(), "feature_extractor", ["preprocessor_config.json"]),
        (
            flux(),
            "tokenizer_2",
            ["special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer_config.json"],
        ),
    ],
)
def test_needed_files_without_weights_are_text_files(files: list[str], folder: str, expected: list[str]) -> None:
    """Tokenizers and schedulers are all of their configs and vocabularies."""
    assert needed_files(files, folder, weights=False) == tuple(f"{folder}/{name}" for name in expected)


def test_needed_files_of_a_required_variant_that_is_missing_have_no_weights() -> None:
    """A variant asked for one component is never replaced by plain weights."""
    assert needed_files(sdxl(), "vae", variant="bf16", variant_required=True) == ("vae/config.json",)


def test_needed_files_of_a_repository_of_one_model_are_in_its_root() -> None:
    """Without a folder, files in folders are another model's."""
    files = ["README.md", "config.json", "diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"]
    chosen = needed_files([*files, "old/config.json", "old/diffusion_pytorch_model.safetensors"])
    assert chosen == ("config.json", "diffusion_pytorch_model.safetensors")


def test_needed_files_without_safetensors_have_no_weights() -> None:
    """Pickles are never chosen, not even for want of anything else."""
    assert needed_files(["unet/config.json", "unet/diffusion_pytorch_model.bin"], "unet") == ("unet/config.json",)


# Downloading


def test_fetched_downloads_what_the_spec_needs_once(hub: Hub, spec: Callable[..., Path]) -> None:
    """Nothing else is downloaded, the source is found afterwards, and a second time the hub is not even asked."""
    repo = hub.add("dm/digits", DIGITS, {name: data for name, data in DECOYS.items() if ".index." not in name})
    checked = download(spec())
    assert hub.downloaded("dm/digits") == sorted([*WITHOUT_UNET, *UNET])
    folder = locate_source("dm/digits", folder=spec().parent).folder
    assert folder is not None
    assert folder.name == repo.commit
    assert [each.folder for each in checked.assembly.components] == [
        folder / c.name for c in checked.assembly.components
    ]
    asked = len(hub.requests)
    assert is_whole(download(spec()).assembly)
    assert len(hub.requests) == asked


def test_fetched_keeps_to_a_single_file_beside_an_index_without_shards(hub: Hub, spec: Callable[..., Path]) -> None:
    """An index is of use only with its shards, and is not downloaded without them."""
    hub.add("dm/digits", DIGITS, DECOYS)
    download(spec())
    assert hub.downloaded("dm/digits") == sorted([*WITHOUT_UNET, *UNET])


def test_fetched_takes_the_variant_where_there_is_one(hub: Hub, spec: Callable[..., Path]) -> None:
    """Components without the pipeline's variant come with their plain weights."""
    half = (DIGITS / UNET[1]).read_bytes()
    hub.add("dm/digits", DIGITS, {"unet/diffusion_pytorch_model.fp16.safetensors": half})
    checked = download(spec("  variant: fp16\n"))
    unet = ["unet/config.json", "unet/diffusion_pytorch_model.fp16.safetensors"]
    assert hub.downloaded("dm/digits") == sorted([*WITHOUT_UNET, *unet])
    variants = {c.name: files.variant for c in checked.assembly.modules if (files := component_weights(c))}
    assert variants == {"vae": None, "text_encoder": None, "unet": "fp16"}


def test_fetched_completes_plain_weights_with_a_variant_at_the_commit_that_is_here(
    hub: Hub, spec: Callable[..., Path]
) -> None:
    """Plain weights in the cache do not stand in for a variant that the hub has at that commit."""
    half = {"unet/diffusion_pytorch_model.fp16.safetensors": b"other weights"}
    commit = hub.add("dm/digits", DIGITS, half).commit
    download(spec())
    hub.requests.clear()
    checked = download(spec("  variant: fp16\n"))
    assert hub.downloaded("dm/digits") == [*half]
    assert checked.assembly.source.folder is not None
    assert checked.assembly.source.folder.name == commit


def test_fetched_is_content_with_plain_weights_when_the_hub_is_gone(
    hub: Hub, spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that can be loaded is loaded, although the hub might have had a variant."""
    half = {"unet/diffusion_pytorch_model.fp16.safetensors": (DIGITS / UNET[1]).read_bytes()}
    hub.add("dm/digits", DIGITS, half)
    download(spec("  variant: fp16\n"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert all(component.folder for component in download(spec("  variant: fp16\n")).assembly.components)
    assert hub.requests == []


def test_fetched_leaves_out_components_that_are_null(hub: Hub, spec: Callable[..., Path]) -> None:
    """What the spec leaves out is not downloaded, and comes later when another spec has it."""
    index = json.loads((DIGITS / "model_index.json").read_text())
    index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]
    extractor = {"feature_extractor/preprocessor_config.json": b"{}"}
    hub.add("dm/digits", DIGITS, {"model_index.json": json.dumps(index).encode(), **extractor})
    download(spec("components:\n  feature_extractor: null\n"))
    assert hub.downloaded("dm/digits") == sorted([*WITHOUT_UNET, *UNET])
    hub.requests.clear()
    download(spec())
    assert hub.downloaded("dm/digits") == [*extractor]


def test_fetched_takes_a_component_from_a_repository_of_one_model(hub: Hub, spec: Callable[..., Path]) -> None:
    """Its class is read from its own config, and the pipeline's own component stays on the hub."""
    hub.add("dm/digits", DIGITS, DECOYS)
    files = {name.removeprefix("unet/"): (DIGITS / name).read_bytes() for name in UNET}
    hub.add("dm/unet", None, {**files, "README.md": b"", "diffusion_pytorch_model.bin": b"decoy"})
    checked = download(spec("components:\n  unet:\n    source: dm/unet\n"))
    assert hub.downloaded("dm/digits") == WITHOUT_UNET
    assert hub.downloaded("dm/unet") == ["config.json", "diffusion_pytorch_model.safetensors"]
    asked = len(hub.requests)
    assert download(spec("components:\n  unet:\n    source: dm/unet\n")) == checked
    assert len(hub.requests) == asked


@pytest.mark.parametrize("subfolder", [None, "old/unet"])
def test_fetched_takes_a_component_from_another_pipeline(
    hub: Hub, spec: Callable[..., Path], subfolder: str | None
) -> None:
    """From a pipeline's repository the folder of the component's name comes, or the one that is asked for."""
    hub.add("dm/digits", DIGITS)
    old = {f"old/{name}": (DIGITS / name).read_bytes() for name in UNET}
    hub.add("dm/other", DIGITS, old)
    line = f"    subfolder: {subfolder}\n" if subfolder else ""
    checked = download(spec(f"components:\n  unet:\n    source: dm/other\n{line}"))
    assert hub.downloaded("dm/digits") == WITHOUT_UNET
    assert hub.downloaded("dm/other") == sorted(["model_index.json", *(old if subfolder else UNET)])
    (unet,) = [component for component in checked.assembly.components if component.name == "unet"]
    assert unet.folder is not None
    assert (unet.folder / "config.json").is_file()


def test_fetched_follows_the_revision(hub: Hub, spec: Callable[..., Path]) -> None:
    """A branch is found again under its name, and says nothing of main."""
    repo = hub.add("dm/digits", DIGITS)
    repo.branches = ("v1",)
    checked = download(spec("  revision: v1\nallow_moving_revision: true\n"))
    assert checked.assembly.source.folder is not None
    assert checked.assembly.source.folder.name == repo.commit
    assert locate_source("dm/digits", folder=spec().parent).folder is None


def test_fetched_follows_a_commit(hub: Hub, spec: Callable[..., Path]) -> None:
    """A commit is found by itself."""
    repo = hub.add("dm/digits", DIGITS)
    repo.branches = ()
    assert is_whole(download(spec(f"  revision: '{repo.commit}'\n")).assembly)


def test_fetched_completes_a_snapshot_that_lacks_a_folder_and_weights(hub: Hub, spec: Callable[..., Path]) -> None:
    """A part of a pipeline in the cache is no error: what is lacking comes, and only that."""
    hub.add("dm/digits", DIGITS)
    folder = download(spec()).assembly.source.folder
    assert folder is not None
    shutil.rmtree(folder / "tokenizer")
    for name in (UNET[1], "vae/config.json"):
        blob = (folder / name).resolve()
        (folder / name).unlink()
        blob.unlink()
    hub.requests.clear()
    download(spec())
    assert hub.downloaded("dm/digits") == [UNET[1], "vae/config.json"]  # the tokenizer's blobs were still there
    assert (folder / "tokenizer" / "merges.txt").is_file()


def test_fetched_reaches_the_files_of_a_name_with_brackets(hub: Hub, spec: Callable[..., Path]) -> None:
    """What is special in patterns is not special in the name of a folder."""
    hub.add("dm/digits", DIGITS)
    hub.add("dm/odd", None, {f"a[1]*/{name}": (DIGITS / "unet" / name).read_bytes() for name in ("config.json",)})
    hub.repos["dm/odd"].files["a[1]*/diffusion_pytorch_model.safetensors"] = (DIGITS / UNET[1]).read_bytes()
    hub.repos["dm/odd"].files["a1/config.json"] = b"decoy"
    download(spec('components:\n  unet:\n    source: dm/odd\n    subfolder: "a[1]*"\n'))
    assert hub.downloaded("dm/odd") == ["a[1]*/config.json", "a[1]*/diffusion_pytorch_model.safetensors"]


def test_fetch_index_downloads_the_index_alone_and_once(hub: Hub) -> None:
    """What a pipeline is made of costs one small file."""
    hub.add("dm/digits", DIGITS)
    fetch_index("dm/digits", None)
    fetch_index("dm/digits", None)
    assert hub.downloaded("dm/digits") == ["model_index.json"]


def test_fetch_tells_which_repository_is_downloaded(hub: Hub, spec: Callable[..., Path]) -> None:
    """Progress names the repository, how many files are to come and how large they are."""

    class Noted(NoProgress):
        def __init__(self) -> None:
            self.items: list[tuple[str, str]] = []

        def track(self, phase: str, items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Item]:
            for item in items:
                self.items.append((phase, label(item)))
                yield item

    hub.add("dm/digits", DIGITS)
    progress = Noted()
    fetch(check_file(spec(), ask_hub=True).assembly, progress)
    assert progress.items == [("download", "dm/digits (11 files, 3.6 MiB)")]


def test_fetched_shows_no_bars_of_the_client_in_a_log(
    hub: Hub, spec: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the error stream is no terminal nothing is drawn, and the setting is as before afterwards."""
    hub.add("dm/digits", DIGITS)
    assert not sys.stderr.isatty()
    before = are_progress_bars_disabled()
    download(spec())
    assert capfd.readouterr().err == ""
    assert are_progress_bars_disabled() == before


def test_fetch_draws_one_bar_for_the_bytes_of_everything(
    hub: Hub, spec: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """On a terminal two repositories and their files are one bar, which ends full, and the client draws none."""
    hub.add("dm/digits", DIGITS)
    hub.add("dm/vae", DIGITS / "vae")
    drawn = io.StringIO()
    progress = ConsoleProgress()
    progress.console = Console(file=drawn, force_terminal=True, width=100)
    fetch(check_file(spec("components: {vae: {source: dm/vae}}"), ask_hub=True).assembly, progress)
    frames = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", frame) for frame in re.split(r"\r|\n", drawn.getvalue())]
    bars = [frame for frame in frames if "download" in frame]
    assert {word for frame in bars for word in frame.split() if word.startswith("dm/")} == {"dm/digits", "dm/vae"}
    sizes = {match for frame in bars for match in re.findall(r"/([\d.]+ \w+)", frame)}
    assert len(sizes) == 1, "one total, that of both"
    arrived, total = re.findall(r"([\d.]+)/([\d.]+) MB", bars[-1])[0]
    assert arrived == total
    assert "\n\n" not in drawn.getvalue().strip("\n"), "one line at a time"
    assert capfd.readouterr().err == ""


# Interruptions


def test_fetched_goes_on_after_an_interruption(hub: Hub, spec: Callable[..., Path]) -> None:
    """Files that were whole when a download broke off are not downloaded again."""
    repo = hub.add("dm/digits", DIGITS)
    repo.broken_files = frozenset({UNET[1]})
    failure(spec())
    before = hub.downloaded("dm/digits")
    assert "tokenizer/vocab.json" in before
    repo.broken_files = frozenset()
    hub.requests.clear()
    assert is_whole(download(spec()).assembly)
    missing = {*WITHOUT_UNET, *UNET} - set(before)
    assert set(hub.downloaded("dm/digits")) == {*missing, UNET[1]}


def test_fetched_never_keeps_a_part_of_a_file(hub: Hub, spec: Callable[..., Path]) -> None:
    """Bodies that break off are asked for again, by the client or the next time; what is put together is whole."""
    hub.add("dm/digits", DIGITS).failure = "truncated-once"
    for _ in [*WITHOUT_UNET, *UNET]:
        with contextlib.suppress(BuildError):
            download(spec())
    folder = locate_source("dm/digits", folder=spec().parent).folder
    assert folder is not None
    for name in [*WITHOUT_UNET, *UNET]:
        assert (folder / name).read_bytes() == (DIGITS / name).read_bytes()


def test_fetched_brings_the_small_files_before_weights(hub: Hub, spec: Callable[..., Path]) -> None:
    """Weights that are here mean that the rest is here: no tokenizer can be left half downloaded behind them."""
    hub.add("dm/digits", DIGITS)
    download(spec())
    order = [request.split()[-1] for request in hub.requests if request.startswith("GET")]
    first = next(position for position, name in enumerate(order) if name.endswith(".safetensors"))
    assert all(name.endswith(".safetensors") for name in order[first:])


# Failures


def test_fetched_from_a_repository_that_does_not_exist(hub: Hub, tmp_path: Path) -> None:
    """A slip in a well-known id is met with the id that was meant, at its place in the file."""
    file = tmp_path / "spec.yaml"
    file.write_text("version: 1\npipeline:\n  source: black-forest-labs/FLUX.1-devv\n")
    error = failure(file)
    assert str(error) == dedent(f"""\
        error[DM407 download-failed]: {file}:3:11
          at   pipeline.source
          what the hub has no model repository 'black-forest-labs/FLUX.1-devv'
          why  or it is private, and you are not logged in with access to it
          fix  did you mean 'black-forest-labs/FLUX.1-dev'? For a private one, log in with: hf auth login""")
    assert isinstance(error.__cause__, errors.RepositoryNotFoundError)


def test_fetched_names_every_repository_that_fails(hub: Hub, spec: Callable[..., Path]) -> None:
    """A private repository reads as one that is not there, as on the hub, and each failure is told."""
    hub.add("dm/digits", DIGITS).private = True
    file = spec("components:\n  unet:\n    source: dm/unet\n")
    assert str(failure(file)) == dedent(f"""\
        error[DM407 download-failed]: {file}:3:11
          at   pipeline.source
          what the hub has no model repository 'dm/digits'
          why  or it is private, and you are not logged in with access to it
          fix  check the name. For a private one, log in with: hf auth login
        error[DM407 download-failed]: {file}:6:13
          at   components.unet.source
          what the hub has no model repository 'dm/unet'
          why  or it is private, and you are not logged in with access to it
          fix  check the name. For a private one, log in with: hf auth login""")


def test_fetched_at_a_revision_that_does_not_exist(hub: Hub, spec: Callable[..., Path]) -> None:
    """The revision is named, and what one may be."""
    hub.add("dm/digits", DIGITS)
    file = spec("  revision: v9\nallow_moving_revision: true\n")
    assert str(failure(file)) == dedent(f"""\
        error[DM407 download-failed]: {file}:3:11
          at   pipeline.source
          what 'dm/digits' has no revision 'v9' on the hub
          fix  name one of its branches, tags or full commits""")


def test_fetched_from_a_gated_repository(hub: Hub, spec: Callable[..., Path]) -> None:
    """The page with the licence is named, and how to log in."""
    hub.add("dm/digits", DIGITS).failure = "gated"
    file = spec()
    error = failure(file)
    assert str(error) == dedent(f"""\
        error[DM407 download-failed]: {file}:3:11
          at   pipeline.source
          what 'dm/digits' may be downloaded only after its licence was accepted
          why  you are not logged in, or your account has not accepted it
          fix  accept it at {hub.url}/dm/digits and log in with: hf auth login""")
    assert isinstance(error.__cause__, errors.GatedRepoError)


def test_fetched_while_the_hub_fails(hub: Hub, spec: Callable[..., Path]) -> None:
    """The answer of the hub is passed on."""
    hub.add("dm/digits", DIGITS).failure = "error"
    file = spec()
    assert masked(failure(file)) == dedent(f"""\
        error[DM407 download-failed]: {file}:3:11
          at   pipeline.source
          what the hub answered with an error when asked for 'dm/digits'
          why  <the client's words>
          fix  try again later""")


def test_fetched_without_a_connection(hub: Hub, spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lacking is told: everything at first, only the rest when a part is in the cache."""
    repo = hub.add("dm/digits", DIGITS)
    repo.broken_files = frozenset({UNET[1]})
    failure(spec())
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    file = spec()
    assert masked(failure(file)) == dedent(f"""\
        error[DM407 download-failed]: {file}:3:11
          at   pipeline.source
          what the hub cannot be reached, and 'dm/digits' is not whole in the local hub cache
          why  lacking are: the weights of unet (<the client's words>
          fix  check the connection and try again; what is in the cache is kept""")


@pytest.mark.parametrize(
    ("more", "name"), [("", "'dm/digits'"), (f"  revision: {'c' * 40}\n", f"'dm/digits' (revision {'c' * 40})")]
)
def test_fetched_offline_of_an_unknown_pipeline(
    hub: Hub, spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, more: str, name: str
) -> None:
    """Offline nothing is asked, and the repository and revision that are missing are named."""
    hub.add("dm/digits", DIGITS)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    file = spec(more)
    assert str(failure(file)) == dedent(f"""\
        error[DM407 download-failed]: {file}:3:11
          at   pipeline.source
          what {name} is not whole in the local hub cache, and HF_HUB_OFFLINE forbids downloads
          why  lacking are: model_index.json
          fix  unset HF_HUB_OFFLINE, or copy the cache of a machine on which this spec was loaded""")
    assert hub.requests == []


def test_fetched_offline_of_a_well_known_pipeline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lacking of a pipeline in the catalogue is told by component, and again nothing is asked."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    file = tmp_path / "spec.yaml"
    file.write_text("version: 1\npipeline:\n  source: stabilityai/stable-diffusion-xl-base-1.0\n")
    (problem,) = failure(file).problems
    assert problem.code is Code.DOWNLOAD_FAILED
    assert problem.why == (
        "lacking are: model_index.json, vae, text_encoder, text_encoder_2, tokenizer, tokenizer_2, unet, scheduler"
    )
    assert hub.requests == []


def test_fetched_when_every_body_breaks_off(hub: Hub, spec: Callable[..., Path]) -> None:
    """After the client's own tries the reason is told, and that nothing whole is lost."""
    hub.add("dm/digits", DIGITS).failure = "truncated"
    file = spec()
    assert masked(failure(file)) == dedent(f"""\
        error[DM407 download-failed]: {file}:3:11
          at   pipeline.source
          what the download of 'dm/digits' broke off
          why  <the client's words>
          fix  {BROKEN_OFF}""")


def test_fetched_onto_a_disk_without_room(
    hub: Hub, spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A download that does not fit is refused before it begins, with both sizes."""
    hub.add("dm/digits", DIGITS)
    file = spec()
    assembly = check_file(file, ask_hub=True).assembly
    hub.requests.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1 << 20))
    with pytest.raises(BuildError) as caught:
        fetch(assembly, NoProgress())
    assert str(caught.value) == dedent(f"""\
        error[DM407 download-failed]
          at   pipeline.source
          what there is no room for 'dm/digits' on the disk of the local hub cache, {tmp_path / "home" / "hub"}
          why  3.6 MiB are to be downloaded, 1.0 MiB are free
          fix  free some space (hf cache ls shows what is there), or set HF_HUB_CACHE to a folder on another disk""")
    assert hub.downloaded("dm/digits") == []


def test_fetched_from_a_repository_with_pickles_alone(hub: Hub, spec: Callable[..., Path]) -> None:
    """Weights that dmconfig does not load are told before anything is downloaded."""
    repo = hub.add("dm/digits", DIGITS)
    repo.files["unet/diffusion_pytorch_model.bin"] = repo.files.pop(UNET[1])
    file = spec()
    assert str(failure(file)) == dedent(f"""\
        error[DM404 weights-missing]: {file}:3:11
          at   pipeline.source
          what 'dm/digits' has no safetensors weights of 'unet'
          why  dmconfig does not load pickles (.bin, .ckpt)
          fix  give the component another source""")
    assert hub.downloaded("dm/digits") == ["model_index.json"]


def test_fetched_with_a_variant_that_no_component_has(hub: Hub, spec: Callable[..., Path]) -> None:
    """Plain weights are not downloaded in place of a variant that is nowhere."""
    hub.add("dm/digits", DIGITS)
    file = spec("  variant: fp8\n")
    assert str(failure(file)) == dedent(f"""\
        error[DM404 weights-missing]: {file}:4:12
          at   pipeline.variant
          what no component has weights of variant 'fp8'
          fix  remove the line""")
    assert hub.downloaded("dm/digits") == ["model_index.json"]


def test_fetched_with_a_variant_that_the_named_component_lacks(hub: Hub, spec: Callable[..., Path]) -> None:
    """A variant asked of one component must be there."""
    hub.add("dm/digits", DIGITS)
    file = spec("components:\n  vae:\n    variant: fp16\n")
    assert str(failure(file)) == dedent(f"""\
        error[DM404 weights-missing]: {file}:3:11
          at   pipeline.source
          what 'dm/digits' has no safetensors weights of variant 'fp16' of 'vae'
          fix  remove variant from components.vae""")


def test_fetched_of_a_repository_that_is_no_pipeline(hub: Hub, spec: Callable[..., Path]) -> None:
    """A single model under pipeline.source is told as such."""
    hub.add("dm/digits", None, {"config.json": b"{}", "diffusion_pytorch_model.safetensors": b""})
    file = spec()
    assert str(failure(file)) == dedent(f"""\
        error[DM402 not-a-pipeline]: {file}:3:11
          at   pipeline.source
          what 'dm/digits' is not a pipeline: it has no model_index.json
          fix  name a repository in the diffusers layout; a single model goes under components""")


# Planning what is on the hub


@pytest.mark.parametrize("strategy", ["balanced", "auto"])
def test_plan_asks_the_hub_for_headers_alone(hub: Hub, spec: Callable[[str], Path], strategy: str) -> None:
    """A pipeline that nobody knows here is planned from the headers on the hub, as it is planned from its files."""
    hub.add("dm/digits", DIGITS)
    machine = parse_machine("4MiB,2MiB", "1GiB")
    more = f"device_map: {strategy}\nreserve: 0\n"
    local = spec().parent / "local.yaml"
    local.write_text(f"version: 1\npipeline: {{source: {DIGITS}}}\n{more}")

    plan = plan_for(check_file(spec(more), ask_hub=True), machine, ask_hub=True)

    assert {assignment.measured_from for assignment in plan.assignments} == {"hub"}
    known = plan_for(check_file(local), machine)
    assert plan.device_map == known.device_map
    assert [each.nbytes for each in plan.assignments] == [each.nbytes for each in known.assignments]
    weights = sum(size for name, size in hub.sent.items() if name.endswith(".safetensors"))
    assert 0 < weights < sum(each.nbytes for each in plan.assignments) / 20


def test_plan_of_a_gguf_file_on_the_hub_is_that_of_the_file(hub: Hub, spec: Callable[[str], Path]) -> None:
    """Quantised weights are counted by the header on the hub, and nothing else is read of the file or downloaded.

    Of a known pipeline whose licence was not accepted the figures are those of the catalogue.
    """
    weights = {f"{name}/model.safetensors": b"x" for name in ("text_encoder", "text_encoder_2")}
    weights["vae/diffusion_pytorch_model.safetensors"] = b"x"
    hub.add("black-forest-labs/FLUX.1-dev", None, weights).failure = "gated"
    data = gguf({"img_in.weight": ("Q4_K", (512, 4096)), "img_in.bias": ("F32", (512,))})
    hub.add("dm/gguf", None, {"flux-Q4_K_S.gguf": data})
    local, remote = (spec().parent / name for name in ("local.yaml", "remote.yaml"))
    (local.parent / "flux.gguf").write_bytes(data)
    head = "version: 1\npipeline: {source: black-forest-labs/FLUX.1-dev, dtype: bfloat16}\n"
    local.write_text(f"{head}components: {{transformer: {{source: ./flux.gguf}}}}\n")
    remote.write_text(f"{head}components: {{transformer: {{source: dm/gguf/flux-Q4_K_S.gguf}}}}\n")
    machine = parse_machine("24GiB", "64GiB")
    with pytest.raises(SourceError) as caught:
        plan_for(check_file(remote), machine)
    assert "plan with --hub" in caught.value.problems[0].fix

    plan = plan_for(check_file(remote, ask_hub=True), machine, ask_hub=True)

    known = plan_for(check_file(local), machine)
    assert [each.nbytes for each in plan.assignments] == [each.nbytes for each in known.assignments]
    of_file = next(each for each in plan.assignments if each.component == "transformer")
    assert (of_file.nbytes, of_file.measured_from) == (512 * 4096 * 9 // 16 + 512 * 2, "hub")
    assert hub.sent == {"dm/gguf flux-Q4_K_S.gguf": 2**16}
    assert {each.measured_from for each in plan.assignments} == {"hub", "catalogue"}
    assert not (spec().parent.parent / "home").exists()


@pytest.mark.parametrize("ask_hub", [False, True])
def test_plan_of_a_gguf_file_that_the_hub_does_not_give(hub: Hub, spec: Callable[[str], Path], ask_hub: bool) -> None:
    """A refusal of the hub is no error of checking, which can do without; measuring tells it."""
    hub.add("dm/gguf", None, {"flux.gguf": gguf({"w": ("F32", (8,))})}).failure = "gated"
    hub.add("black-forest-labs/FLUX.1-dev")
    text = "version: 1\npipeline: {source: black-forest-labs/FLUX.1-dev, dtype: bfloat16}\n"
    file = spec().parent / "flux.yaml"
    file.write_text(f"{text}components: {{transformer: {{source: dm/gguf/flux.gguf}}}}\n")
    with pytest.raises(SourceError) as caught:
        plan_for(check_file(file, ask_hub=True), parse_machine("24GiB", "64GiB"), ask_hub=ask_hub)
    (problem,) = caught.value.problems
    assert problem.code is (Code.DOWNLOAD_FAILED if ask_hub else Code.SIZES_UNKNOWN)


def test_a_damaged_gguf_file_is_told_before_it_is_downloaded(hub: Hub, spec: Callable[[str], Path]) -> None:
    """The header is looked at first, and gigabytes behind a broken one do not travel."""
    hub.add("dm/gguf", None, {"flux.gguf": b"GGUF" + bytes(1 << 20)})
    text = "version: 1\npipeline: {source: black-forest-labs/FLUX.1-dev, dtype: bfloat16}\n"
    file = spec().parent / "flux.yaml"
    file.write_text(f"{text}components: {{transformer: {{source: dm/gguf/flux.gguf}}}}\n")
    with pytest.raises(DMConfigError) as caught:
        check_file(file, ask_hub=True)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == (Code.WEIGHTS_CORRUPT, ("components", "transformer", "source"))
    assert problem.location is not None
    assert hub.sent == {"dm/gguf flux.gguf": 2**16}


def test_plan_without_the_hub_says_how_to_ask_it(hub: Hub, spec: Callable[[str], Path]) -> None:
    """Where only the index is known, the sizes are not, and the error names the way to know them."""
    hub.add("dm/digits", DIGITS)
    checked = check_file(spec(), ask_hub=True)

    with pytest.raises(SourceError) as caught:
        plan_for(checked, parse_machine("1GiB", "1GiB"))

    assert {problem.code for problem in caught.value.problems} == {Code.SIZES_UNKNOWN}
    assert all("--hub" in problem.fix for problem in caught.value.problems)


# Adapters


def _lora() -> bytes:
    import numpy as np
    from safetensors.numpy import save

    tensors = {f"unet.mid_block.to_q.lora_{half}.weight": np.zeros((2, 2), np.float32) for half in "AB"}
    return bytes(save(tensors))


def test_adapter_is_the_one_file_that_is_downloaded_of_its_repository(
    hub: Hub, spec: Callable[[str], Path], tmp_path: Path
) -> None:
    """A LoRA on the hub: its file at its revision and nothing beside it; once here, nothing is asked."""
    lora = {"loras/style.safetensors": _lora(), "loras/other.safetensors": _lora(), "pytorch_lora.bin": b"decoy"}
    hub.add("dm/loras", more=lora)
    file = tmp_path / "spec.yaml"
    source = "{source: dm/loras, subfolder: loras, weight_name: style.safetensors}"
    file.write_text(f"version: 1\npipeline: {{source: {DIGITS}}}\nadapters: {{lora: [{source}]}}\n")

    checked = download(file)

    (adapter,) = checked.assembly.adapters
    assert adapter.file is not None
    assert adapter.file.read_bytes() == lora["loras/style.safetensors"]
    assert hub.downloaded("dm/loras") == ["loras/style.safetensors"]
    hub.requests.clear()
    assert download(file).assembly.adapters == checked.assembly.adapters
    assert not hub.requests


def test_adapter_that_its_repository_lacks_is_told_with_what_is_there(hub: Hub, tmp_path: Path) -> None:
    """The place in the file, and the names there are."""
    hub.add("dm/loras", more={"style.safetensors": _lora()})
    file = tmp_path / "spec.yaml"
    source = "{source: dm/loras, weight_name: stile.safetensors}"
    file.write_text(f"version: 1\npipeline: {{source: {DIGITS}}}\nadapters: {{lora: [{source}]}}\n")

    (problem,) = failure(file).problems

    assert problem.path == ("adapters", "lora", 0, "source")
    assert problem.what == "dm/loras has no file stile.safetensors"
    assert problem.fix == "its .safetensors files are: style.safetensors"


# What came is what the hub describes


@pytest.mark.parametrize("name", ["unet/diffusion_pytorch_model.safetensors", "tokenizer/vocab.json"])
def test_fetched_with_another_content_is_refused_and_removed(hub: Hub, spec: Callable[..., Path], name: str) -> None:
    """A file of the right size and the wrong bytes, large or small, is told by its hash, and does not stay."""
    repo = hub.add("dm/digits", DIGITS)
    repo.tampered_files = frozenset({name})
    (problem,) = failure(spec()).problems
    kind = "SHA-256" if name.endswith("safetensors") else "git hash"
    assert problem.code is Code.DOWNLOAD_DIFFERS
    assert problem.what.startswith(f"{name} of 'dm/digits' is not what the hub describes: its {kind} is ")
    snapshot = locate_source("dm/digits", folder=Path()).folder
    assert snapshot is not None
    assert not (snapshot / name).exists()
    repo.tampered_files = frozenset()
    checked = download(spec())
    assert is_whole(checked.assembly)
    assert (snapshot / name).read_bytes() == (DIGITS / name).read_bytes()


# Single files, and configs from elsewhere


@pytest.fixture
def with_file(hub: Hub, tmp_path: Path) -> str:
    """Serve the digits, and the weights of their UNet as one file of another repository; the lines that name it."""
    hub.add("dm/digits", DIGITS)
    weights = (DIGITS / "unet" / "diffusion_pytorch_model.safetensors").read_bytes()
    hub.add("dm/files", more={"a/unet-v2.safetensors": weights, "b/other.safetensors": b"decoy", "README.md": b"x"})
    return "components:\n  unet: {source: dm/files/a/unet-v2.safetensors}\n"


def test_fetched_single_file_alone(hub: Hub, spec: Callable[..., Path], with_file: str) -> None:
    """Of a repository of files only the one is downloaded; of the pipeline all but the weights in its place."""
    checked = download(spec(with_file))
    assert is_whole(checked.assembly)
    file = "a/unet-v2.safetensors"
    header = 8 + int.from_bytes(hub.repos["dm/files"].files[file][:8], "little")  # is looked at before
    assert hub.sent == {**hub.sent, f"dm/files {file}": len(hub.repos["dm/files"].files[file]) + header}
    assert {*hub.downloaded("dm/files")} == {file}
    assert hub.downloaded("dm/digits") == sorted([*WITHOUT_UNET, "unet/config.json"])
    (unet,) = [component for component in checked.assembly.modules if component.name == "unet"]
    assert unet.source.path is not None
    assert unet.folder is not None
    plan = plan_for(checked, parse_machine("24GiB", "32GiB"))
    assert sum(each.nbytes for each in plan.assignments) > 0


def test_fetched_single_file_that_is_not_there(hub: Hub, spec: Callable[..., Path], with_file: str) -> None:
    """The nearest name in the repository is suggested."""
    (problem,) = failure(spec(with_file.replace("unet-v2", "unet-v3"))).problems
    assert (problem.code, problem.path) == (Code.SOURCE_NOT_FOUND, ("components", "unet", "source"))
    assert (problem.what, problem.fix) == (
        "'dm/files' has no file a/unet-v3.safetensors", "did you mean dm/files/a/unet-v2.safetensors?",
    )  # fmt: skip


def test_fetched_single_file_offline_names_what_lacks(
    hub: Hub, spec: Callable[..., Path], with_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline nothing is asked, and the file that is missing is named by itself."""
    download(spec())
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (problem,) = failure(spec(with_file)).problems
    assert problem.path == ("components", "unet", "source")
    assert problem.why == "lacking are: a/unet-v2.safetensors"
    assert hub.requests == []


def test_fetched_where_local_files_only_forbids_it(hub: Hub, spec: Callable[..., Path]) -> None:
    """The key forbids asking for that source alone, whatever the environment allows; what is here is enough."""
    hub.add("dm/digits", DIGITS)
    (problem,) = failure(spec("  local_files_only: true\n")).problems
    assert problem.what == "'dm/digits' is not whole in the local hub cache, and local_files_only forbids downloads"
    assert problem.fix.startswith("remove local_files_only, or copy the cache")
    assert hub.requests == []
    download(spec())
    hub.requests.clear()
    assert is_whole(download(spec("  local_files_only: true\n")).assembly)
    assert hub.requests == []


def test_moving_revision_is_refused_before_the_hub_is_asked(hub: Hub, spec: Callable[..., Path]) -> None:
    """Nothing is fetched of a branch that the spec does not allow."""
    hub.add("dm/digits", DIGITS)
    with pytest.raises(SpecError) as caught:
        check_file(spec("  revision: main\n"), ask_hub=True)
    assert [problem.code for problem in caught.value.problems] == [Code.MOVING_REVISION]
    assert hub.requests == []


def test_tokens_of_the_environment_go_to_the_hub_and_nowhere_else(
    hub: Hub, spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is shown the token; a refusal does not repeat it."""
    token = "hf_" + "aBcDeFgH" * 4
    monkeypatch.setenv("HF_TOKEN", token)
    hub.add("dm/digits", DIGITS).failure = "gated"
    error = failure(spec())
    assert hub.tokens == {f"Bearer {token}"}
    assert token not in str(error)
    assert token not in str(error.__cause__ and DMConfigError(error.problems))
    assert "may be downloaded only after its licence was accepted" in str(error)
