"""Small random models that read images, and prompts with images, all made here."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    LlavaProcessor,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
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
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' }}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% else %}{{ 'IMAGE ' }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "projection_dim": 64,
}
QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": PATCH}
NEWER_VISION = QWEN_VISION | {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 128}
QWEN_MARKS = {
    "image_token_id": MARKS["<|image_pad|>"],
    "video_token_id": MARKS["<|video_pad|>"],
    "vision_start_token_id": MARKS["<|vision_start|>"],
    "vision_end_token_id": MARKS["<|vision_end|>"],
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


@dataclass(frozen=True)
class Shape:
    """A model that reads images.

    Attributes:
        text: architecture of the model whose text it has.
        text_config: what differs from that model's configuration.
        settings: of the whole.
        processor: of Hugging Face.
    """

    text: str
    text_config: dict[str, Any]
    settings: dict[str, Any]
    processor: type


SHAPES = {
    "llava": Shape(
        "llama",
        {},
        {
            "image_token_index": MARKS["<image>"],
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vision_config": CLIP,
        },
        LlavaProcessor,
    ),
    "qwen2_vl": Shape(
        "qwen2",
        {"model_type": "qwen2_vl_text", "rope_parameters": MROPE},
        {**QWEN_MARKS, "vision_config": {**QWEN_VISION, "embed_dim": 64, "mlp_ratio": 2, "hidden_size": 128}},
        Qwen2VLProcessor,
    ),
    "qwen2_5_vl": Shape(
        "qwen2",
        {"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE},
        {
            **QWEN_MARKS,
            "vision_config": NEWER_VISION | {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]},
        },
        Qwen2_5_VLProcessor,
    ),
    "qwen3_vl": Shape(
        "qwen3",
        {"model_type": "qwen3_vl_text", "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {
            **QWEN_MARKS,
            "vision_config": NEWER_VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        },
        Qwen3VLProcessor,
    ),
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
    tokenizer = make_tokenizer(VOCAB, marks, CHAT_TEMPLATE.replace("IMAGE", IMAGE.get(kind, QWEN_IMAGE)))
    if kind == "llava":
        size = {"height": SIDE, "width": SIDE}
        images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size)
        # One token more than patches, for the encoder's class, which the model then leaves out.
        return LlavaProcessor(
            images, tokenizer, PATCH, "default", tokenizer.chat_template, num_additional_image_tokens=1
        )
    pixels = {"min_pixels": (2 * PATCH) ** 2, "max_pixels": (16 * PATCH) ** 2, "patch_size": PATCH}
    images, videos = Qwen2VLImageProcessor(**pixels), Qwen2VLVideoProcessor(**pixels)
    return SHAPES[kind].processor(images, tokenizer, videos, tokenizer.chat_template)


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
            inputs["mm_token_type_ids"] = (torch.tensor([tokens]) == QWEN_MARKS["image_token_id"]).int()
        return dict(inputs)
