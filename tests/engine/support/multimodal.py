"""Small random models that read images, and prompts with images, all made here."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    LlavaProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from benchmarks.harness.models import make_model, make_tokenizer
from tests.engine.support.running import VOCAB, Ask

PATCH = 14
SIDE = 4 * PATCH
"""Of an image that LLaVA's encoder gets, in pixels."""
MARKS = {"<image>": 6, "<|image_pad|>": 6, "<|vision_start|>": 7, "<|vision_end|>": 510, "<|video_pad|>": 511}
"""Tokens beside text, in places of words."""
IMAGE_IDS = {"llava": [6]}
QWEN_IMAGE_IDS = [7, 6, 510]
CHAT_TEMPLATE = Path(__file__).with_name("templates") / "with_images.jinja"


@dataclass(frozen=True)
class Shape:
    """A model that reads images.

    Attributes:
        text: architecture of the model whose text it has.
        processor: of Hugging Face.
        settings: of the whole.
        text_config: what differs from that model's configuration.
    """

    text: str
    processor: str
    settings: dict[str, Any]
    text_config: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    kind: Shape(**shape)
    for kind, shape in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["shapes"].items()
}
IMAGE = {"llava": "<image>"}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What stands for an image in the text of a prompt."""


def make_multimodal_model(path: Path, kind: str) -> Path:
    """Write a random model that reads images, one of ``SHAPES``."""
    shape = SHAPES[kind]
    text = make_model(path / "text", shape.text)
    text_config = json.loads((text / "config.json").read_text()) | shape.text_config
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(kind, text_config=text_config, tie_word_embeddings=False, **shape.settings)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "language_model" in name and name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(4)  # else attention is so flat that every token looks alike
            elif name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
                weight.normal_(std=0.5)
            elif "projector" in name or "merger" in name:
                weight.normal_(std=0.2)  # images differ in what they do to the text behind them
    model.save_pretrained(path / kind)
    if kind == "llava":
        _name_as_published(path / kind / "model.safetensors")
    _processor(kind).save_pretrained(path / kind)
    return path / kind


def _name_as_published(file: Path) -> None:
    """Give an encoder's weights the names that vLLM knows, as older versions of transformers wrote them."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    weights = {name.replace(old, new): weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def _processor(kind: str) -> Any:
    marks = {mark: index for mark, index in MARKS.items() if (mark == "<image>") == (kind == "llava")}
    tokenizer = make_tokenizer(
        VOCAB, marks, CHAT_TEMPLATE.read_text().replace("IMAGE", IMAGE.get(kind, QWEN_IMAGE))
    )
    if kind == "llava":
        size = {"height": SIDE, "width": SIDE}
        images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size)
        # One token more than patches, for the encoder's class, which the model then leaves out.
        return LlavaProcessor(
            images, tokenizer, PATCH, "default", tokenizer.chat_template, num_additional_image_tokens=1
        )
    pixels = {"min_pixels": (2 * PATCH) ** 2, "max_pixels": (16 * PATCH) ** 2, "patch_size": PATCH}
    images, videos = Qwen2VLImageProcessor(**pixels), Qwen2VLVideoProcessor(**pixels)
    return getattr(transformers, SHAPES[kind].processor)(images, tokenizer, videos, tokenizer.chat_template)


def picture(seed: int, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """An image of random colours."""
    colours = random.Random(seed).randbytes(3 * width * height)
    return Image.frombytes("RGB", (width, height), colours)


@dataclass
class AskWithImages(Ask):
    """A request whose random tokens have images among them, evenly spread.

    Attributes:
        sizes: of the images, in pixels.
        kind: of the model.
        image_seed: of what is in the images.
    """

    sizes: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)
    kind: str = field(default="llava", kw_only=True)
    image_seed: int = field(default=0, kw_only=True)

    @property
    def images(self) -> list[Image.Image]:
        return [picture(100 * self.image_seed + index, *size) for index, size in enumerate(self.sizes)]

    @property
    def request(self) -> dict[str, Any]:
        tokens, marks = list(self.prompt), IMAGE_IDS.get(self.kind, QWEN_IMAGE_IDS)
        for index in reversed(range(len(self.sizes))):
            place = (index + 1) * self.length // (len(self.sizes) + 1)
            tokens[place:place] = marks
        return {"prompt_token_ids": tokens, "multi_modal_data": {"image": self.images}}

    def inputs(self, model: Path, tokens: list[int]) -> dict[str, torch.Tensor]:
        """What Hugging Face's model is given beside tokens, those of images included."""
        inputs = AutoImageProcessor.from_pretrained(model)(self.images, return_tensors="pt")
        if self.kind != "llava":
            inputs["mm_token_type_ids"] = (torch.tensor([tokens]) == MARKS["<|image_pad|>"]).int()
        return dict(inputs)
