"""Rehearsals held against runs with real values, on pipelines of the real classes that are small enough for both."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import pytest
import safetensors.torch
import torch
import transformers

from dmconfig.assembly import PIPELINE
from dmconfig.build import build_pipelines
from dmconfig.checked import Checked, check_file
from dmconfig.dispatch import dispatch, placement
from dmconfig.errors import SpecError
from dmconfig.load import plan_for
from dmconfig.progress import NoProgress
from dmconfig.rehearse import Rehearsal, Script, Settings, rehearse
from dmconfig.rehearse import rehearsal as rehearsing
from dmconfig.rehearse.adapters import pictures_for
from dmconfig.rehearse.inputs import arguments, steps_of
from dmconfig.rehearse.skeleton import build_skeletons
from dmconfig.resolve import overrides_from_mapping
from dmconfig.units import GIB
from dmconfig.virtual import VirtualMachine
from tests import placement_table
from tests.conftest import inventory
from tests.integration import test_matrix
from tests.tiny_pipelines import CALLS, LENGTH, SIZE, class_override, kind_of, write_spec

STEPS = 2
Peaks = Mapping[tuple[str, str], tuple[int, int]]
"""Weights and activations at the peak, by device and phase."""
Moves = Mapping[tuple[str, str, str, str], tuple[float, float]]
"""Bytes and count, by phase, source, destination and kind."""


@dataclass(frozen=True, slots=True)
class Tiny:
    """The tiny pipelines, each written when it is first asked for."""

    folder: Path
    _running: set[str] = field(default_factory=set)

    def runs(self, call: str, overrides: Mapping[str, Any]) -> bool:
        """Tell whether a call's pipeline runs in a placement as it is made; asked for again, it is remembered."""
        case = f"{call} {overrides}"
        if case not in self._running and rehearsed(self.checked(call, overrides), settings_of(call)).failure is None:
            self._running.add(case)
        return case in self._running

    def checked(self, call: str, overrides: Mapping[str, Any]) -> Checked:
        """Return the spec of a call's pipeline with overrides."""
        file = self.folder / f"{kind_of(call)}.yaml"
        if not file.exists():
            write_spec(kind_of(call), self.folder)
        return check_file(file, overrides_from_mapping({**class_override(call), **overrides}))

    def parts(self, call: str) -> test_matrix.Parts:
        """Return what a call's pipeline is made of."""
        plan = plan_for(self.checked(call, {"device_map": "cpu"}), inventory())
        return test_matrix.Parts(sizes={assignment.component: assignment.nbytes for assignment in plan.assignments})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Tiny]:
    """The tiny pipelines of this module."""
    gc.freeze()  # each case makes a pipeline or two, whose garbage is then found quickly
    yield Tiny(tmp_path_factory.mktemp("tiny"))
    gc.unfreeze()


def settings_of(call: str) -> Settings:
    """Return what a tiny pipeline is asked for: its small size, every step."""
    known = CALLS[call]()
    frames = known.get("num_frames")
    own = {"max_sequence_length": LENGTH} if "max_sequence_length" in known else {}
    return Settings(height=SIZE, width=SIZE, frames=frames, steps=STEPS, full=True, call=own)


def script_of(checked: Checked) -> Script:
    return Script(resolved=checked.resolved, spec=checked.spec, assembly=checked.assembly)


def rehearsed(checked: Checked, settings: Settings, gpus: Sequence[float] = (1, 1)) -> Rehearsal:
    """Return the rehearsal of a spec on a machine with so many GiB on each device."""
    machine = inventory(cuda=gpus)
    return rehearse(script_of(checked), plan_for(checked, machine), machine, settings)


def with_values(checked: Checked, rehearsal: Rehearsal, settings: Settings) -> tuple[Peaks, Moves]:
    """Return what the books of a machine say of a run of the loaded pipeline, in which everything is computed."""
    pipes = build_pipelines(checked.resolved, checked.assembly, rehearsal.plan, NoProgress())
    pipe: Any = pipes[[PIPELINE, *checked.spec.pipelines].index(settings.pipeline)]
    facts = checked.assembly.facts_of(settings.pipeline)
    pipe.set_progress_bar_config(disable=True)
    capacities = {device.id: device.capacity_bytes for device in rehearsal.devices}
    with VirtualMachine([*capacities.values()]) as machine, torch.no_grad():
        for part in {name: part for each in pipes for name, part in each.components.items()}.values():
            if isinstance(part, torch.nn.Module):
                machine.adopt(part)
        options = checked.spec.group_offload.model_dump()
        dispatch(
            pipes[0],
            rehearsal.plan,
            sharing=[(each, {}) for each in pipes[1:]],
            in_turn=checked.assembly.in_turn,
            group_options=options,
            is_mapped=False,
        )
        machine.ledger.reset()
        steps = steps_of(pipe, facts, settings, {})
        given = arguments(pipe, facts, settings, {}, steps)
        given |= pictures_for(pipe, facts, given, checked.assembly.adapters)
        with machine.track(pipe.components):
            pipe(**given)
        ledger = machine.ledger
        peaks = {
            (device, phase): (
                ledger.peak_bytes(device, phase=phase, kind="weights"),
                ledger.peak_bytes(device, phase=phase, kind="activations"),
            )
            for device in capacities
            for phase in ledger.phases
        }
        moves: Moves = {
            (move.phase, move.source, move.destination, move.kind): (count.bytes, count.count)
            for move, count in ledger.moves.items()
        }
    return {key: peak for key, peak in peaks.items() if any(peak)}, moves


def peaks_of(rehearsal: Rehearsal) -> Peaks:
    peaks = {
        (device.id, phase.phase): (phase.weights_bytes, phase.activations_bytes)
        for device in rehearsal.devices
        for phase in device.phases
    }
    return {key: peak for key, peak in peaks.items() if any(peak)}


def moves_of(rehearsal: Rehearsal) -> Moves:
    return {(c.phase, c.source, c.destination, c.kind): (c.nbytes, c.count) for c in rehearsal.crossings}


def check_shape_mode(call: str, placement: str, tiny: Tiny) -> None:
    """Hold what a rehearsal says of every peak and every move against the same run with values."""
    overrides = test_matrix.PLACEMENTS[placement](tiny.parts(call))
    gpus = (1,) * test_matrix.DEVICES.get(placement, 2)
    check_against_values(tiny.checked(call, overrides), settings_of(call), gpus)


def check_against_values(checked: Checked, settings: Settings, gpus: Sequence[float] = (1, 1)) -> Rehearsal:
    """Hold a rehearsal against the same run with values, and return it."""
    rehearsal = rehearsed(checked, settings, gpus)
    peaks, moves = with_values(checked, rehearsal, settings)

    assert rehearsal.failure is None
    assert not rehearsal.odd_output
    assert peaks_of(rehearsal) == peaks
    assert moves_of(rehearsal) == moves
    return rehearsal


QUICK = [("sd", "one of each"), ("flux", "denoiser alone"), ("sd-inpaint", "sequential_cpu_offload")]


def cells() -> list[Any]:
    """Return the cells of the matrix of placements that diffusers does not refuse."""
    documented = placement_table.read(placement_table.FILE.read_text(encoding="utf-8"))
    equal = [(call, placement) for (placement, call), outcome in documented.items() if outcome == "equal"]
    return [pytest.param(*cell, id=": ".join(cell)) for cell in equal]


@pytest.mark.parametrize(("call", "placement"), QUICK)
def test_shape_mode_takes_what_values_take_in_a_few_placements(call: str, placement: str, tiny: Tiny) -> None:
    """As the test below; the part of it that runs every time."""
    check_shape_mode(call, placement, tiny)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "placement"), cells())
def test_shape_mode_takes_what_values_take(call: str, placement: str, tiny: Tiny) -> None:
    """Weights and activations at every peak, and every move, are the same with values and without."""
    check_shape_mode(call, placement, tiny)


# Inputs and what comes out

CLASSES_OF_OTHERS = [
    ("sd", "StableDiffusionImg2ImgPipeline", (1, SIZE, SIZE)),
    ("sd", "StableDiffusionInpaintPipeline", (1, SIZE, SIZE)),
    ("sdxl", "StableDiffusionXLImg2ImgPipeline", (1, SIZE, SIZE)),
    ("sdxl", "StableDiffusionXLInpaintPipeline", (1, SIZE, SIZE)),
    ("sd3", "StableDiffusion3Img2ImgPipeline", (1, SIZE, SIZE)),
    ("flux", "FluxImg2ImgPipeline", (1, SIZE, SIZE)),
    ("controlnet", "StableDiffusionControlNetPipeline", (1, SIZE, SIZE)),
    ("controlnet", "StableDiffusionControlNetImg2ImgPipeline", (1, SIZE, SIZE)),
    ("wan", "WanPipeline", (1, 9, 3, SIZE, SIZE)),
    ("ltx", "LTXPipeline", (1, 9, 3, SIZE, SIZE)),
    ("ltx", "LTXImageToVideoPipeline", (1, 9, 3, SIZE, SIZE)),
    ("kandinsky22", "KandinskyV22CombinedPipeline", (1, SIZE, SIZE)),
]


@pytest.mark.parametrize(("kind", "class_name", "output"), CLASSES_OF_OTHERS)
def test_every_kind_of_call_has_what_it_needs(kind: str, class_name: str, output: tuple[int, ...], tiny: Tiny) -> None:
    """Pictures, masks and films are there for classes that need them, and what comes out is as large as was asked."""
    checked = tiny.checked(kind, {"pipeline.class": class_name})
    own = {"max_sequence_length": LENGTH} if kind in ("sd3", "flux", "wan", "ltx") else {}
    frames = 9 if len(output) > 3 else None
    rehearsal = rehearsed(checked, Settings(height=SIZE, width=SIZE, frames=frames, call=own))

    assert rehearsal.failure is None
    assert rehearsal.output == output
    assert not rehearsal.odd_output
    assert not rehearsal.never_ran


def test_strength_leaves_a_share_of_the_steps(tiny: Tiny) -> None:
    """50 steps on a picture with strength 0.8 are 40, and as many as are rehearsed are really run."""
    checked = tiny.checked("sdxl-img2img", {})
    rehearsal = rehearsed(checked, Settings(steps=50, call={"strength": 0.8}))

    assert rehearsal.steps == (2, 40)
    assert rehearsal.arguments["num_inference_steps"] == 3
    runs = [phase for phase in rehearsal.devices[0].curve if phase.phase == "unet"]
    assert len(runs) == 2


def test_the_file_and_the_user_decide_the_call(tiny: Tiny) -> None:
    """Arguments of the file are used, those of the user win over them, and of steps only some are run."""
    of_file = {"prompt": "a red fox", "guidance_scale": 1.0, "num_inference_steps": 30, "height": 64, "width": 64}
    checked = tiny.checked("sdxl", {"call": {**of_file, "num_images_per_prompt": 2}})
    rehearsal = rehearsed(checked, Settings(height=SIZE, batch=1, call={"guidance_scale": 7.0}))

    assert rehearsal.steps == (2, 30)
    assert rehearsal.output == (1, SIZE, 64)
    assert rehearsal.arguments["prompt"] == "a red fox"
    assert rehearsal.arguments["guidance_scale"] == 7.0


def test_sizes_of_the_signature_are_asked_for(tiny: Tiny) -> None:
    """A film that nobody gave a length has that of the signature, and is held against it."""
    checked = tiny.checked("ltx", {})
    rehearsal = rehearsed(checked, Settings(height=SIZE, width=SIZE, call={"max_sequence_length": LENGTH}))

    assert rehearsal.arguments["num_frames"] == 161
    assert rehearsal.output == (1, 161, 3, SIZE, SIZE)


WHOLE = [
    ("sdxl", {"device_map": {"unet": "cuda:0", "default": "cuda:1"}}),
    ("sdxl", {"device_map": "cuda:0", "low_memory": "cpu_offload_with_hook"}),
    ("sd", {"device_map": "cuda:0", "low_memory": "sequential_cpu_offload"}),
    ("flux", {"device_map": {"transformer": {"execution": "cuda:1", "offload": "group"}, "default": "cuda:0"}}),
    ("kandinsky22", {"device_map": {"unet": "cuda:0", "prior_prior": "cuda:1", "default": "cuda:1"}}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "overrides"), WHOLE)
def test_what_a_whole_generation_moves_is_told_from_a_few_steps(
    call: str, overrides: Mapping[str, Any], tiny: Tiny
) -> None:
    """Bytes and copies on every link and in every phase are those of a rehearsal of all steps."""
    checked = tiny.checked(call, overrides)
    few, all_ = (rehearsed(checked, replace(settings_of(call), steps=8, full=full)) for full in (False, True))

    assert few.steps[0] < few.steps[1] == all_.steps[0] == 8
    moved, expected = moves_of(few), moves_of(all_)
    assert {route: count for route, (_, count) in moved.items()} == {r: count for r, (_, count) in expected.items()}
    # the tensors of all timesteps are the only ones that are as long as there are steps, at most 25 and 8
    assert {r: expected[r][0] - b for r, (b, _) in moved.items() if not 0 <= expected[r][0] - b < 33 * 8} == {}


@pytest.mark.parametrize(
    ("scheduler", "run"),
    [("EulerDiscreteScheduler", 2), ("DDIMScheduler", 2), ("PNDMScheduler", 5), ("UniPCMultistepScheduler", 3)],
)
def test_multistep_solvers_reach_their_order(scheduler: str, run: int, tiny: Tiny) -> None:
    """One step more than they look back, and two for the others."""
    checked = tiny.checked("sd", {"components.scheduler.class": scheduler})
    pipes, _stand_ins = build_skeletons(checked.resolved, checked.assembly, dict.fromkeys(NAMES_OF_SD, "float32"))
    pipe = pipes[PIPELINE]
    steps = steps_of(pipe, checked.assembly.facts, Settings(steps=20), {})
    assert {name: (each.run, each.asked) for name, each in steps.items()} == {"scheduler": (run, 20)}


NAMES_OF_SD = ("vae", "text_encoder", "unet", "safety_checker")


def test_what_a_pipeline_does_not_do_is_refused(tiny: Tiny) -> None:
    """A length for a picture is an error, and not ignored."""
    checked = tiny.checked("sd", {})
    with pytest.raises(SpecError) as refused:
        rehearsed(checked, Settings(frames=9))
    (problem,) = refused.value.problems
    assert (problem.origin, problem.what) == ("--frames", "StableDiffusionPipeline makes no film")


def test_latents_are_held_against_nothing(tiny: Tiny) -> None:
    """A call that is asked for latents returns no picture of the size that was asked for, and that is not odd."""
    rehearsal = rehearsed(tiny.checked("sdxl", {"call": {"output_type": "latent"}}), settings_of("sdxl"))
    assert rehearsal.output == (1, 4, SIZE // 2, SIZE // 2)
    assert rehearsal.odd_output == ""
    assert rehearsal.fits


def test_what_the_libraries_refuse_is_a_failure_with_a_place(tiny: Tiny) -> None:
    """Any error of the pipeline's own code is told with what it is, where it was, and what to do; none escapes."""
    failure = rehearsed(
        tiny.checked("sdxl", {"call": {"guidance_rescale": 0.5}}), Settings(height=33, width=33)
    ).failure
    assert failure is not None
    assert (failure.kind, failure.phase, failure.module) == ("error", "outside", "")
    assert failure.what.startswith("ValueError: `height` and `width` have to be divisible by 8")
    assert "--call" in failure.fix
    assert "pipeline_stable_diffusion_xl.py" in failure.trace


def test_an_error_inside_a_module_names_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost module whose code raised is found by its path, and the phase is its component's."""
    monkeypatch.setattr(torch.nn.Conv2d, "_conv_forward", lambda *_args: {}["weight"])
    failure = rehearsed(tiny.checked("sdxl", {}), settings_of("sdxl")).failure
    assert failure is not None
    assert (failure.kind, failure.phase, failure.module) == ("error", "unet", "unet.conv_in")
    assert failure.what == "KeyError: 'weight'"


def test_threads_and_collector_are_left_as_they_were(tiny: Tiny) -> None:
    """A rehearsal computes with one thread, and gives the others back."""
    was, frozen = torch.get_num_threads(), gc.get_freeze_count()
    torch.set_num_threads(2)
    try:
        rehearsed(tiny.checked("sdxl", {}), settings_of("sdxl"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(was)
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen  # this module freezes what is there; of that some may be gone


def test_more_pictures_take_more(tiny: Tiny) -> None:
    """A batch of two returns two pictures, and holds more at once."""
    checked = tiny.checked("sd", {"device_map": "cuda:0"})
    one, two = (rehearsed(checked, Settings(height=SIZE, width=SIZE, batch=batch)) for batch in (1, 2))

    assert two.output == (2, SIZE, SIZE)
    assert two.devices[0].peak.activations_bytes > one.devices[0].peak.activations_bytes


def test_a_pipelines_own_tokenizers_are_used(tiny: Tiny) -> None:
    """What is on this machine needs no stand-in."""
    assert rehearsed(tiny.checked("sd3", {}), settings_of("sd3")).stand_ins == ()


def test_what_is_not_here_has_stand_ins_that_are_named(tmp_path: Path) -> None:
    """A pipeline of which only the packaged configs are here runs with stand-ins, and their names are told."""
    file = tmp_path / "sd.yaml"
    file.write_text("version: 1\npipeline: {source: stable-diffusion-v1-5/stable-diffusion-v1-5, dtype: float16}\n")
    rehearsal = rehearsed(check_file(file), Settings(height=64, width=64, steps=1), gpus=(8,))

    assert rehearsal.failure is None
    assert rehearsal.stand_ins == ("tokenizer", "feature_extractor")
    assert rehearsal.guesses == {"item": 20}  # 17 concepts and 3 that ask for special care


def test_what_the_safety_checker_is_told_is_counted(tiny: Tiny) -> None:
    """It asks for 20 values that do not exist; nothing else does."""
    assert rehearsed(tiny.checked("sd", {}), settings_of("sd")).guesses == {"item": 20}
    assert rehearsed(tiny.checked("sdxl", {}), settings_of("sdxl")).guesses == {}


def test_packaged_settings_reach_the_pipeline(tmp_path: Path) -> None:
    """Wan 2.2 knows from its index when to change denoisers: both run, one after the other."""
    file = tmp_path / "wan.yaml"
    file.write_text("version: 1\npipeline: {source: Wan-AI/Wan2.2-T2V-A14B-Diffusers, dtype: bfloat16}\n")
    checked = check_file(file)
    dtypes = {component.name: "bfloat16" for component in checked.assembly.modules}

    pipes, _stand_ins = build_skeletons(checked.resolved, checked.assembly, dtypes)
    pipe = pipes[PIPELINE]

    assert pipe.config.boundary_ratio == 0.875


# Capacity


FULL = [("sdxl", "text_encoder"), ("sdxl", "unet"), ("wan", "vae.decode")]


@pytest.mark.parametrize(("call", "phase"), FULL)
def test_a_device_that_is_too_small_is_full_in_the_right_phase(call: str, phase: str, tiny: Tiny) -> None:
    """With one byte less than a phase takes, that phase fails, and the module that asked for more is named."""
    checked, settings = tiny.checked(call, {"device_map": "cuda:0"}), settings_of(call)
    enough = rehearsed(checked, settings)
    taken = {each.phase: each.nbytes for each in enough.devices[0].phases}
    too_small, exactly = (inventory(cuda=(size / GIB,)) for size in (taken[phase] - 1, max(taken.values())))

    failure = rehearse(script_of(checked), enough.plan, too_small, settings).failure

    assert failure is not None
    assert failure.kind == "out of memory"
    assert failure.phase == phase
    assert failure.module.partition(".")[0] == phase.partition(".")[0]
    assert failure.devices == ("cuda:0",)
    assert rehearse(script_of(checked), enough.plan, exactly, settings).failure is None


# A film that is too short


def test_a_film_that_is_too_short_is_told(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan's VAE writes into lists it is given; hooks that copy them lose frames and raise nothing."""

    def hooked_once_more(pipe: Any, *args: Any, **options: Any) -> Any:
        result = dispatch(pipe, *args, **options)
        accelerate.dispatch_model(result.vae, {"": "cuda:0"}, force_hooks=True)
        return result

    monkeypatch.setattr(rehearsing, "dispatch", hooked_once_more)
    asked = Settings(height=SIZE, width=SIZE, frames=9, call={"max_sequence_length": LENGTH})

    rehearsal = rehearsed(tiny.checked("wan", {"device_map": "cuda:0"}), asked)

    assert rehearsal.failure is None
    assert rehearsal.odd_output == "9 frames were asked for, and what came out is 1 x 3 x 3 x 32 x 32"
    assert not rehearsal.fits


# Afterwards


@pytest.mark.parametrize("short_by", [0, 1], ids=["runs", "fails"])
def test_nothing_stays_patched(short_by: int, tiny: Tiny) -> None:
    """Whether it ran or failed, torch and the libraries are afterwards what they were."""
    checked, settings = tiny.checked("sdxl", {"device_map": "cuda:0"}), settings_of("sdxl")
    enough = rehearsed(checked, settings)
    machine = inventory(cuda=((enough.devices[0].peak.nbytes - short_by) / GIB,))
    before = what_is_patched()

    again = rehearse(script_of(checked), enough.plan, machine, settings)

    assert (again.failure is not None) == bool(short_by)
    assert what_is_patched() == before
    assert type(torch.ones(1) + torch.ones(1)) is torch.Tensor


def what_is_patched() -> list[dict[str, Any]]:
    """Return the contents of the modules and classes that a machine reaches into."""
    places = (torch.cuda, torch.accelerator, torch.Tensor, torch.nn.Module, torch, safetensors.torch, accelerate.hooks)
    levels = {"diffusers": diffusers.logging.get_verbosity(), "transformers": transformers.logging.get_verbosity()}
    return [*(dict(vars(place)) for place in places), levels]


# Wrong hops

Sabotage = Callable[[Any], None]
"""Takes something away from a placed pipeline."""


def carrier_of(pipe: Any, name: str) -> Any:
    return placed(pipe).components[name].carrier


def placed(pipe: Any) -> placement.Placement:
    found = placement.placement_of(pipe)
    assert found is not None
    return found


def not_carried(*names: str) -> Sabotage:
    """Take a component's carrier away."""

    def take_away(pipe: Any) -> None:
        for name in names:
            carrier_of(pipe, name).detach()

    return take_away


def not_carried_home(name: str) -> Sabotage:
    """Leave what a component returns where it ran."""

    def take_away(pipe: Any) -> None:
        carrier = carrier_of(pipe, name)
        carrier.home = carrier.device

    return take_away


def not_bridged(name: str, entry: str) -> Sabotage:
    """Take the carrier from one way into a component, and from the submodules that are entered through it."""

    def take_away(pipe: Any) -> None:
        carrier = carrier_of(pipe, name)
        del vars(carrier.module)[entry]
        for handle in carrier._handles:
            handle.remove()

    return take_away


def moved(path: str, device: str) -> Sabotage:
    """Move one module's own tensors to another device."""

    def move(pipe: Any) -> None:
        name, _, inner = path.partition(".")
        getattr(pipe, name).get_submodule(inner).to(device)

    return move


def unhooked(path: str) -> Sabotage:
    """Take accelerate's hook from one module, which leaves its weights where they rest."""

    def unhook(pipe: Any) -> None:
        name, _, inner = path.partition(".")
        module = getattr(pipe, name).get_submodule(inner)
        del module._hf_hook
        module.forward = module._old_forward

    return unhook


def not_brought(name: str) -> Sabotage:
    """Carry what goes into a component to its device, and leave its weights at home."""

    def leave(pipe: Any) -> None:
        carrier_of(pipe, name).weights.bring = lambda: None

    return leave


def works_elsewhere(device: str) -> Sabotage:
    """Let the pipeline take another device for the one it works on."""

    def move(pipe: Any) -> None:
        placed(pipe).home = torch.device(device)

    return move


def parts_not_met(name: str) -> Sabotage:
    """Take away what stands before the parts of a split component, and what lets tensors of two parts meet."""

    def take_away(pipe: Any) -> None:
        weights = carrier_of(pipe, name).weights
        for handle in weights._handles:
            handle.remove()
        weights.bring = lambda: None

    return take_away


ONE_ALONE = {"device_map": {"unet": "cuda:0", "default": "cuda:1"}}
TRANSFORMER_ALONE = {"device_map": {"transformer": "cuda:0", "default": "cuda:1"}}
BY_LAYER = {"device_map": "cuda:0", "low_memory": "sequential_cpu_offload"}
BROUGHT = {"device_map": "cuda:0", "low_memory": "cpu_offload_with_hook"}
HALVES = {"device_map": {"unet.mid_block": "cuda:1", "default": "cuda:0"}}
ELSEWHERE = {"device_map": "cuda:0", "execution_device": "cuda:1"}

WRONG_HOPS: Mapping[str, tuple[str, Mapping[str, Any], Sabotage, str, str, str]] = {
    "text encoder without its carrier": (
        "sd", ONE_ALONE, not_carried("text_encoder"), "text_encoder", "cuda:0", "cuda:1",
    ),
    "decoder without its carrier": ("sd", ONE_ALONE, not_carried("vae"), "vae", "cuda:0", "cuda:1"),
    "safety checker without its carrier": (
        "sd", ONE_ALONE, not_carried("safety_checker"), "safety_checker", "cuda:0", "cuda:1",
    ),
    "second text encoder without its carrier": (
        "sdxl", ONE_ALONE, not_carried("text_encoder_2"), "", "cuda:0", "cuda:1",
    ),
    "encoder without its carrier": ("sd-img2img", ONE_ALONE, not_carried("vae"), "vae", "cuda:0", "cuda:1"),
    "film decoder without its carrier": ("ltx", TRANSFORMER_ALONE, not_carried("vae"), "vae", "cuda:0", "cuda:1"),
    "prior without its carrier": (
        "kandinsky22", ONE_ALONE, not_carried("prior_prior"), "prior_prior", "cuda:0", "cuda:1",
    ),
    "controlnet without its carrier": (
        "controlnet", ONE_ALONE, not_carried("controlnet"), "controlnet", "cuda:0", "cuda:1",
    ),
    "decode not bridged": ("sd", ONE_ALONE, not_bridged("vae", "decode"), "vae", "cuda:0", "cuda:1"),
    "encode not bridged": ("sd-inpaint", ONE_ALONE, not_bridged("vae", "encode"), "vae", "cuda:0", "cuda:1"),
    "residuals not carried home": (
        "controlnet", ONE_ALONE, not_carried_home("controlnet"), "unet", "cuda:0", "cuda:1",
    ),
    "latents not carried home": ("sdxl-img2img", ONE_ALONE, not_carried_home("vae"), "", "cuda:0", "cuda:1"),
    "noise not carried home": ("sdxl", ELSEWHERE, not_carried_home("unet"), "", "cuda:0", "cuda:1"),
    "one convolution elsewhere": (
        "sd", ONE_ALONE, moved("unet.conv_in", "cuda:1"), "unet.conv_in", "cuda:0", "cuda:1",
    ),
    "one norm of the decoder elsewhere": (
        "sd", ONE_ALONE, moved("vae.decoder.conv_norm_out", "cuda:0"), "vae.decoder.conv_norm_out", "cuda:0", "cuda:1",
    ),
    "one table elsewhere": (
        "sd3", TRANSFORMER_ALONE, moved("transformer.pos_embed", "cuda:1"), "transformer.pos_embed", "cuda:0", "cuda:1",
    ),
    "one layer on the host": (
        "flux", {"device_map": "cuda:0"}, moved("transformer.proj_out", "cpu"), "transformer.proj_out", "cuda:0", "cpu",
    ),
    "one layer without its hook": ("sd", BY_LAYER, unhooked("unet.conv_in"), "unet.conv_in", "cuda:0", "meta"),
    "weights not brought": ("sd", BROUGHT, not_brought("vae"), "vae", "cuda:0", "cpu"),
    "parts that nothing stands before": ("sd", HALVES, parts_not_met("unet"), "unet.mid_block", "cuda:0", "cuda:1"),
    "the pipeline works elsewhere": (
        "sdxl", {"device_map": "cuda:0"}, works_elsewhere("cuda:1"), "unet", "cuda:0", "cuda:1",
    ),
}  # fmt: skip
"""Call, placement, what is taken away, where it is noticed, and the two devices that meet."""


@pytest.mark.parametrize("hop", WRONG_HOPS)
def test_a_wrong_hop_is_caught_and_named(hop: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placement that would fail on real devices fails here: both devices are named, and the module they met in."""
    call, overrides, take_away, module, *meeting = WRONG_HOPS[hop]
    checked, settings = tiny.checked(call, overrides), settings_of(call)
    assert tiny.runs(call, overrides)

    def half_placed(pipe: Any, *args: Any, **options: Any) -> Any:
        result = dispatch(pipe, *args, **options)
        take_away(result)
        return result

    monkeypatch.setattr(rehearsing, "dispatch", half_placed)
    failure = rehearsed(checked, settings).failure

    assert failure is not None
    assert failure.kind == "wrong device"
    assert failure.module.startswith(module)
    assert failure.operation
    assert set(failure.devices) == set(meeting)
    assert all(device in failure.what for device in meeting)
