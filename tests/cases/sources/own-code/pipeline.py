"""Digits, with as many steps as the file says by default: code of a source, which validating and planning only read."""

from diffusers import DiffusionPipeline

raise SystemExit("this file is read, and never run, by validate and plan")


class CountedDigits(DiffusionPipeline):
    def __init__(self, unet, scheduler):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    def __call__(self, prompt=None, steps: int = 8):
        return prompt
