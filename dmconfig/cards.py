"""Accelerators that are sold, by name: what one may state of a machine one does not have instead of figures.

The figures and where they come from stand in ``data/cards.yaml``. It is read when something names a card, or when a
probe has found an accelerator, and not before: start-up is a feature.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmconfig.document import parse_document
from dmconfig.errors import nearest
from dmconfig.files import DATA
from dmconfig.rates import parse_bandwidth, parse_flops
from dmconfig.units import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One accelerator: what torch calls it, its kind of device, its memory and its speeds.

    ``memory_bytes`` is None when it shares the host's memory. A speed of None is not known; the default of its kind
    holds. ``peer_bytes_per_s`` is of a link between two of them that does not go over PCIe (NVLink, for example).
    """

    name: str
    reported: tuple[str, ...]
    kind: str
    memory_bytes: int | None
    flops_per_s: int | None
    host_bytes_per_s: int | None
    peer_bytes_per_s: int | None

    @property
    def shares_host(self) -> bool:
        """Whether its memory is the host's."""
        return self.memory_bytes is None


def find_card(name: str) -> Card | None:
    """Return the card of this name, in capitals or not; None when none has it."""
    return _cards().get(name.strip().lower())


def card_reported_as(description: str) -> Card | None:
    """Return the card that torch calls by this name; None for one that is not known here."""
    return next((card for card in _cards().values() if description in card.reported), None)


def card_names() -> tuple[str, ...]:
    """Return the names of all cards, sorted."""
    return tuple(sorted(_cards()))


def unknown_card(name: str) -> tuple[str, str]:
    """Return (which cards there are, the one that was most likely meant or nothing), to say of a name that is none."""
    near = [known for known in card_names() if known.startswith(f"{name.strip().lower()}-")]
    meant = near or [known for known in [nearest(name, card_names())] if known]
    fix = f"did you mean {' or '.join(map(repr, meant))}?" if meant else ""
    return f"known cards: {', '.join(card_names())}", fix


@functools.cache
def _cards() -> Mapping[str, Card]:
    text = (DATA / "cards.yaml").read_text(encoding="utf-8")
    entries = parse_document(text, name="cards.yaml", folder=Path()).data
    return {name: _card(name, facts) for name, facts in entries.items()}


def _card(name: str, facts: dict[str, Any]) -> Card:
    return Card(
        name=name,
        reported=tuple(facts["reported"]),
        kind=facts.get("kind", "cuda"),
        memory_bytes=parse_size(facts["memory"]) if "memory" in facts else None,
        flops_per_s=parse_flops(facts["flops"]) if "flops" in facts else None,
        host_bytes_per_s=parse_bandwidth(facts["host"]) if "host" in facts else None,
        peer_bytes_per_s=parse_bandwidth(facts["peer"]) if "peer" in facts else None,
    )
