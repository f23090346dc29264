"""What a rehearsal says: as text, as JSON by its schema, and as a page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import jsonschema
import pytest

from dmconfig.checked import check_file
from dmconfig.inventory import parse_machine
from dmconfig.load import plan_for
from dmconfig.rehearse import Rehearsal, Script, Settings, rehearse
from dmconfig.rehearse.failures import devices_named_in
from dmconfig.rehearse.model import Crossing, DevicePeak, Failure, Margin, PhasePeak
from dmconfig.rehearse.page import rehearsal_page
from dmconfig.rehearse.report import rehearsal_data, rehearsal_schema, rehearsal_text, versions
from dmconfig.render import problems_data
from dmconfig.units import GIB, MIB
from tests.conftest import DIGITS, footprints, inventory, plan_from
from tests.tiny_pipelines import write_spec

ROOT = Path(__file__).parents[2]
SIZES = footprints(text_encoder=1, unet=4, vae=2)
PLAN = plan_from(DIGITS + "reserve: 0\ndevice_map: {unet: cuda:0, default: cuda:1}\n", inventory(cuda=[8, 8]), SIZES)
CONTEXT = Margin(name="context", nbytes=GIB // 2, why="the context")
CACHE = Margin(name="cache", nbytes=0, why="kept for later (7 bytes)")


def peak(phase: str, weights: float, activations: float) -> PhasePeak:
    """A peak of so many GiB."""
    return PhasePeak(phase=phase, weights_bytes=int(weights * GIB), activations_bytes=int(activations * GIB))


def device(index: int, weights: float, activations: Mapping[str, float], runs: Sequence[str]) -> DevicePeak:
    """A card of 8 GiB on which weights lie all the time, and activations by phase."""
    return DevicePeak(
        id=f"cuda:{index}",
        capacity_bytes=8 * GIB,
        phases=tuple(peak(phase, weights, nbytes) for phase, nbytes in activations.items()),
        margins=(CONTEXT, CACHE),
        curve=tuple(peak(phase, weights, activations[phase]) for phase in runs),
    )


RUNS = ("outside", "text_encoder", "outside", "unet", "outside", "unet", "outside", "vae.decode", "outside")


@pytest.fixture
def rehearsal() -> Rehearsal:
    """A denoiser on one card, an encoder and a decoder on the other: two of ten steps rehearsed."""
    return Rehearsal(
        pipeline=PLAN.pipeline,
        plan=PLAN,
        steps=(2, 10),
        arguments={"num_inference_steps": 2, "prompt": "a fox"},
        devices=(
            device(0, 4, {"outside": 0, "text_encoder": 0, "unet": 1, "vae.decode": 0}, RUNS),
            device(1, 3, {"outside": 0, "text_encoder": 0.5, "unet": 0, "vae.decode": 2}, RUNS),
        ),
        crossings=(
            Crossing(phase="text_encoder", source="cuda:1", destination="cuda:0", kind="activations",
                     nbytes=2.0 * MIB, count=1.0, seconds=0.0001),
            Crossing(phase="unet", source="cpu", destination="cuda:0", kind="weights",
                     nbytes=30.0 * GIB, count=9.999999999999998, seconds=2.5),
        ),
        output=(1, 512, 512),
        odd_output="",
        stand_ins=("tokenizer",),
        guesses={"aten.item": 2},
        failure=None,
    )  # fmt: skip


FAILURE = Failure(
    kind="wrong device",
    phase="vae.decode",
    what="Expected all tensors to be on the same device, but found at least two devices, cuda:1 and cuda:0!",
    module="vae.decoder.conv_in",
    operation="aten.convolution",
    devices=("cuda:1", "cuda:0"),
)


def test_text_whole(rehearsal: Rehearsal) -> None:
    """The verdict, what it rests on, a bar per device, peaks by phase, the largest moves first, and the small print."""
    # of 32 cells of 8 GiB: 4 GiB are 16, 1 GiB is 4, half a GiB is 2
    bars = "█" * 16 + "▓" * 4 + "▒" * 2 + "·" * 10, "█" * 12 + "▓" * 8 + "▒" * 2 + "·" * 10
    by = ", ".join(f"{name} {version}" for name, version in versions().items())
    assert rehearsal_text(rehearsal).splitlines() == [
        "fits: 2.5 GiB or more is left on every device, the least on cuda:0",
        "",
        "StableDiffusionPipeline on a toy machine",
        "what came out is 1 x 512 x 512; 2 of 10 steps rehearsed, and the others taken to be as these",
        "30.0 GiB in 11 moves between devices per generation, about 2.5 s: an estimate from the machine's link speeds",
        "not on this machine, so stand-ins took their place: tokenizer",
        "values that were asked for, do not exist, and were answered with zero: aten.item (2 times)",
        "",
        "device                                    █ weights  ▓ activations  ▒ margins   · free       of  peak in",
        f"cuda:0  {bars[0]}    4.0 GiB        1.0 GiB  512.0 MiB  2.5 GiB  8.0 GiB  unet",
        f"cuda:1  {bars[1]}    3.0 GiB        2.0 GiB  512.0 MiB  2.5 GiB  8.0 GiB  vae.decode",
        "",
        "the most at once in each phase, weights and activations; * is the device's peak",
        "phase                 cuda:0     cuda:1",
        "the pipeline itself  4.0 GiB    3.0 GiB",
        "text_encoder         4.0 GiB    3.5 GiB",
        "unet                 5.0 GiB *  3.0 GiB",
        "vae.decode           4.0 GiB    5.0 GiB *",
        "",
        "what moves between devices in a whole generation; times are an estimate from the machine's link speeds",
        "from    to      in            what            bytes  moves        about",
        "cpu     cuda:0  unet          weights      30.0 GiB     10  about 2.5 s",
        "cuda:1  cuda:0  text_encoder  activations   2.0 MiB      1   under 1 ms",
        "",
        "margin context: 512.0 MiB on cuda:0, cuda:1; the context",
        "margin cache: nothing added on cuda:0, cuda:1; kept for later",
        "placed: vae on cuda:1; text_encoder on cuda:1; unet on cuda:0",
        "called with prompt='a fox'",
        f"by {by}",
    ]


def test_text_of_a_failure_says_where_and_between_which_devices(rehearsal: Rehearsal) -> None:
    """The first lines name the module and both devices; then the phase, the operation and the words of the error."""
    failed = replace(rehearsal, failure=FAILURE, output=())
    lines = rehearsal_text(failed).splitlines()
    assert lines[:5] == [
        "does not run: tensors on cuda:1 and cuda:0 meet in vae.decoder.conv_in",
        "  phase    vae.decode",
        "  where    vae.decoder.conv_in (aten.convolution)",
        "  devices  cuda:1 and cuda:0",
        f"  what     {FAILURE.what}",
    ]
    assert "all figures are of what ran before the failure" in lines


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        (
            {"failure": replace(FAILURE, kind="out of memory", devices=("cuda:1",), module="")},
            "does not fit: cuda:1 is full in vae.decode",
        ),
        (
            {"failure": replace(FAILURE, kind="unknown value")},
            "cannot be rehearsed: unknown value in vae.decoder.conv_in",
        ),
        (
            {"devices": (device(0, 7, {"unet": 1.5}, RUNS[:0]),)},
            "does not fit: cuda:0 needs 9.0 GiB in unet and has 8.0 GiB",
        ),
        ({"odd_output": "8 frames were asked for, and none came"}, "runs, but 8 frames were asked for, and none came"),
        ({"devices": ()}, "runs; there is no accelerator to fill"),
        (
            {"devices": (device(0, 4, {"unet": 1, "text_encoder": 1}, ["unet", "text_encoder"]),)},
            "fits as far as it ran (vae never did): 2.5 GiB or more is left on every device, the least on cuda:0",
        ),
    ],
)
def test_the_first_line_is_the_verdict(rehearsal: Rehearsal, changes: dict[str, Any], first: str) -> None:
    """Whatever comes of a rehearsal, the first line of the text, the JSON and the page say it in the same words."""
    other = replace(rehearsal, **changes)
    assert rehearsal_text(other).splitlines()[0] == first
    assert rehearsal_data(other)["verdict"] == first
    verdict = next(each for each in elements(other, "div") if "verdict" in each.get("class", ""))
    assert (verdict.text or "").strip() == first


def test_text_tells_how_much_too_much_it_is(rehearsal: Rehearsal) -> None:
    """A device that is over has a full bar and the missing bytes in the place of the free ones."""
    over = replace(rehearsal, devices=(device(0, 7, {"unet": 1.5}, RUNS[:0]),))
    (line,) = [each for each in rehearsal_text(over).splitlines() if each.startswith("cuda:0 ")]
    assert line.split() == [
        "cuda:0", "█" * 28 + "▓" * 4, "7.0", "GiB", "1.5", "GiB", "512.0", "MiB", "1.0", "GiB", "over", "8.0", "GiB",
        "unet",
    ]  # fmt: skip


def test_text_keeps_to_a_width(rehearsal: Rehearsal) -> None:
    """Bars get shorter, sentences are wrapped, and a table of many devices becomes several."""
    many = tuple(replace(rehearsal.devices[0], id=f"cuda:{index}") for index in range(8))
    text = rehearsal_text(replace(rehearsal, devices=many, failure=FAILURE), 80)
    assert max(map(len, text.splitlines())) <= 84  # the least bar, and a figure in every column
    assert len(re.findall(r"^phase  ", text, re.MULTILINE)) == 2
    assert all(f"cuda:{index} " in text for index in range(8))


def test_text_sums_up_small_moves(rehearsal: Rehearsal) -> None:
    """Twelve moves are shown; what the others come to is told in a line."""
    crossings = tuple(replace(rehearsal.crossings[0], nbytes=1024.0 * size, count=2.0) for size in range(1, 15))
    text = rehearsal_text(replace(rehearsal, crossings=crossings))
    assert "14.0 KiB" in text
    assert "and 2 more: 3.0 KiB in 4 moves, under 1 ms" in text.splitlines()


def test_data_has_every_figure(rehearsal: Rehearsal) -> None:
    """Bytes and seconds are exact, scaled moves whole numbers, and a device's parts add up to its capacity."""
    data = rehearsal_data(rehearsal)
    assert json.loads(json.dumps(data)) == data
    assert (data["ok"], data["pipeline"], data["machine"]) == (True, "StableDiffusionPipeline", "a toy machine")
    assert data["steps"] == {"rehearsed": 2, "asked": 10}
    first = data["devices"][0]
    assert first["peak"] == {
        "phase": "unet",
        "peak_bytes": 5 * GIB,
        "weights_bytes": 4 * GIB,
        "activations_bytes": GIB,
    }
    assert first["peak"]["peak_bytes"] + first["margin_bytes"] + first["free_bytes"] == first["capacity_bytes"]
    assert [(margin["name"], margin["bytes"]) for margin in first["margins"]] == [("context", GIB // 2), ("cache", 0)]
    assert [run["phase"] for run in first["curve"]] == [*RUNS]
    assert data["crossings"][1] == {
        "phase": "unet",
        "source": "cpu",
        "destination": "cuda:0",
        "kind": "weights",
        "bytes": 30 * GIB,
        "moves": 10,
        "seconds": 2.5,
    }
    assert (data["moved_bytes"], data["seconds"]) == (30 * GIB + 2 * MIB, 2.5001)
    assert data["plan"]["device_map"] == {"vae": "cuda:1", "text_encoder": "cuda:1", "unet": "cuda:0"}
    assert data["failure"] is None


def closed(schema: Any) -> Any:
    """A schema in which no object has keys that are not named."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    extra = {"additionalProperties": False} if "properties" in schema and schema.get("type") == "object" else {}
    return {key: closed(value) for key, value in schema.items()} | extra


def test_data_is_what_the_schema_says(rehearsal: Rehearsal) -> None:
    """A validator that is not ours finds every key named and none missing, whether it ran, failed or was not tried."""
    schema = closed(json.loads(rehearsal_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    whole = rehearsal_data(rehearsal)
    for data in (whole, rehearsal_data(replace(rehearsal, failure=FAILURE, output=())), problems_data([])):
        jsonschema.validate(json.loads(json.dumps(data)), schema)
    for key in whole:
        if key not in ("ok", "verdict"):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({name: value for name, value in whole.items() if name != key}, schema)


def test_the_published_schema_of_rehearsals_is_the_records() -> None:
    """The file in ``schemas`` was written after the last change of the records."""
    assert (ROOT / "schemas" / "rehearsal-1.schema.json").read_text(encoding="utf-8") == rehearsal_schema()


def elements(rehearsal: Rehearsal, tag: str) -> Iterator[Xml.Element]:
    """The elements of a page of this name, in order; fails where the page is not well-formed."""
    page = rehearsal_page(rehearsal).removeprefix("<!doctype html>\n")
    yield from Xml.fromstring(page).iter(tag)  # noqa: S314 - our own text


def test_page_draws_each_run_to_scale(rehearsal: Rehearsal) -> None:
    """Every run of a phase is a column per device; heights are bytes by one scale, and no column leaves a gap."""
    curves = [svg for svg in elements(rehearsal, "svg") if svg.get("class") != "bar"]
    assert len(curves) == 2
    columns = curves[0].findall("g")
    assert [(column.findtext("title") or "").partition(":")[0] for column in columns] == [
        phase.replace("outside", "the pipeline itself") for phase in RUNS
    ]
    assert columns[3].findtext("title") == "unet: 4.0 GiB weights, 1.0 GiB activations"
    # each column is one of all there is, behind one of the weights
    heights = [[float(rect.get("height", "")) for rect in column.findall("rect")] for column in columns]
    for all_, weights in heights:
        assert all_ / weights == pytest.approx(5 / 4 if all_ != weights else 1, abs=0.01)
    assert [index for index, (all_, weights) in enumerate(heights) if all_ != weights] == [3, 5]
    places = [
        (float(r.get("x", "")), float(r.get("width", ""))) for r in (column.findall("rect")[0] for column in columns)
    ]
    assert [start for start, _ in places[1:]] == [start + width for start, width in places[:-1]]


def test_page_has_the_lines_to_stay_below(rehearsal: Rehearsal) -> None:
    """The capacity lies twice as high as 4 GiB of weights on a card of 8, the room without margins half a GiB lower."""
    curve = next(svg for svg in elements(rehearsal, "svg") if svg.get("class") != "bar")
    lines = {line.get("class"): float(line.get("y1", "")) for line in curve.findall("line")}
    weights = float(curve.findall("g")[0].findall("rect")[1].get("height", ""))
    assert lines["axis"] - lines["capacity"] == pytest.approx(2 * weights, abs=0.2)
    assert lines["axis"] - lines["room"] == pytest.approx(7.5 / 4 * weights, abs=0.2)


def test_page_labels_keep_clear_of_one_another(rehearsal: Rehearsal) -> None:
    """Names of phases below a curve have room, with few runs, with many, and with many kinds of them."""
    kinds = [f"a_component_of_a_long_name_{index}" for index in range(12)]
    for runs in (RUNS, kinds, ["encoder", *["controlnet", "unet"] * 40, "vae.decode"], ["unet"] * 300):
        card = device(0, 4, dict.fromkeys([*runs, "outside"], 1), runs)
        curve = next(svg for svg in elements(replace(rehearsal, devices=(card,)), "svg") if svg.get("class") != "bar")
        labels = [(float(t.get("x", "")), t.text or "") for t in curve.findall("text") if t.get("class") == "middle"]
        assert runs != kinds or [text for _, text in labels] == kinds
        ends = [(x - len(text) * 3.5, x + len(text) * 3.5) for x, text in labels]  # 7 px a letter, which is wide
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert ends == [] or (ends[0][0] >= 0 and ends[-1][1] <= float(curve.get("width", "")))


def test_page_stands_alone_and_is_the_same_each_time(rehearsal: Rehearsal) -> None:
    """Nothing is loaded from anywhere, nothing runs, and the same rehearsal makes the same bytes."""
    page = rehearsal_page(rehearsal)
    assert page == rehearsal_page(replace(rehearsal))
    assert page.startswith("<!doctype html>\n")
    assert not re.search(r"<script|<link|\bsrc=|\bhref=|url\(|@import|https?:", page)


def test_page_takes_words_as_words(rehearsal: Rehearsal) -> None:
    """What a prompt, a path or an error says is text, whatever it looks like."""
    hostile = '</title><script>alert("&")</script>'
    failure = replace(FAILURE, what=hostile, module=hostile)
    crossing = replace(rehearsal.crossings[0], phase=hostile)
    wild = replace(
        rehearsal, arguments={"prompt": hostile}, stand_ins=(hostile,), failure=failure, crossings=(crossing,)
    )
    assert not list(elements(wild, "script"))
    assert sum(hostile in "".join(each.itertext()) for each in elements(wild, "li")) == 1
    assert sum(hostile in "".join(each.itertext()) for each in elements(wild, "dd")) == 3
    assert sum(each.text == hostile for each in elements(wild, "td")) == 1


def test_page_has_a_picture_for_readers_that_see_none(rehearsal: Rehearsal) -> None:
    """Each drawing says in words what it shows, and each table has heads for its columns and rows."""
    for svg in elements(rehearsal, "svg"):
        assert svg.get("role") == "img"
        assert svg.get("aria-label") or svg.findtext("title")
    for row in elements(rehearsal, "tr"):
        assert row[0].get("scope") in ("row", "col")


def test_page_without_figures_is_a_page(rehearsal: Rehearsal) -> None:
    """A machine without accelerators, and a failure before anything was placed, have pages as well."""
    empty = replace(rehearsal, devices=(), crossings=(), failure=replace(FAILURE, phase="placing", module=""))
    headings = [each.text for each in elements(empty, "h2")]
    assert headings == ["Where everything is", "What the figures stand on"]
    assert "nothing moves between devices" in rehearsal_text(empty)


@pytest.mark.parametrize(
    ("what", "devices"),
    [
        ("found at least two devices, cuda:1 and cuda:0!", ("cuda:1", "cuda:0")),
        ("found at least two devices, cuda:0 and cpu!", ("cuda:0", "cpu")),
        (
            "either on cpu or on the same device as the indexed tensor (cuda:0), but found one on cuda:12",
            ("cuda:0", "cuda:12"),
        ),
        ("Tried to allocate 2.0 MiB. GPU 1 has a total capacity of 4.0 MiB", ("cuda:1",)),
        ("aten.item asks for the value of a tensor", ()),
    ],
)
def test_devices_are_read_off_an_error(what: str, devices: tuple[str, ...]) -> None:
    """Both devices that met are found, or the one that was full."""
    assert devices_named_in(what) == devices


def rehearsed(folder: Path, gpus: str) -> Rehearsal:
    """Rehearse a tiny FLUX.1, its transformer on one card and the rest on another."""
    file = write_spec("flux", folder)
    file.write_text(file.read_text() + "device_map: {transformer: cuda:0, default: cuda:1}\n")
    checked = check_file(file)
    machine = parse_machine(gpus, "8GiB")
    script = Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)
    return rehearse(script, plan_for(checked, machine), machine, Settings(height=32, width=32))


@pytest.mark.usefixtures("one_thread")
def test_a_real_rehearsal_has_a_curve_of_its_phases(tmp_path: Path) -> None:
    """Every run is on the curve of both devices, and the highest point of a phase's runs is the peak of that phase."""
    result = rehearsed(tmp_path, "2x2GiB")
    phases = [run.phase for run in result.devices[0].curve if run.phase != "outside"]
    assert phases == ["text_encoder", "text_encoder_2", "transformer", "transformer", "vae.decode"]
    for card in result.devices:
        assert [run.phase for run in card.curve] == [run.phase for run in result.devices[0].curve]
        by_phase = {each.phase: each.nbytes for each in card.phases}
        for phase in phases:
            assert max(run.nbytes for run in card.curve if run.phase == phase) == by_phase.get(phase, 0)
    jsonschema.validate(json.loads(json.dumps(rehearsal_data(result))), closed(json.loads(rehearsal_schema())))
    assert result.never_ran == ()


@pytest.mark.usefixtures("one_thread")
def test_a_real_failure_names_its_phase_and_module(tmp_path: Path) -> None:
    """A card that is full while the denoiser runs is told with the phase, though it has ended, and the module."""
    result = rehearsed(tmp_path, "1MiB,2GiB")
    assert result.failure is not None
    failure = result.failure
    assert (failure.kind, failure.phase, failure.devices) == ("out of memory", "transformer", ("cuda:0",))
    assert failure.module.startswith("transformer.")
    assert failure.operation.startswith("aten.")
    assert f"does not fit: cuda:0 is full in {failure.module}" == rehearsal_text(result).splitlines()[0]
