"""Tokenizers and processors for pipelines whose own are not on this machine: small real integers of the right shape.

A rehearsal asks a tokenizer for ids and masks and looks at nothing but their shapes, and, where a pipeline indexes
with a mask, at which of them are padding. So any words will do, as long as there are as many tokens as a real one
makes: pipelines cut fixed numbers of template tokens off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BatchEncoding, BatchFeature

_PIECES = re.compile(r"<\|[^|>]*\|>|</?[a-z_]+>|\[/?[A-Z_]+\]|\w+|[^\w\s]|\n+")
_WORD = 8  # letters up to which a word is one token; a longer one is cut into sixes
_CUT = 6
_RESERVED_IDS = 3
_CLIP_LENGTH = 77
_PICTURE_SIDE = 224  # pixels, of CLIP's vision encoder


class StandInTokenizer:
    """Answers like a tokenizer of transformers, or like a processor around one."""

    added_tokens_encoder: Mapping[str, int] = {}
    all_special_ids: Sequence[int] = ()

    def __init__(
        self, vocabulary: int, *, begin: int | None, end: int | None, padding: int, length: int, side: str = "right"
    ) -> None:
        self.vocab_size, self.model_max_length, self.padding_side = vocabulary, length, side
        self.bos_token_id, self.eos_token_id, self.pad_token_id = begin, end, padding
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = "<s>", "</s>", "<pad>", "<unk>"
        self.tokenizer = self  # of a processor

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(  # noqa: PLR0917 - as transformers has it
        self,
        text: str | Sequence[str] | None = None,
        text_pair: Any = None,  # noqa: ARG002 - as transformers has it
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = True,
        **_ignored: Any,
    ) -> BatchEncoding:
        """Return ids and masks, as lists or, for ``pt``, as tensors on the host."""
        texts = [text] if isinstance(text, str) else list(text or ())
        rows = [self.encode(each, add_special_tokens) for each in texts]
        most = max_length or self.model_max_length
        if truncation:
            rows = [row if len(row) <= most else [*row[: most - 1], row[-1]] for row in rows]
        length = most if padding == "max_length" else max(map(len, rows), default=0) if padding else None
        encoded = {"input_ids": [self._padded(row, length, self.pad_token_id) for row in rows]}
        if return_attention_mask is not False:
            encoded["attention_mask"] = [self._padded([1] * len(row), length, 0) for row in rows]
        if return_tensors == "pt":
            return BatchEncoding({name: torch.tensor(ids, dtype=torch.long) for name, ids in encoded.items()})
        return BatchEncoding({name: ids[0] for name, ids in encoded.items()} if isinstance(text, str) else encoded)

    def tokenize(self, text: str, **_ignored: Any) -> list[str]:
        """Return the pieces of a text: words, cut where they are long, marks, and special tokens whole."""
        found = _PIECES.findall(text)
        return [
            piece[start : start + _CUT] if len(piece) > _WORD and piece[0] not in "<[" else piece
            for piece in found
            for start in (range(0, len(piece), _CUT) if len(piece) > _WORD and piece[0] not in "<[" else (0,))
        ]

    def encode(self, text: str, add_special_tokens: bool = True, **_ignored: Any) -> list[int]:
        """Return an id per piece, between those of begin and end."""
        ids = [self._id(piece) for piece in self.tokenize(text)]
        begin = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        end = [self.eos_token_id] if add_special_tokens and self.eos_token_id is not None else []
        return [*begin, *ids, *end]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        """Return the ids of pieces."""
        return self._id(tokens) if isinstance(tokens, str) else [self._id(token) for token in tokens]

    def decode(self, *_args: Any, **_ignored: Any) -> str:
        """Return no text: ids mean nothing here."""
        return ""

    def batch_decode(self, ids: Sequence[Any], *_args: Any, **_ignored: Any) -> list[str]:
        """Return no texts."""
        return [""] * len(ids)

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """Return conversations as texts, or as ids of texts."""
        is_batch = isinstance(messages[0], list)
        texts = [_conversation(each, add_generation_prompt) for each in (messages if is_batch else [messages])]
        if not tokenize:
            return texts if is_batch else texts[0]
        encoded = self(texts, **options)
        return encoded if return_dict else encoded["input_ids"]

    def _id(self, piece: str) -> int:
        number: int = sum(ord(letter) * int(31 ** (index % 5)) for index, letter in enumerate(piece))
        return _RESERVED_IDS + number % (self.vocab_size // 2)

    def _padded(self, row: list[int], length: int | None, filler: int) -> list[int]:
        padding = [filler] * max(0, (length or 0) - len(row))
        return [*row, *padding] if self.padding_side == "right" else [*padding, *row]


class StandInImageProcessor:
    """Answers like an image processor of transformers: as many black pictures as it is given."""

    def __init__(self, size: int = _PICTURE_SIDE) -> None:
        self.size, self.crop_size = {"shortest_edge": size}, {"height": size, "width": size}

    def __call__(self, images: Any = None, **_ignored: Any) -> BatchFeature:
        """Return ``pixel_values`` of zeros."""
        count = len(images) if hasattr(images, "__len__") and not hasattr(images, "mode") else 1
        return BatchFeature({"pixel_values": torch.zeros(count, 3, *self.crop_size.values())})


def stand_in_for(class_name: str, config: Any) -> Any:
    """Return what stands in for a tokenizer or processor of a class, given the config of the encoder it feeds.

    Raises: KeyError: nothing is known of such a class.
    """
    vocabulary = getattr(config, "vocab_size", None)
    if class_name.startswith("CLIPTokenizer"):
        end = getattr(config, "eos_token_id", None)
        end = 49407 if end in (None, 2) else end  # 2 is what old configs say, and their models do not go by it
        length = min(getattr(config, "max_position_embeddings", _CLIP_LENGTH), _CLIP_LENGTH)
        return StandInTokenizer(49408, begin=49406, end=end, padding=end, length=length)
    if class_name.endswith(("ImageProcessor", "FeatureExtractor")):
        size = getattr(getattr(config, "vision_config", config), "image_size", None)
        return StandInImageProcessor(size if isinstance(size, int) else _PICTURE_SIDE)
    for prefix, (known, begin, end, padding, length, side) in _FAMILIES.items():
        if class_name.startswith(prefix):
            size = min(vocabulary or known, known)
            return StandInTokenizer(size, begin=begin, end=end, padding=padding, length=length, side=side)
    raise KeyError(class_name)


_FAMILIES: Mapping[str, tuple[int, int | None, int | None, int, int, str]] = {
    "T5Tokenizer": (32128, None, 1, 0, 512, "right"),
    "LlamaTokenizer": (128000, 1, 2, 0, 2048, "right"),
    "PreTrainedTokenizer": (128000, 1, 2, 0, 2048, "right"),
    "Gemma": (256000, 2, None, 0, 8192, "right"),
    "Qwen2": (151643, None, None, 151643, 131072, "right"),
    "Qwen3": (151643, None, None, 151643, 131072, "right"),
    "Pixtral": (131072, 1, None, 11, 131072, "left"),
    "Mistral": (131072, 1, None, 11, 131072, "left"),
}
"""By the start of a class's name: vocabulary, ids of begin, end and padding, length, the side that is padded."""


def _conversation(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    text = ""
    for message in messages:
        content = message["content"]
        words = content if isinstance(content, str) else " ".join(part.get("text", "[IMG]") for part in content)
        text += f"<|im_start|>{message['role']}\n{words}<|im_end|>\n"
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")
