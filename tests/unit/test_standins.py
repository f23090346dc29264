"""Stand-ins answer as the classes they stand for: same keys, types and shapes, and as many tokens as pipelines need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPTokenizer

from dmconfig.rehearse.standins import StandInImageProcessor, StandInTokenizer, stand_in_for
from tests.tiny_pipelines import _t5_tokenizer, clip_tokenizer

PROMPTS = ("a red fox", "a")
CALLS: list[Mapping[str, Any]] = [
    {},
    {"padding": "max_length"},
    {"padding": "max_length", "max_length": 12, "truncation": True, "return_tensors": "pt"},
    {"padding": "longest", "return_tensors": "pt"},
    {"padding": True, "return_tensors": "pt"},
    {"padding": "max_length", "max_length": 12, "return_attention_mask": False, "return_tensors": "pt"},
    {"add_special_tokens": False},
    {"truncation": True, "max_length": 4},
]


@pytest.fixture
def clip(tmp_path: Path) -> tuple[CLIPTokenizer, StandInTokenizer]:
    """A real CLIP tokenizer that has a token for every letter, and a stand-in that takes letters for words."""
    real = clip_tokenizer(tmp_path / "clip")
    return real, Letters(
        len(real), begin=real.bos_token_id, end=real.eos_token_id, padding=real.pad_token_id, length=16
    )


@pytest.fixture
def t5() -> tuple[Any, StandInTokenizer]:
    """The same for T5, which has no token for the beginning."""
    real = _t5_tokenizer()
    return real, Letters(len(real), begin=None, end=1, padding=0, length=16)


class Letters(StandInTokenizer):
    """A stand-in with the vocabulary of the tiny tokenizers: a token per letter."""

    def tokenize(self, text: str, **_ignored: Any) -> list[str]:
        """Return the letters."""
        return [letter for letter in text if letter != " "]


def form(value: Any) -> Any:
    """Return what a pipeline can see of an encoding beside the ids themselves."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, list):
        return [form(each) if isinstance(each, list) else type(each) for each in value]
    return {name: form(each) for name, each in value.items() if name != "token_type_ids"}


@pytest.mark.parametrize("options", CALLS, ids=str)
@pytest.mark.parametrize("texts", ["a red fox", list(PROMPTS)], ids=["one", "two"])
def test_answers_have_the_form_of_clips(
    texts: str | list[str], options: Mapping[str, Any], clip: tuple[Any, StandInTokenizer]
) -> None:
    """Keys, types and shapes are those of the real tokenizer, for one text and for several."""
    real, stand_in = clip
    if isinstance(texts, str) and options.get("return_tensors"):
        texts = [texts]

    assert form(stand_in(texts, **options)) == form(real(texts, **options))


def test_answers_have_the_form_of_t5s(t5: tuple[Any, StandInTokenizer]) -> None:
    """As for CLIP; the real one has one token more, for the space before a word."""
    real, stand_in = t5
    options: dict[str, Any] = {"padding": "max_length", "max_length": 16, "truncation": True, "return_tensors": "pt"}

    ours, theirs = stand_in(list(PROMPTS), **options), real(list(PROMPTS), **options)

    assert form(ours) == form(theirs)
    assert ours.input_ids[1].tolist()[1:3] == [1, 0]  # the end, then padding


def test_masks_say_what_is_padding_on_either_side(clip: tuple[Any, StandInTokenizer]) -> None:
    """Padding is masked, and stands where the padding side says."""
    real, stand_in = clip
    options: dict[str, Any] = {"padding": "max_length", "max_length": 8}
    for side in ("right", "left"):
        real.padding_side = stand_in.padding_side = side

        assert stand_in("fox", **options)["attention_mask"] == real("fox", **options)["attention_mask"]


def test_special_tokens_are_where_the_real_ones_are(clip: tuple[Any, StandInTokenizer]) -> None:
    """The text stands between those of the beginning and the end, also where it is cut."""
    real, stand_in = clip
    cut: dict[str, Any] = {"truncation": True, "max_length": 4}
    for options in ({}, cut):
        ours, theirs = (each("a red fox", **options)["input_ids"] for each in (stand_in, real))

        assert (ours[0], ours[-1], len(ours)) == (theirs[0], theirs[-1], len(theirs))


def test_encodings_go_to_a_device_and_answer_by_name() -> None:
    """Pipelines say ``.input_ids``, ``["input_ids"]`` and ``.to(device)``."""
    encoding = stand_in_for("T5TokenizerFast", None)(["a fox"], return_tensors="pt").to("cpu")

    assert encoding.input_ids is encoding["input_ids"]


def test_ids_are_in_the_vocabulary() -> None:
    """An embedding of the encoder's own size takes every id; equal words have equal ids."""
    tokenizer = stand_in_for("T5TokenizerFast", SimpleNamespace(vocab_size=100))

    ids = tokenizer("the fox and the dog and other words, of all sorts: 1 2 3")["input_ids"]

    assert max(ids) < 100
    assert min(ids) >= 0
    assert ids[0] == ids[3]


@pytest.mark.parametrize(("legacy", "end"), [(2, 49407), (49407, 49407), (None, 49407), (5, 5)])
def test_clip_ends_as_its_encoder_pools(legacy: int | None, end: int) -> None:
    """The encoder pools at the end; 2 in its config is what old ones say, and no model goes by it."""
    tokenizer = stand_in_for("CLIPTokenizer", SimpleNamespace(eos_token_id=legacy))

    assert tokenizer("a fox", padding="max_length")["input_ids"][-1] == end
    assert len(tokenizer("a fox", padding="max_length")["input_ids"]) == 77


def test_templates_have_more_tokens_than_pipelines_cut_off() -> None:
    """Qwen-Image drops the 34 tokens of its template: fewer would leave nothing of a prompt, many more too much."""
    tokenizer = stand_in_for("Qwen2Tokenizer", SimpleNamespace(vocab_size=152064))
    text = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
        "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
    )

    assert 34 <= len(tokenizer.tokenize(text)) <= 44


def test_conversations_become_texts_or_ids() -> None:
    """With a chat template, for one conversation and for several, as text, as ids and as an encoding."""
    tokenizer = stand_in_for("Qwen2Tokenizer", None)
    one = [{"role": "user", "content": "a fox"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a fox"}]}]

    text = tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)

    assert text == "<|im_start|>user\na fox<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template([parts, one], tokenize=False) == [text[:33], text[:33]]
    assert tokenizer.apply_chat_template([one])[0] == tokenizer(text[:33])["input_ids"]
    asked: dict[str, Any] = {"return_dict": True, "return_tensors": "pt", "padding": "max_length", "max_length": 20}
    assert tokenizer.apply_chat_template([one], **asked).input_ids.shape == (1, 20)


def test_pictures_become_as_many_pixel_values() -> None:
    """One picture, or a list of them, in the form of the real processor."""
    picture = Image.new("RGB", (40, 30))
    real = CLIPImageProcessor()
    for given in (picture, [picture, picture]):
        ours, theirs = (each(given, return_tensors="pt") for each in (StandInImageProcessor(), real))

        assert form(ours) == form(theirs)


def test_pictures_have_the_size_of_the_encoder() -> None:
    """The config of the model that is fed decides, also where its vision part is one of two."""
    small = SimpleNamespace(image_size=32)
    for config in (small, SimpleNamespace(vision_config=small)):
        assert stand_in_for("CLIPImageProcessor", config)([Image.new("RGB", (8, 8))]).pixel_values.shape[-1] == 32


def test_what_nothing_is_known_of_has_no_stand_in() -> None:
    """A class of no known family is refused, and not guessed."""
    with pytest.raises(KeyError, match="AudioTokenizer"):
        stand_in_for("AudioTokenizer", None)
