"""Judge a digits pipeline: does each generated image show the digit its prompt names?

A support vector classifier is trained on 80 % of the real 8x8 scikit-learn digits and checked on the other 20 %.
Generated images are averaged down to the same 8x8 grid and classified. ``Judge`` needs neither torch nor diffusers;
they are imported only where a pipeline runs.

    >>> judge = Judge.trained()                    # a tenth of a second
    >>> judge.digit_of(pipe("seven").images[0])    # doctest: +SKIP
    7

    python examples/digits/judge.py [FOLDER] [--dtype float32] [--form "{}"] [--sheet sheet.png]
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

DEFAULT_FOLDER = Path(__file__).with_name("pipeline")
IMAGE_SIZE = 32  # pixels, height and width
STEPS, GUIDANCE = 20, 3.0  # what the pipeline is meant to be called with
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@dataclass(frozen=True, slots=True)
class Judge:
    """A classifier of 32x32 digits that has never seen ``held_out``, a fifth of the data, picked by a fixed seed."""

    classifier: SVC
    held_out: NDArray[np.int64]
    """Indices into ``load_digits()``."""

    @classmethod
    def trained(cls) -> Self:
        """Return a judge trained on the real digits; every call gives the same one."""
        digits = load_digits()
        train, held_out = train_test_split(
            np.arange(len(digits.target)), test_size=0.2, random_state=0, stratify=digits.target
        )
        return cls(SVC(gamma=0.001, C=10).fit(digits.data[train], digits.target[train]), held_out)

    def digit_of(self, image: Image.Image) -> int:
        """Return the digit that image shows, 0..9.

        Raises: ValueError: when image is not 32x32.
        """
        if image.size != (IMAGE_SIZE, IMAGE_SIZE):
            raise ValueError(f"the judge knows {IMAGE_SIZE}x{IMAGE_SIZE} images, not {image.width}x{image.height}")
        return int(self.digits_of([np.asarray(image.convert("L"))])[0])

    def digits_of(self, images: ArrayLike) -> NDArray[np.int64]:
        """Return the digits [n] that images, [n, 32, 32] in 0..255 with white ink, show."""
        return self.classifier.predict(area_downsample(images))

    def accuracy(self) -> float:
        """Return the share of the held-out 8x8 digits it names right."""
        digits = load_digits()
        return float(self.classifier.score(digits.data[self.held_out], digits.target[self.held_out]))


def area_downsample(images: ArrayLike) -> NDArray[np.float64]:
    """Average images, [n, 32, 32] in 0..255, down to [n, 64]: 8x8 in the data's own 0..16."""
    tiles = np.asarray(images, dtype=float).reshape(-1, 8, 4, 8, 4)
    return tiles.mean(axis=(2, 4)).reshape(-1, 64) / 255 * 16


def accuracy_enlarged(judge: Judge) -> float:
    """Return judge's accuracy on the held-out digits after they went through 32x32 and back, as generated ones do."""
    from train import load_images

    images, labels = load_images()
    shown = (images[judge.held_out, 0].numpy() + 1) / 2 * 255
    return float((judge.digits_of(shown) == labels[judge.held_out].numpy()).mean())


def generate(
    pipe: "StableDiffusionPipeline", form: str, *, per_digit: int, steps: int, guidance: float, seed: int
) -> NDArray[np.uint8]:
    """Return uint8 [10, per_digit, 32, 32]: for each digit, one image for each of the seeds seed, seed + 1, ..."""
    import torch

    rows = []
    for number, word in enumerate(WORDS):
        generators = [torch.Generator().manual_seed(seed + 100 * number + i) for i in range(per_digit)]
        images = pipe(
            [form.format(word, n=number)] * per_digit,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generators,
        ).images
        rows.append([np.asarray(image.convert("L")) for image in images])
    return np.array(rows)


def write_sheet(images: NDArray[np.uint8], path: Path, *, columns: int = 8, zoom: int = 2) -> None:
    """Write a PNG with one row per digit: the first columns images of each, enlarged zoom times without smoothing."""
    tiles = np.pad(images[:, :columns], ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=96)
    rows, columns, height, width = tiles.shape
    sheet = Image.fromarray(tiles.transpose(0, 2, 1, 3).reshape(rows * height, columns * width))
    sheet.resize((sheet.width * zoom, sheet.height * zoom), Image.Resampling.NEAREST).save(path)


def load_pipeline(folder: Path, dtype: str) -> "StableDiffusionPipeline":
    """Return the pipeline in folder in the named dtype, without its progress bar."""
    import torch
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(folder).to(getattr(torch, dtype))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def print_verdict(guesses: NDArray[np.int64], form: str) -> None:
    """Print one line per digit and the total; guesses are [10, per_digit]."""
    for number, row in enumerate(guesses):
        wrong = [int(guess) for guess in row if guess != number]
        remark = f"taken for {wrong}" if wrong else ""
        print(f"  {form.format(WORDS[number], n=number):24s} {len(row) - len(wrong):3d}/{len(row)}  {remark}".rstrip())
    right = guesses == np.arange(10)[:, None]
    print(f"right: {right.sum()}/{right.size} = {right.mean():.1%}")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description="Judge a digits pipeline: are its digits the ones asked for?")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, metavar="FOLDER")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--form", default="{}", help='prompt: {} is the word, {n} the figure, e.g. "the digit {n}"')
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--per-digit", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--sheet", type=Path, help="write a contact sheet PNG here")
    return parser.parse_args()


def main() -> None:
    """Print the judge's own figures, the time of one image, and how many generated images are right."""
    args = parse_arguments()
    judge = Judge.trained()
    print(
        f"judge on held-out real digits: {judge.accuracy():.2%}; after 32x32 and back: {accuracy_enlarged(judge):.2%}"
    )
    pipe = load_pipeline(args.folder, args.dtype)
    start_s = time.monotonic()
    pipe("seven", num_inference_steps=args.steps, guidance_scale=args.guidance)
    print(f"one image: {time.monotonic() - start_s:.2f} s")
    images = generate(
        pipe, args.form, per_digit=args.per_digit, steps=args.steps, guidance=args.guidance, seed=args.seed
    )
    print_verdict(judge.digits_of(images).reshape(10, -1), args.form)
    if args.sheet:
        write_sheet(images, args.sheet)


if __name__ == "__main__":
    main()
