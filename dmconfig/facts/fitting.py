"""May this class be given for that component?

diffusers only warns about a class that its annotation does not name, and not at all for schedulers and
tokenizers. These rules accept what upstream's own checkpoints and documentation use, and nothing else: a
class that does not fit is almost always a component under the wrong name.
"""

from __future__ import annotations

from dmconfig.facts.lookup import class_facts
from dmconfig.facts.records import ClassFacts, ComponentSlot

_STAND_INS = {
    "AutoencoderKL": ("AsymmetricAutoencoderKL", "AutoencoderTiny", "ConsistencyDecoderVAE"),
}
"""Annotated class -> classes that upstream's documentation puts in its place."""

_INTERCHANGEABLE = frozenset({"SchedulerMixin", "PreTrainedTokenizerBase"})
"""Where one descendant of these is annotated, upstream's loader takes any."""

_KINDS = (
    "SchedulerMixin",
    "PreTrainedTokenizerBase",
    "ProcessorMixin",
    "ImageProcessingMixin",
    "FeatureExtractionMixin",
    "PreTrainedModel",
    "ModelMixin",
)
"""Base classes that tell what sort of component a class is."""

_LOADS = {
    "AutoTokenizer": "PreTrainedTokenizerBase",
    "AutoProcessor": "ProcessorMixin",
    "AutoImageProcessor": "ImageProcessingMixin",
    "AutoFeatureExtractor": "FeatureExtractionMixin",
}
"""transformers' classes that load some class of a kind; every ``AutoModel...`` loads a PreTrainedModel."""


def fits(slot: ComponentSlot, facts: ClassFacts) -> bool:
    """Return whether a component of the class may be given for slot.

    It may when the slot names no types; when the class or an ancestor is one of them; when both are
    schedulers, or both tokenizers; when one is an ``Auto...`` class that loads the other's kind; when both are
    image processors of one family (``CLIPImageProcessor``, ``CLIPImageProcessorFast``); and when the class
    is a documented stand-in.
    """
    return not slot.types or any(_fits_type(annotated, facts) for annotated in slot.types)


def _fits_type(annotated: str, facts: ClassFacts) -> bool:
    return (
        annotated in facts.ancestors
        or facts.class_name in _STAND_INS.get(annotated, ())
        or _same_image_processor(annotated, facts)
        or _same_kind(annotated, facts)
    )


def _same_image_processor(annotated: str, facts: ClassFacts) -> bool:
    return "ImageProcessingMixin" in facts.ancestors and _family(annotated) == _family(facts.class_name)


def _family(name: str) -> str:
    """Return an image processor's name without what tells its implementations apart."""
    return name.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")


def _same_kind(annotated: str, facts: ClassFacts) -> bool:
    """Return whether class and annotation are of one kind, where the kind alone decides."""
    given = _kind_of(facts)
    if given is None or given != _kind_of_name(annotated):
        return False
    return given in _INTERCHANGEABLE or _loads(facts.class_name) == given or _loads(annotated) == given


def _kind_of(facts: ClassFacts) -> str | None:
    if (loaded := _loads(facts.class_name)) is not None:
        return "ModelMixin" if facts.library == "diffusers" else loaded
    return next((kind for kind in _KINDS if kind in facts.ancestors), None)


def _kind_of_name(annotated: str) -> str | None:
    if annotated == "KarrasDiffusionSchedulers":  # an enumeration of scheduler classes
        return "SchedulerMixin"
    if (loaded := _loads(annotated)) is not None:
        return loaded
    facts = class_facts("diffusers", annotated) or class_facts("transformers", annotated)
    return None if facts is None else _kind_of(facts)


def _loads(name: str) -> str | None:
    """Return the base of the classes that an ``Auto...`` class loads; None for any other class."""
    return "PreTrainedModel" if name.startswith("AutoModel") else _LOADS.get(name)
