"""Headers of weights on the hub, with the real client against a hub on this machine: exact, and little travels."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from huggingface_hub import constants

from dmconfig.checkpoint import read_single_file
from dmconfig.errors import BuildError, Code, DMConfigError, Problem, SourceError
from dmconfig.fetch import remote_tensors
from dmconfig.fetch.headers import remote_file
from dmconfig.gguf import MAX_HEADER_BYTES
from dmconfig.source import locate_source
from dmconfig.weights import DTYPE_BITS, TensorInfo, find_weights, read_tensors
from tests.gguf_files import ARRAY, STRING, U32, U64, gguf, head, pair, text
from tests.loopback_hub import Hub, ask, serve

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "pipeline"
UNET = "unet/diffusion_pytorch_model.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
ASK = "ask its authors, or name another revision"

Tensors = Mapping[str, tuple[str, Sequence[int]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub of this test alone, an empty cache, a token, no waiting between the client's tries."""
    with serve() as hub:
        ask(hub, monkeypatch, tmp_path / "home")
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
        yield hub


def safetensors(tensors: Tensors, *, body: bytes | None = None) -> bytes:
    """Return a whole file of zeros, or one with another body."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + DTYPE_BITS[dtype] // 8 * _elements(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + (bytes(end) if body is None else body)


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def header_bytes(data: bytes) -> int:
    (length,) = struct.unpack_from("<Q", data)
    return 8 + int(length)


def sharded(weight_map: Mapping[str, str], shards: Mapping[str, Tensors]) -> dict[str, bytes]:
    """Return the files of a transformer in shards, with its index."""
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return {INDEX: index, **{f"transformer/{name}": safetensors(tensors) for name, tensors in shards.items()}}


def shard(number: int) -> str:
    return f"diffusion_pytorch_model-{number:05}-of-00002.safetensors"


WHOLE_MAP = {"a": shard(1), "b": shard(2)}
WHOLE_SHARDS: Mapping[str, Tensors] = {shard(1): {"a": ("F16", (2, 3))}, shard(2): {"b": ("F32", (5,))}}


def transformer(revision: str | None = None) -> tuple[TensorInfo, ...] | None:
    return remote_tensors("dm/model", revision, "transformer", "diffusers", None)


def unet(revision: str | None = None) -> tuple[TensorInfo, ...] | None:
    return remote_tensors("dm/digits", revision, "unet", "diffusers", None)


def problem_of(ask: Callable[[], object], kind: type[DMConfigError]) -> Problem:
    with pytest.raises(kind) as raised:
        ask()
    (problem,) = raised.value.problems
    return problem


# What is read, and how little travels


@pytest.mark.parametrize(
    ("name", "library"), [("unet", "diffusers"), ("vae", "diffusers"), ("text_encoder", "transformers")]
)
def test_remote_tensors_equals_reading_the_file(hub: Hub, name: str, library: str) -> None:
    """The tensors are those of the file on this machine, in the same order; its header has travelled, no weight."""
    hub.add("dm/digits", DIGITS)
    files = find_weights(DIGITS / name, library=library, variant=None)
    assert files is not None
    assert remote_tensors("dm/digits", None, name, library, None) == read_tensors(files)
    (file,) = files.files
    with file.open("rb") as stream:
        expected = header_bytes(stream.read(8))
    assert hub.sent == {f"dm/digits {name}/{file.name}": expected}
    assert expected < file.stat().st_size / 3


def test_remote_tensors_of_shards_are_those_of_the_index(hub: Hub, tmp_path: Path) -> None:
    """Of an index all travels, of its files their headers; a stray shard and a single file are left alone."""
    files = sharded(WHOLE_MAP, WHOLE_SHARDS)
    strays = {f"transformer/{shard(3)}": b"stray", "transformer/diffusion_pytorch_model.safetensors": b"stray"}
    hub.add("dm/model", None, files | strays)
    (tmp_path / "transformer").mkdir()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    local = find_weights(tmp_path / "transformer", library="diffusers", variant=None)
    assert local is not None
    assert transformer() == read_tensors(local)
    of_headers = {f"dm/model {name}": header_bytes(data) for name, data in files.items() if name != INDEX}
    assert hub.sent == {**of_headers, f"dm/model {INDEX}": len(files[INDEX])}


def test_remote_tensors_of_a_large_file_are_its_header_alone(hub: Hub) -> None:
    """The header travels to the byte, however much there is behind it."""
    data = safetensors({"w": ("F32", (4, 1 << 20))})
    hub.add("dm/digits", None, {UNET: data})
    assert unet() == (TensorInfo("w", "F32", (4, 1 << 20), 1 << 24),)
    assert hub.sent == {f"dm/digits {UNET}": header_bytes(data)}


def test_remote_tensors_follow_files_to_where_they_are_kept(hub: Hub) -> None:
    """Large files are kept on another host: ranges are asked there, and the token is not shown to it."""
    with serve() as elsewhere:
        data = safetensors({"w": ("BF16", (1 << 20,))})
        commit = hub.add("dm/digits", None, {UNET: data}).commit
        elsewhere.add("dm/digits", None, {UNET: data})
        hub.repos["dm/digits"].kept_at = elsewhere.url
        assert unet() == (TensorInfo("w", "BF16", (1 << 20,), 1 << 21),)
        assert hub.repos["dm/digits"].commit == commit
        assert hub.sent == {}
        assert elsewhere.sent == {f"dm/digits {UNET}": header_bytes(data)}
        assert hub.tokens == {"Bearer hf_of_the_test"}
        assert elsewhere.tokens == set()


def test_remote_tensors_are_of_one_commit(hub: Hub) -> None:
    """A branch is asked for once; files are asked for by the commit it led to."""
    repo = hub.add("dm/model", None, sharded(WHOLE_MAP, WHOLE_SHARDS))
    repo.branches = ("fp16",)
    assert transformer("fp16") == transformer(repo.commit)
    assert problem_of(transformer, BuildError).what == "'dm/model' has no revision 'main' on the hub"


def test_remote_tensors_of_a_variant_are_of_that_variant(hub: Hub) -> None:
    """A variant never falls back to plain weights, nor the other way round."""
    half = safetensors({"w": ("F16", (4,))})
    hub.add("dm/digits", None, {"unet/diffusion_pytorch_model.fp16.safetensors": half})
    assert remote_tensors("dm/digits", None, "unet", "diffusers", "fp16") == (TensorInfo("w", "F16", (4,), 8),)
    assert unet() is None
    assert remote_tensors("dm/digits", None, "unet", "diffusers", "bf16") is None


def test_remote_tensors_of_a_repository_of_one_model_are_in_its_root(hub: Hub) -> None:
    """Without a folder the weights are in the root; another library's names are not taken for them."""
    hub.add("dm/vae", None, {"diffusion_pytorch_model.safetensors": safetensors({"w": ("F16", (4,))})})
    assert remote_tensors("dm/vae", None, "", "diffusers", None) == (TensorInfo("w", "F16", (4,), 8),)
    assert remote_tensors("dm/vae", None, "", "transformers", None) is None


def test_remote_tensors_without_safetensors_are_none(hub: Hub) -> None:
    """Pickles are no weights, nor is an index without its files; nothing of them is read."""
    hub.add("dm/model", None, {INDEX: b"{}", "transformer/diffusion_pytorch_model.bin": b"pickle"})
    assert transformer() is None
    assert hub.sent == {}


# One file of weights


def of_file(name: str) -> tuple[TensorInfo, ...] | None:
    return remote_file(locate_source(f"dm/file/{name}", folder=Path("/")))


def test_remote_file_equals_reading_the_file(hub: Hub, tmp_path: Path) -> None:
    """Safetensors and GGUF alike: the tensors are those of the file on this machine, and only its header travels."""
    words = [f"word {number}" for number in range(40_000)]
    numbers = list(range(200_000))
    before = [pair("general.architecture", STRING, "flux"), pair("tokenizer.tokens", ARRAY, (STRING, words))]
    pairs = [*before, pair("tokenizer.scores", ARRAY, (U32, numbers)), pair("tokenizer.x", U64, 1)]
    data = gguf({"a.weight": ("Q4_K", (256, 1 << 14)), "a.bias": ("BF16", (256,))}, pairs)
    files = {"flux.gguf": data, "flux.safetensors": safetensors({"w": ("F32", (1 << 18,))})}
    hub.add("dm/file", None, files)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert of_file(name) == read_single_file(tmp_path / name)
    header = len(data) - 256 * (1 << 14) * 9 // 16 - 512
    assert 1_000_000 < header < 2_000_000
    # the words are read and the numbers after them stepped over, but for what was read ahead
    assert hub.sent["dm/file flux.gguf"] < header + 2**20
    assert hub.requests.count("GET dm/file flux.gguf") < 8
    assert hub.sent["dm/file flux.safetensors"] == header_bytes(files["flux.safetensors"])


@pytest.mark.parametrize(
    "claim",
    [
        head(0, 1) + text("k") + struct.pack("<IQ", STRING, 2**62),
        head(0, 1) + text("k") + struct.pack("<IQ", STRING, MAX_HEADER_BYTES + 1),
        head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, U64, 2**60),
        head(0, 1) + text("k") + struct.pack("<IIQQ", ARRAY, STRING, 2**62, 2**62),
        head(2**62, 1),
    ],
    ids=["endless text", "long text", "array", "array of texts", "tensors"],
)
def test_remote_file_of_a_header_that_claims_too_much_is_not_read(hub: Hub, claim: bytes) -> None:
    """What no header has is refused before it is asked for."""
    hub.add("dm/file", None, {"flux.gguf": claim + bytes(1 << 20)})
    problem = problem_of(lambda: of_file("flux.gguf"), SourceError)
    assert (problem.code, problem.why, problem.fix) == (Code.WEIGHTS_CORRUPT, "", ASK)
    assert hub.sent == {"dm/file flux.gguf": 2**16}


def test_remote_file_of_a_header_without_end_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that go on and on are read to the largest header there may be, in few requests, and no further."""
    monkeypatch.setattr("dmconfig.gguf.MAX_HEADER_BYTES", 2**21)
    data = head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**40) + text("x" * 1000) * 5000
    hub.add("dm/file", None, {"flux.gguf": data})
    problem = problem_of(lambda: of_file("flux.gguf"), SourceError)
    assert problem.what == f"weights file file/flux.gguf is corrupt: its header would take more than {2**21} bytes"
    assert hub.sent["dm/file flux.gguf"] <= 2**22
    assert hub.requests.count("GET dm/file flux.gguf") <= 6


@pytest.mark.parametrize("length", [0, 3, 20, 5000])
def test_remote_file_that_is_cut_says_so(hub: Hub, length: int) -> None:
    """Wherever a file ends too early, in its header or behind it, it is told as on this machine."""
    hub.add("dm/file", None, {"flux.gguf": gguf({"w": ("F32", (1 << 12,))})[:length]})
    problem = problem_of(lambda: of_file("flux.gguf"), SourceError)
    assert problem.what.startswith("weights file file/flux.gguf is truncated")


def test_remote_file_that_is_not_there_names_those_that_are(hub: Hub) -> None:
    """A misspelt file is told with what there is."""
    hub.add("dm/file", None, {"flux-Q4_K_S.gguf": b""})
    problem = problem_of(lambda: of_file("flux-Q4_K_M.gguf"), BuildError)
    assert (problem.code, problem.fix) == (Code.SOURCE_NOT_FOUND, "did you mean dm/file/flux-Q4_K_S.gguf?")


# Damage


def test_remote_tensors_of_a_file_of_another_length_says_so(hub: Hub) -> None:
    """A file that is shorter or longer than its header says is told as on this machine, but with another remedy."""
    tensors: Tensors = {"w": ("F32", (1 << 12,))}
    hub.add("dm/digits", None, {UNET: safetensors(tensors, body=bytes(1 << 10))})
    problem = problem_of(unet, SourceError)
    assert (problem.code, problem.why, problem.fix) == (Code.WEIGHTS_CORRUPT, "", ASK)
    assert problem.what == (
        "weights file unet/diffusion_pytorch_model.safetensors is truncated: "
        "its header describes 16.1 KiB, the file holds 1.1 KiB"
    )
    assert problem.origin == f"dm/digits/{UNET}"
    hub.add("dm/digits", None, {UNET: safetensors(tensors, body=bytes(1 << 15))})
    assert problem_of(unet, SourceError).what.endswith(
        "is corrupt: its header describes 16.1 KiB, the file holds 32.1 KiB"
    )


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "is truncated: a safetensors file has at least 8 bytes, this one has 0"),
        (b"abc", "is truncated: a safetensors file has at least 8 bytes, this one has 3"),
        (struct.pack("<Q", 0), "is corrupt: its header is empty"),
        (struct.pack("<Q", 2) + b"{", "is truncated: its header alone ends at 10 B, the file holds 9 B"),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "is no safetensors file, or corrupt: its header would take 2125423.4 TiB, the format allows 95.4 MiB",
        ),
        (struct.pack("<Q", 4) + b"[1] ", "is corrupt: its header is not a JSON object"),
        (struct.pack("<Q", 8) + b'{"w": 1}', "is corrupt: tensor 'w' lacks its dtype, shape or data_offsets"),
    ],
    ids=["empty", "short", "no header", "cut header", "text", "list", "entry"],
)
def test_remote_tensors_of_a_damaged_header_says_what_is_wrong(hub: Hub, data: bytes, what: str) -> None:
    """Every rule that a header breaks is told in the words for files on this machine."""
    hub.add("dm/digits", None, {UNET: data})
    assert problem_of(unet, SourceError).what == f"weights file {UNET} {what}"


def test_remote_tensors_of_a_header_that_claims_too_much_is_not_read(hub: Hub) -> None:
    """A length that no header has is refused before it is asked for."""
    hub.add("dm/digits", None, {UNET: struct.pack("<Q", 1 << 40) + bytes(1 << 16)})
    assert problem_of(unet, SourceError).code is Code.WEIGHTS_CORRUPT
    assert hub.sent == {f"dm/digits {UNET}": 8}


@pytest.mark.parametrize(
    ("weight_map", "shards", "code", "what"),
    [
        (
            WHOLE_MAP | {"c": shard(3)},
            WHOLE_SHARDS,
            Code.WEIGHTS_MISSING,
            f"weights index dm/model/{INDEX} lists files that are not on the hub: {shard(3)}",
        ),
        (
            WHOLE_MAP | {"c": shard(2)},
            WHOLE_SHARDS,
            Code.WEIGHTS_CORRUPT,
            f"weights file transformer/{shard(2)} lacks tensor c that {Path(INDEX).name} lists there",
        ),
        (
            {"a": shard(1), "b": shard(2)},
            {**WHOLE_SHARDS, shard(2): {"b": ("F32", (5,)), "d": ("F32", (5,))}},
            Code.WEIGHTS_CORRUPT,
            f"weights file transformer/{shard(2)} holds tensor d that {Path(INDEX).name} does not list there",
        ),
        (
            {"a": "../" + shard(1)},
            WHOLE_SHARDS,
            Code.WEIGHTS_CORRUPT,
            f"weights index {INDEX} is corrupt: it places tensor 'a' in '../{shard(1)}', not a file of its folder",
        ),
        (
            {},
            WHOLE_SHARDS,
            Code.WEIGHTS_CORRUPT,
            f"weights index {INDEX} is corrupt: it has no weight_map from tensors to files",
        ),
    ],
    ids=["absent", "lacks", "holds", "outside", "empty"],
)  # fmt: skip
def test_remote_tensors_hold_the_index_against_its_files(
    hub: Hub, weight_map: dict[str, str], shards: Mapping[str, Tensors], code: Code, what: str
) -> None:
    """An index that does not fit its files is refused, with the remedy for what is wrong on the hub itself."""
    hub.add("dm/model", None, sharded(weight_map, shards))
    problem = problem_of(transformer, SourceError)
    assert (problem.code, problem.what, problem.fix) == (code, what, ASK)
    assert problem.origin.startswith("dm/model/transformer/") or problem.origin == f"dm/model/{INDEX}"


def test_remote_tensors_tell_all_damage_together(hub: Hub) -> None:
    """Two damaged shards are two problems."""
    files = sharded(WHOLE_MAP, WHOLE_SHARDS)
    hub.add("dm/model", None, {name: data if name == INDEX else data[:-1] for name, data in files.items()})
    with pytest.raises(SourceError) as raised:
        transformer()
    assert [problem.code for problem in raised.value.problems] == [Code.WEIGHTS_CORRUPT] * 2


def test_remote_tensors_refuse_a_name_in_two_files(hub: Hub) -> None:
    """A tensor has one value: two shards that both hold it are refused, although the index names one."""
    shards: Mapping[str, Tensors] = {shard(1): {"a": ("F16", (2,))}, shard(2): {"a": ("F16", (2,)), "b": ("F16", (2,))}}
    hub.add("dm/model", None, sharded(WHOLE_MAP, shards))
    with pytest.raises(SourceError) as raised:
        transformer()
    assert f"{shard(1)} and {shard(2)} both hold tensor a" in raised.value.problems[0].what


# Refusals


def test_remote_tensors_refuse_a_server_that_ignores_ranges(hub: Hub) -> None:
    """A server that sends whole files is told so, and hung up on: no more comes than the connection holds."""
    data = safetensors({"w": ("F32", (1 << 24,))})
    hub.add("dm/digits", None, {UNET: data}).ignores_ranges = True
    problem = problem_of(unet, BuildError)
    assert problem.code is Code.DOWNLOAD_FAILED
    assert problem.what == (f"the header of dm/digits/{UNET} cannot be read from afar: range requests are not answered")
    assert hub.requests.count(f"GET dm/digits {UNET}") == 1
    assert hub.sent.get(f"dm/digits {UNET}", 0) < len(data) / 2


def test_remote_tensors_of_a_gated_repository_say_what_to_do(hub: Hub) -> None:
    """Listing is open and files are not: the licence is named, as for a download."""
    hub.add("dm/digits", DIGITS).failure = "gated"
    problem = problem_of(unet, BuildError)
    assert problem.what == "'dm/digits' may be downloaded only after its licence was accepted"
    assert problem.fix == f"accept it at {hub.url}/dm/digits and log in with: hf auth login"


def test_remote_tensors_of_a_private_or_unknown_repository_are_not_there(hub: Hub) -> None:
    """The hub does not tell the two apart."""
    hub.add("dm/digits", DIGITS).private = True
    assert problem_of(unet, BuildError).what == "the hub has no model repository 'dm/digits'"
    assert problem_of(transformer, BuildError).what == "the hub has no model repository 'dm/model'"


def test_remote_tensors_of_a_body_that_breaks_off_say_so(hub: Hub) -> None:
    """A header that comes only in part is not taken for one."""
    hub.add("dm/digits", DIGITS).failure = "truncated"
    problem = problem_of(unet, BuildError)
    assert (problem.code, problem.what) == (Code.DOWNLOAD_FAILED, "the download of 'dm/digits' broke off")


def test_remote_tensors_of_a_hub_with_trouble_say_so(hub: Hub) -> None:
    """An error of the server is the hub's, whether for the list or for a file."""
    hub.add("dm/digits", DIGITS).broken_files = frozenset({UNET})
    assert problem_of(unet, BuildError).what == "the hub answered with an error when asked for 'dm/digits'"
    hub.repos["dm/digits"].failure = "error"
    assert problem_of(unet, BuildError).what == "the hub answered with an error when asked for 'dm/digits'"


def test_remote_tensors_offline_ask_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where downloads are forbidden, so are requests; what was wanted is named."""
    hub.add("dm/digits", DIGITS)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    problem = problem_of(unet, BuildError)
    assert problem.code is Code.DOWNLOAD_FAILED
    assert problem.why == "lacking are: the headers of the weights of unet"
    assert hub.requests == []


def test_remote_tensors_without_a_connection_say_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that does not answer is told, for the list and, kept elsewhere, for the file."""
    hub.add("dm/digits", DIGITS).kept_at = "http://127.0.0.1:9"
    expected = "the hub cannot be reached, and 'dm/digits' is not whole in the local hub cache"
    assert problem_of(unet, BuildError).what == expected
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert problem_of(unet, BuildError).what == expected


def test_remote_tensors_leave_the_cache_alone(hub: Hub, tmp_path: Path) -> None:
    """Nothing is written where downloads go: a part of a repository would be taken for the whole."""
    hub.add("dm/model", None, sharded(WHOLE_MAP, WHOLE_SHARDS))
    transformer()
    assert not [file for file in (tmp_path / "home").rglob("*") if file.is_file()]
