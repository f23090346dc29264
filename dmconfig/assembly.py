"""What a pipeline is made of: the spec laid over its source, as one list of components.

An ``Assembly`` is what measuring, planning and building work from. Making one reads small JSON files and the facts
of classes; it reads no weights, asks no machine, and imports neither torch nor diffusers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmconfig.adapters import Adapter
from dmconfig.facts import ClassFacts, PipelineFacts, is_module_class
from dmconfig.inputs import SEED, Argument, arguments_at
from dmconfig.paths import ConfigPath
from dmconfig.remote_code import OwnCode
from dmconfig.source import Source
from dmconfig.spec import ComponentSpec, QuantizationSpec, Spec

if TYPE_CHECKING:
    from dmconfig.original_config import OriginalConfig

PIPELINE = "pipeline"
"""What the pipeline of the file is called beside those of ``pipelines``."""
DENOISER_NAMES = ("transformer", "unet", "prior", "decoder", "dit")
"""What diffusers calls the model that runs once per step, most usual first."""
_ENCODING = ("text_encoder", "image_encoder", "text_encoder_2", "notes_encoder", "continuous_encoder", "vae_encoder")
_DECODING = ("vae", "vq", "movq", "vocoder", "melgan")
"""What components are called that run before the denoiser, and after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component that will be loaded.

    ``folder`` holds its config and weights, or is None for a hub source of which that is not on this machine yet.
    ``subfolder`` is the one asked for; None leaves it to the kind of source. Where ``source`` is one file of weights,
    ``config_source`` is where its config comes from, and ``folder`` holds that; ``shares_file``: the file is the
    pipeline's, with the weights of others. ``code``: its class is in code of its source, which the file grants.
    ``original_config``: its config is made from that of the model's authors, and ``folder`` is None.
    ``variant_required`` tells a variant asked for this component from one asked for the whole pipeline, which
    components without such files do without. ``path`` is where the file speaks of it. ``takes_in`` is another
    component whose weights the pipeline's constructor copies into this one.
    """

    name: str
    library: str
    class_name: str
    facts: ClassFacts = field(repr=False)
    source: Source
    folder: Path | None
    subfolder: str | None = None
    variant: str | None
    variant_required: bool
    dtype: str
    config: Mapping[str, Any] | None = None
    path: ConfigPath
    asked: ComponentSpec = field(default_factory=ComponentSpec.model_construct, repr=False)
    quantization: QuantizationSpec | None = None
    parts: tuple[Component, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    takes_in: str | None = None
    config_source: Source | None = None
    shares_file: bool = False
    allows_pickle: bool = False
    allows_code: bool = False
    code: OwnCode | None = field(default=None, repr=False)
    original_config: OriginalConfig | None = field(default=None, repr=False)

    @property
    def home(self) -> Source:
        """Where its config comes from."""
        return self.config_source or self.source

    @property
    def name_there(self) -> str:
        """What it is called where it comes from: the folder that it is in there."""
        return self.subfolder or self.name

    @property
    def is_single_file(self) -> bool:
        """Whether its weights are in one file, by itself or with those of others, and not beside its config."""
        return self.source.file is not None

    @property
    def is_module(self) -> bool:
        """Whether it has weights, and so a place."""
        return is_module_class(self.facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """One more pipeline on the components of an assembly."""

    name: str
    facts: PipelineFacts = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A component that the blocks of a modular pipeline make, of the class and with the values that the file gives.

    ``class_name`` is None for the class that the blocks have.
    """

    name: str
    class_name: str | None
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A pipeline class and its components, in the order of its signature; ``absent`` are optional ones left out.

    ``sharing`` are the other pipelines made of them; components that only those have come last. ``made`` are those
    that a modular pipeline makes itself and the file changes. ``code``: the class is in code of a source, which the
    file grants.
    """

    class_name: str
    source: Source
    facts: PipelineFacts = field(repr=False)
    components: tuple[Component, ...]
    absent: tuple[str, ...]
    config: Mapping[str, Any]
    sharing: tuple[Sharing, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    made: tuple[Made, ...] = ()
    code: OwnCode | None = field(default=None, repr=False)

    @property
    def own_code(self) -> Iterator[OwnCode]:
        """The code that its sources bring along: that of the pipeline's class, then those of components."""
        yield from (each for each in (self.code, *(part.code for part in self.loaded)) if each is not None)

    def facts_of(self, pipeline: str) -> PipelineFacts:
        """Return the facts of one of its pipelines: ``PIPELINE`` or the name of another."""
        return next((each.facts for each in self.sharing if each.name == pipeline), self.facts)

    def call_of(self, spec: Spec, pipeline: str) -> dict[str, Argument]:
        """Return the arguments that the file gives to the call of one of its pipelines.

        Of another than the first: its own, and those of the first that its class takes.
        """
        first = arguments_at(("call",), spec.call)
        if pipeline == PIPELINE:
            return first
        taken = {SEED, *(parameter.name for parameter in self.facts_of(pipeline).call)}
        own = arguments_at(("pipelines", pipeline, "call"), spec.pipelines[pipeline].call)
        return {**{name: argument for name, argument in first.items() if name in taken}, **own}

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of components that its pipelines can have."""
        classes = (self.facts, *(each.facts for each in self.sharing))
        return tuple(dict.fromkeys(slot.name for facts in classes for slot in facts.slots))

    @property
    def loaded(self) -> Iterator[Component]:
        """What is loaded one by one: the components, and of those that are several models each of them."""
        for component in self.components:
            yield from component.parts or (component,)

    @property
    def modules(self) -> tuple[Component, ...]:
        """The components that have weights, and so a place."""
        return tuple(component for component in self.components if component.is_module)

    @property
    def in_turn(self) -> tuple[str, ...]:
        """The components that run one after the other, each done before the next, as the class says of itself.

        Others, such as a controlnet, run within another's phase. A class that says nothing is taken to run all of
        them, in ``assumed_order``.
        """
        return self.facts.model_cpu_offload_seq or assumed_order(component.name for component in self.modules)

    @property
    def denoiser(self) -> str:
        """The component that runs once per step: its device is where latents and embeddings live."""
        names = [component.name for component in self.modules]
        return next((name for name in DENOISER_NAMES if name in names), names[-1] if names else "")


def assumed_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return components in the order in which they are taken to run where their pipeline's class does not say.

    A prior comes before what it is for; what encodes before the denoiser, and that before what decodes. Within these
    they keep their order.
    """

    def rank(name: str) -> tuple[bool, int]:
        own = name.removeprefix("prior_")
        is_encoder = own.endswith(_ENCODING) or own.startswith(_ENCODING)
        return not name.startswith("prior_"), 0 if is_encoder else 2 if own.startswith(_DECODING) else 1

    return tuple(sorted(names, key=rank))


def order_notes(assembly: Assembly) -> Iterator[str]:
    """Yield a remark on the order of the components, where it is assumed."""
    if assembly.facts.model_cpu_offload_seq is None and len(assembly.in_turn) > 1:
        order = ", ".join(assembly.in_turn)
        yield f"{assembly.class_name} does not say in which order its components run; taken to be: {order}"


def left_out_notes(assembly: Assembly) -> Iterator[str]:
    """Yield a remark on what a modular pipeline is loaded without: which of its parts a call needs, the call tells."""
    names = [name for name in assembly.absent if name not in assembly.facts.made]
    if assembly.facts.is_modular and names:
        yield f"without {', '.join(names)}, for which the source names nothing: a call that needs one will fail"
