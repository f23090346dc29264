"""``dmconfig sweep``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dmconfig.cli.options import (
    CallOption,
    DiskOption,
    FileArgument,
    Format,
    FormatOption,
    FramesOption,
    HubOption,
    OverlayOption,
    PipelineOption,
    ProfileOption,
    RamOption,
    SetOption,
    StepsOption,
    call_overrides,
    chosen_machine,
    overrides_of,
    read_all,
)
from dmconfig.cli.printing import exit_on_problems, print_json, quiet_libraries, show, terminal_width

if TYPE_CHECKING:
    from dmconfig.inventory import Inventory


def sweep(
    file: FileArgument,
    *,
    overlays: OverlayOption = None,
    profile: ProfileOption = None,
    sizes: Annotated[str, typer.Option("--sizes", metavar="PIXELS,...", help="Heights that are widths too.")],
    batches: Annotated[str, typer.Option("--batches", metavar="N,...", help="How many pictures at once.")] = "1",
    machines: Annotated[
        list[str] | None,
        typer.Option(
            "--machine", metavar="FILE|NAME", help="For the machine in this file, or of this name; repeatable."
        ),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpus", metavar="SIZES", help="Accelerators, e.g. 2x24GiB,rtx-4090; may be repeated."),
    ] = None,
    ram: RamOption = None,
    disk: DiskOption = None,
    set_: SetOption = None,
    frames: FramesOption = None,
    steps: StepsOption = None,
    call: CallOption = None,
    pipeline: PipelineOption = None,
    hub: HubOption = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Find the largest picture, and the most at once, that fits: each setting is planned and rehearsed, per machine."""
    from dmconfig.assembly import PIPELINE
    from dmconfig.checked import check_file
    from dmconfig.rehearse.script import Settings
    from dmconfig.rehearse.table import fits_everywhere, sweep_data, sweep_text
    from dmconfig.staging import sweep_machines

    quiet_libraries()
    with exit_on_problems(format_):
        pixels, counts, chosen, overrides, arguments = read_all(
            lambda: _numbers(sizes, "--sizes", least=8),
            lambda: _numbers(batches, "--batches", least=1),
            lambda: [*_machines(machines, gpus, ram, disk)],
            lambda: overrides_of(set_),
            lambda: [*call_overrides(None, None, call, pipeline)],
        )
        grid = itertools.product(pixels, counts)
        claims, over = [*overrides, *arguments], overlays or ()
        checked = check_file(file, claims, overlays=over, profile=profile, ask_hub=hub, with_configs=hub)
        settings = Settings(frames=frames, steps=steps, pipeline=pipeline or PIPELINE)
        tried = sweep_machines(checked, chosen, grid, settings, ask_hub=hub)
        if format_ is Format.JSON:
            print_json(sweep_data(tried))
        else:
            show(sweep_text(tried, terminal_width()))
    if not fits_everywhere(tried):
        raise typer.Exit(3)


def _machines(
    names: list[str] | None, gpus: list[str] | None, ram: str | None, disk: str | None
) -> Iterator[Inventory]:
    """Every machine that is named or described; the one at hand where there is none."""
    from dmconfig.rehearse.reserve import rehearsable

    for name in names or []:
        yield rehearsable(chosen_machine(name, None, None if gpus else ram, None if gpus else disk), "--machine")
    for sizes in gpus or []:
        yield rehearsable(chosen_machine(None, sizes, ram, disk))
    if not names and not gpus:
        yield rehearsable(chosen_machine(None, None, ram, disk))


def _numbers(text: str, origin: str, *, least: int) -> list[int]:
    """The numbers of a list with commas.

    Raises: SpecError: one of them is no number, or too small.
    """
    from dmconfig.errors import Code, Problem, SpecError

    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not word.isdecimal() or int(word) < least]
    if wrong:
        what = f"{origin} takes whole numbers from {least} on, with commas, and not {', '.join(map(repr, wrong))}"
        raise SpecError([Problem(code=Code.BAD_COMMAND_LINE, what=what, fix=f"e.g. {origin} 512,768", origin=origin)])
    return [int(word) for word in words]
