"""The adapters on a live pipeline: what is on it and how much of it, and the files they are from where known.

What is on a pipeline can be seen: names, scales, words. Files cannot. Of what dmconfig put on, they are remembered; of
all else an entry stands in the file with a variable for its source, which has to be set before the file loads.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dmconfig.adapters import Adapter, changed_components
from dmconfig.assembly import DENOISER_NAMES
from dmconfig.export.remembered import LoadedAs, lora_configs
from dmconfig.export.sources import Home, home_of, noted_home
from dmconfig.provenance import as_written
from dmconfig.spec import AdapterSpec, IpAdapterSpec, LoraSpec, TextualInversionSpec
from dmconfig.weights import read_header
from dmconfig.writing import Verbatim

Entry = dict[str, Any]
_VECTOR = re.compile(r"(.+)_[1-9][0-9]*")


def adapters_of(pipe: Any, loaded: LoadedAs | None, beside: Path | None, unknown: list[str]) -> dict[str, list[Entry]]:
    """Return the section ``adapters`` of a pipeline; ``unknown`` gathers what cannot be seen, one sentence each.

    ``loaded`` is what dmconfig remembers of the pipeline, None for one of others; paths are written for a file in
    ``beside``, or in full where that is None.
    """
    adapters = _Adapters(pipe=pipe, loaded=loaded, beside=beside, unknown=unknown)
    sections = {
        "lora": [*adapters.fused(), *adapters.loras()],
        "textual_inversion": [*adapters.words()],
        "ip_adapter": [*adapters.pictures()],
    }
    return {name: entries for name, entries in sections.items() if entries}


def is_made_by_ip_adapter(pipe: Any, name: str) -> bool:
    """Tell whether a component is the image processor that diffusers makes where an IP-Adapter finds none."""
    processor = getattr(pipe, name)
    if name != "feature_extractor" or not any(_projections(pipe)) or not hasattr(processor, "to_dict"):
        return False
    encoder = getattr(pipe, "image_encoder", None)
    size = encoder.config.image_size if encoder is not None else 224
    return bool(type(processor)(size=size, crop_size=size).to_dict() == processor.to_dict())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapters:
    pipe: Any
    loaded: LoadedAs | None
    beside: Path | None
    unknown: list[str]
    _variables: set[str] = field(default_factory=set)

    def loras(self) -> Iterator[Entry]:
        """Yield the LoRAs that are layers beside the weights, in the order in which they were put on."""
        parts = {name: part for name, part in self.pipe.components.items() if isinstance(part, torch.nn.Module)}
        configs = lora_configs(parts)
        for name in dict.fromkeys(name for _, name in configs):
            on = [component for component, each in configs if each == name]
            ours = self._known_loras(name) if any(self._is_ours(key, configs) for key in configs) else []
            known = ours[0] if ours and all(self._is_ours((part, name), configs) for part in on) else None
            source = self._source(known, f"{name}_lora", f"the LoRA {name} on {', '.join(on)}")
            layers = [layer for part in on for layer in _layers(parts[part], name)]
            is_fused = any(name in layer.merged_adapters for layer in layers)
            weight = self._weight(name, layers)
            yield source | {"name": name, "weight": weight} | ({"fused": True} if is_fused else {})

    def _is_ours(self, key: tuple[str, str], configs: Mapping[tuple[str, str], Any]) -> bool:
        return self.loaded is not None and self.loaded.loras.get(key) is configs.get(key)

    def _known_loras(self, name: str) -> list[Adapter]:
        return [each for each in self._of_kind(LoraSpec) if each.name == name and not each.is_fused]

    def _weight(self, name: str, layers: Iterable[Any]) -> float:
        """How much of a LoRA is added; 0 where it is switched off."""
        weights = Counter(_weight_in(layer, name) for layer in layers)
        if len(weights) > 1:
            shown = ", ".join(map(str, sorted(weights)))
            self.unknown.append(f"how much of the LoRA {name} is added: its layers have {shown}, and a file has one")
        return weights.most_common(1)[0][0] if weights else 1.0

    def fused(self) -> Iterator[Entry]:
        """Yield the LoRAs that are in the weights, and no layers any more."""
        known = [each for each in self._of_kind(LoraSpec) if each.is_fused]
        for adapter in known:
            there = self._parts_still_there(adapter)
            if any(there.values()):
                yield self._source(adapter, "", "") | _said(adapter.spec, "name", "weight", "fused")
            if len({*there.values()}) > 1:
                gone = ", ".join(name for name, is_there in there.items() if not is_there)
                self.unknown.append(f"how to fuse the LoRA {adapter.name} without {gone}, which is another by now")
        parts = {name: part for name, part in self.pipe.components.items() if isinstance(part, torch.nn.Module)}
        layers = {name for _, name in lora_configs(parts)}
        for name in sorted({*getattr(self.pipe, "fused_loras", ())} - layers - {each.name for each in known}):
            yield self._source(None, f"{name}_lora", f"the LoRA {name}, fused into the weights") | {
                "name": name, "fused": True,
            }  # fmt: skip
            self.unknown.append(f"how much of the LoRA {name} was fused; 1 is written")

    def _parts_still_there(self, adapter: Adapter) -> dict[str, bool]:
        """The components that an adapter has changed, and whether each is still the one that was loaded."""
        assert self.loaded is not None  # noqa: S101 - the caller has an adapter of it
        modules = [component.name for component in self.loaded.assembly.modules]
        denoiser = next((name for name in DENOISER_NAMES if name in modules), "")
        changed = {name for name, _ in changed_components([adapter], modules, denoiser)}
        return {name: self.loaded.has(name, self.pipe.components.get(name)) for name in sorted(changed)}

    def words(self) -> Iterator[Entry]:
        """Yield the words that tokenizers have beyond those of their source."""
        added = dict.fromkeys(word for name in self.pipe.components for word in _added_words(self.pipe, name))
        known = {word: each for each in self._of_kind(TextualInversionSpec) for word in _words_of(each)}
        for word in added:
            vector = _VECTOR.fullmatch(word)
            if vector is None or vector.group(1) not in added:  # else one more vector of a word
                source = self._source(known.get(word), f"{word}_embedding", f"the textual inversion {word}")
                yield source | {"token": word}

    def pictures(self) -> Iterator[Entry]:
        """Yield the IP-Adapters of the denoiser."""
        known = self._of_kind(IpAdapterSpec)
        for denoiser, count in _projections(self.pipe):
            ours = known if self.loaded and self.loaded.has(denoiser, getattr(self.pipe, denoiser)) else []
            for index in range(count):
                adapter = ours[index] if len(ours) == count else None
                number = f"_{index + 1}" if count > 1 else ""
                source = self._source(adapter, f"ip_adapter{number}", f"the IP-Adapter {index + 1} on {denoiser}")
                yield source | {"scale": self._scale(denoiser, index)}

    def _scale(self, denoiser: str, index: int) -> float:
        processors = getattr(self.pipe, denoiser).attn_processors.values()
        scales = [each.scale for each in processors if "IPAdapter" in type(each).__name__]
        found = Counter(float(each[index] if isinstance(each, list) else each) for each in scales)
        if len(found) > 1:
            shown = ", ".join(map(str, sorted(found)))
            self.unknown.append(f"how much of IP-Adapter {index + 1} is followed: {shown}, by layer; a file has one")
        return found.most_common(1)[0][0] if found else 1.0

    def _of_kind(self, kind: type[AdapterSpec]) -> list[Adapter]:
        adapters = self.loaded.assembly.adapters if self.loaded is not None else ()
        return [each for each in adapters if isinstance(each.spec, kind)]

    def _source(self, adapter: Adapter | None, variable: str, what: str) -> Entry:
        """The keys that name an adapter's file; where it is not known, a variable, and the sentence that says so."""
        if adapter is not None and adapter.file is not None:
            return _file_keys(home_of(str(adapter.file.parent)), adapter.file, self.beside)
        self.unknown.append(f"the file of {what}")
        name = _variable(variable, self._variables)
        self._variables.add(name)
        return {"source": Verbatim(f"${{{name}:?the file of {what.replace('}', '')} is not known}}", is_text=True)}


def _file_keys(home: Home | None, file: Path, beside: Path | None) -> Entry:
    if home is None or home.hub_id is None:
        return {"source": str(file) if beside is None else as_written(file, beside)}
    return {**home.keys(beside), "weight_name": file.name}


def _variable(words: str, taken: set[str]) -> str:
    """A name for a variable that no other has."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", words).strip("_").upper()
    name = f"ADAPTER_{name}" if not name or name[0].isdigit() else name
    return next(each for each in (name, *(f"{name}_{n}" for n in range(2, len(taken) + 3))) if each not in taken)


def _said(spec: AdapterSpec, *keys: str) -> Entry:
    return {key: getattr(spec, key) for key in keys if key in spec.model_fields_set}


def _layers(module: torch.nn.Module, adapter: str) -> Iterator[Any]:
    for part in module.modules():
        if hasattr(part, "merged_adapters") and adapter in getattr(part, "scaling", {}):
            yield part


def _weight_in(layer: Any, name: str) -> float:
    """The factor by which a layer of a LoRA is scaled beyond its own ratio of alpha to rank."""
    merged = name in layer.merged_adapters
    if not merged and (layer.disable_adapters or name not in layer.active_adapters):
        return 0.0
    alphas = getattr(layer, "lora_alpha", None) or layer.alpha
    rank = layer.r[name]
    rank = math.sqrt(rank) if getattr(layer, "use_rslora", {}).get(name) else rank
    return float(f"{layer.scaling[name] * rank / alphas[name]:.12g}")


def _added_words(pipe: Any, name: str) -> Iterator[str]:
    tokenizer = getattr(pipe, name)
    if not name.startswith("tokenizer") or not hasattr(tokenizer, "get_added_vocab"):
        return
    added = {*tokenizer.get_added_vocab()} - {*tokenizer.all_special_tokens}
    home = noted_home(tokenizer) if added else None
    if home is not None:
        own = type(tokenizer).from_pretrained(str(home.folder), local_files_only=True).get_added_vocab()
        yield from sorted(added - {*own}, key=tokenizer.get_added_vocab().__getitem__)


def _words_of(adapter: Adapter) -> Iterator[str]:
    """The words that a file of a textual inversion may stand for."""
    yield adapter.name
    if isinstance(adapter.spec, TextualInversionSpec) and adapter.spec.token is None and adapter.file is not None:
        yield from (tensor.name for tensor in read_header(adapter.file))


def _projections(pipe: Any) -> Iterator[tuple[str, int]]:
    """The denoiser that has IP-Adapters, and how many."""
    for name in DENOISER_NAMES:
        model = getattr(pipe, name, None)
        several = getattr(getattr(model, "encoder_hid_proj", None), "image_projection_layers", None)
        if several is not None:
            yield name, len(several)
        elif getattr(model, "image_proj", None) is not None:
            yield name, 1
