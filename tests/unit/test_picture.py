from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import NamedTuple
from xml.etree import ElementTree as ET

import pytest

from dmconfig.load import plan_for
from dmconfig.picture import plan_picture
from dmconfig.plan import Plan
from dmconfig.render.stacks import Block, stacks_of
from dmconfig.units import GIB
from tests.conftest import DIGITS, checked_from, footprints, inventory, plan_from

SVG = "{http://www.w3.org/2000/svg}"
SIZES = footprints(text_encoder=1, unet=4, vae=2)
IN_TURN = ("text_encoder", "unet", "vae")
LETTER = 7.2  # the width of a letter that the picture allows for
MACHINES = [[8], [24, 8], [8, 8, 8], [80, 8], *([16] * count for count in (4, 5, 6, 7, 8))]
BROUGHT = "device_map: cuda:0\nlow_memory: cpu_offload_with_hook\n"
STREAMED = (
    "device_map: {unet.mid_block: {execution: cuda:1, offload: sequential}, "
    "unet.up_blocks: {execution: cuda:1, offload: sequential}, default: cuda:0}\n"
)
PARTS = "device_map: {unet: cuda:0, unet.mid_block: cuda:1, unet.up_blocks: cuda:1, default: cuda:0}\n"


def drawn(plan: Plan) -> ET.Element:
    """The elements of a plan's picture."""
    return ET.fromstring(plan_picture(plan, IN_TURN))  # noqa: S314 - our own text


def real_plan(lines: str, cuda: list[float]) -> Plan:
    """The plan of the trained example at its own size, split where the lines say so."""
    return plan_for(checked_from(DIGITS + lines), inventory(cuda=cuda))


class Box(NamedTuple):
    """A rectangle, and what a pointer over it shows."""

    title: str
    x: float
    y: float
    width: float
    height: float


def boxes(picture: ET.Element, kind: str = "edge") -> list[Box]:
    """The rectangles of a kind, in the order of drawing."""
    return [
        Box(box.findtext(f"{SVG}title", ""), *(float(box.get(key, "")) for key in ("x", "y", "width", "height")))
        for box in picture.iter(f"{SVG}rect")
        if box.get("class") == kind
    ]


@pytest.fixture
def brought() -> Plan:
    """Everything brought whole to a card of 8 GiB, 2 GiB in reserve, beside a card that is not used."""
    return plan_from(DIGITS + "reserve: 2GiB\n" + BROUGHT, inventory(cuda=[8, 4], cpu=16), SIZES)


def test_stacks_tell_what_rests_and_what_comes(brought: Plan) -> None:
    """Each component comes in the phase of its turn; on the cpu all rest all the time."""
    first, second, host = stacks_of(brought, IN_TURN)
    whole = "brought whole from cpu"
    assert first.held == ()
    assert first.visiting == (
        Block(component="vae", nbytes=2 * GIB, phase=2, brought=whole),
        Block(component="text_encoder", nbytes=GIB, phase=0, brought=whole),
        Block(component="unet", nbytes=4 * GIB, phase=1, brought=whole),
    )
    assert sorted(first.runs) == [0, 1, 2]
    assert (second.held, second.visiting, second.runs) == ((), (), ())
    assert [(block.component, block.nbytes, block.phase) for block in host.held] == [
        ("vae", 2 * GIB, None), ("text_encoder", GIB, None), ("unet", 4 * GIB, None),
    ]  # fmt: skip


def test_stacks_have_what_runs_within_others_all_the_time(brought: Plan) -> None:
    """A component outside the turns stays until the call ends, so it is there in every phase."""
    first, *_ = stacks_of(brought, ("text_encoder", "vae"))
    assert [(block.component, block.brought) for block in first.held] == [("unet", "brought whole from cpu")]
    assert [(block.component, block.phase) for block in first.visiting] == [("vae", 1), ("text_encoder", 0)]


@pytest.mark.parametrize("lines", ["", BROUGHT, PARTS, STREAMED], ids=["balanced", "brought", "parts", "streamed"])
def test_stacks_add_up_to_the_plan(lines: str) -> None:
    """On every device, what rests there and the most that comes are what the plan says is used."""
    plan = real_plan(lines, [24, 24])
    for stack in stacks_of(plan, IN_TURN):
        most = max((block.nbytes for block in stack.visiting), default=0)
        assert stack.held_bytes + most == stack.device.used_bytes
        assert all(sum(size for _, size in block.parts) in (0, block.nbytes) for block in stack.held)


def test_picture_is_the_same_for_the_same_plan(brought: Plan) -> None:
    """Nothing of the process, the time or the machine is in it."""
    assert plan_picture(brought, IN_TURN) == plan_picture(brought, IN_TURN)


def test_picture_needs_nothing_beside_it_and_says_what_it_shows(brought: Plan) -> None:
    """No script, no reference, no font of its own; a title and a description in words, for who cannot see it."""
    text, picture = plan_picture(brought, IN_TURN), drawn(brought)
    assert not re.search(r"<script|<image|<foreignObject|href|@import|@font-face|\bon[a-z]+=", text)
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {
        f"#{mark.get('id')}" for mark in picture.iter() if mark.get("id")
    }
    assert re.findall("https?://[^\"']*", text) == ["http://www.w3.org/2000/svg"]
    assert "@media (prefers-color-scheme: dark)" in text
    title, description = picture.find(f"{SVG}title"), picture.find(f"{SVG}desc")
    assert title is not None
    assert description is not None
    assert (picture.get("role"), picture.get("aria-labelledby")) == (
        "img",
        f"{title.get('id')} {description.get('id')}",
    )
    assert title.text == "Plan of StableDiffusionPipeline on a toy machine"
    assert description.text == (
        "moving weights: about 626 ms per generation (7.0 GiB moved); "
        "cuda:0 of 8.0 GiB: vae 2.0 GiB, brought whole from cpu in phase 3, "
        "text_encoder 1.0 GiB, brought whole from cpu in phase 1, unet 4.0 GiB, brought whole from cpu in phase 2, "
        "2.0 GiB reserve, 2.0 GiB free; "
        "cuda:1 of 4.0 GiB: 4.0 GiB free; "
        "cpu of 16.0 GiB: vae 2.0 GiB, text_encoder 1.0 GiB, unet 4.0 GiB, 9.0 GiB free"
    )


def test_picture_blocks_are_to_scale_and_in_their_phases(brought: Plan) -> None:
    """Heights are bytes of the budget; phases stand side by side; the reserve is at the top."""
    reserve, vae, text_encoder, unet, *_ = boxes(drawn(brought))
    column, half, _ = (box for box in boxes(drawn(brought), "frame") if box.width > 10)
    per_gib, third, floor = column.height / 8, column.width / 3, column.y + column.height
    assert half.height == 4 * per_gib
    assert [box.height for box in (reserve, text_encoder, unet, vae)] == [size * per_gib for size in (2, 1, 4, 2)]
    starts = [column.x, column.x + third, column.x + 2 * third]
    assert [box.x for box in (text_encoder, unet, vae)] == pytest.approx(starts, abs=0.1)
    assert {box.y + box.height for box in (vae, text_encoder, unet)} == {floor}
    assert (reserve.x, reserve.y, reserve.width) == (column.x, column.y, column.width)


def test_picture_brought_blocks_are_hatched_and_resting_ones_solid(brought: Plan) -> None:
    """What comes and goes is filled by a pattern, what stays by a colour; one component keeps its colour."""
    fills = [box.get("fill", "") for box in drawn(brought).iter(f"{SVG}rect") if box.get("class") == "edge"]
    assert fills[0] == "url(#dm-reserve)"
    assert fills[1:4] == ["url(#dm-brought-0)", "url(#dm-brought-1)", "url(#dm-brought-2)"]
    assert all(re.fullmatch("#[0-9a-f]{6}", fill) for fill in fills[4:])
    assert len(set(fills[4:])) == 3


def test_picture_names_the_parts_of_a_split_component() -> None:
    """Beside each device stand the parts it has, with their sizes."""
    words = [text.text for text in drawn(real_plan(PARTS, [24, 24])).iter(f"{SVG}text")]
    assert words.count("unet") == 2
    assert words.index("(the rest)") < words.index("cuda:1") < words.index("mid_block")
    assert words[words.index("mid_block") + 1] == "984.8 KiB"


def labels(picture: ET.Element) -> list[tuple[float, float, float, str]]:
    """Left, right, baseline and words of each text, by the letters that the picture allows for."""
    found = []
    for text in picture.iter(f"{SVG}text"):
        words, kinds = text.text or "", (text.get("class") or "").split()
        x, length = float(text.get("x", "")), len(words) * (LETTER if "title" not in kinds else 10)
        left = x - length if "end" in kinds else x - 7 if "mark" in kinds else x
        found.append((left, left + (14 if "mark" in kinds else length), float(text.get("y", "")), words))
    return found


@pytest.mark.parametrize("cuda", MACHINES, ids=str)
@pytest.mark.parametrize("lines", ["device_map: balanced\n", BROUGHT, PARTS], ids=["balanced", "brought", "parts"])
def test_picture_labels_keep_clear_of_one_another(cuda: list[float], lines: str) -> None:
    """For one to eight devices no two texts overlap, and every text is within the picture."""
    lines = lines if len(cuda) > 1 else lines.replace("cuda:1", "cpu")
    picture = drawn(real_plan(f"reserve: 64MiB\n{lines}", cuda))
    texts, width, height = labels(picture), float(picture.get("width", "")), float(picture.get("height", ""))
    assert all(left >= 0 and right <= width and 0 < y < height for left, right, y, _ in texts)
    for (left, right, y, words), (other_left, other_right, other_y, other) in itertools.combinations(texts, 2):
        apart = right <= other_left or other_right <= left or abs(y - other_y) >= 12
        assert apart, (words, other)


def test_picture_of_a_plan_on_disk_has_a_column_for_it() -> None:
    """What rests on disk is drawn there, and brought from there to the device."""
    lines = "device_map: {unet: {execution: cuda:0, offload: model, storage: disk}, default: cuda:0}\n"
    words = [text.text for text in drawn(real_plan(lines, [24])).iter(f"{SVG}text")]
    assert "brought whole from disk" in words
    assert words[words.index("disk") :][:5] == ["disk", "3.0 MiB", "files the weights came in", "unet", "3.0 MiB"]


def test_picture_of_a_device_that_may_not_be_used_says_so() -> None:
    """A budget of nothing divides nothing, and is told."""
    plan = plan_from(DIGITS + "max_memory: {0: 0, cpu: 64GiB}\n", inventory(cuda=[8]), SIZES)
    assert "may not be used" in [text.text for text in drawn(plan).iter(f"{SVG}text")]


def test_picture_of_a_machine_without_accelerators_is_one_column() -> None:
    """The cpu runs every phase, and is drawn to its own scale."""
    picture = drawn(plan_from(DIGITS, inventory(cpu=16), SIZES))
    assert [box.title for box in boxes(picture)] == ["vae 2.0 GiB", "text_encoder 1.0 GiB", "unet 4.0 GiB"]
    assert len([mark for mark in picture.iter(f"{SVG}circle") if mark.get("class") == "on"]) == 3


def test_picture_escapes_what_a_machine_is_called(brought: Plan) -> None:
    """Names from files are text of the picture, whatever letters they have."""
    odd = replace(brought, machine='<a> & "b"\x07\ud800')
    title = ET.fromstring(plan_picture(odd, IN_TURN).encode()).findtext(f"{SVG}title")  # noqa: S314 - our own text
    assert title == 'Plan of StableDiffusionPipeline on <a> & "b"  '
