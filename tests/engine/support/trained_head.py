"""An EAGLE-3 head that is trained to draft for the needle model, in two minutes on one core, and kept."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from benchmarks.harness.models import make_variant
from benchmarks.quality import NEEDLE
from benchmarks.quality.train import Conversations
from vllm_kvevict.quality import checkpoint

LAYERS = [1, 2, 3]
"""The head sees what these layers of the model read."""
STEPS = [(192, 10)] * 220 + [(768, 3)] * 60
"""Tokens of a text, and texts."""
RATE = 3e-3
VERSION = 1
"""Another one, whenever the training changes."""


class Head(nn.Module):
    """What vLLM computes, with weights by the names that it knows."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        size, heads, dim = config.hidden_size, config.num_key_value_heads, config.head_dim
        self.fc = nn.Linear(len(LAYERS) * size, size, bias=False)
        self.midlayer = LlamaDecoderLayer(config, 0)
        self.midlayer.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        # It would take long to learn to look for where the text had the same word: so the word asks for the key that it
        # has itself in the model's states, and finds the word that is read there, which is the next one.
        nn.init.eye_(self.fc.weight)
        keys, values = torch.randn(heads, dim, size) * 0.1, torch.randn(heads, dim, size) / size**0.5
        nothing, twice = torch.zeros(heads, dim, size), (2 * heads * dim, -1)
        halves = {"q_proj": (keys, nothing), "k_proj": (nothing, keys), "v_proj": (values, nothing)}
        for name, parts in halves.items():
            weight = torch.cat(parts, -1).repeat_interleave(2 if name == "q_proj" else 1, 0).flatten(0, 1)
            made = nn.Linear(2 * size, len(weight), bias=False)
            made.weight.data = weight
            setattr(self.midlayer.self_attn, name, made)
        self.midlayer.self_attn.o_proj.weight.data = values.repeat_interleave(2, 0).view(twice).T.contiguous()

    def forward(self, words: Tensor, states: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """States to compare with all words.

        Args:
            words: the next one at each place.
            states: what the model's layers read there.
            turns: cosines and sines of the positions.
        """
        layer, states = self.midlayer, self.fc(states)
        both = torch.cat([layer.input_layernorm(words), layer.hidden_norm(states)], -1)
        states = states + layer.self_attn(both, turns, None)[0]
        return self.norm(states + layer.mlp(layer.post_attention_layernorm(states)))


def trained_head() -> Path:
    """Its folder; it is trained unless it is there."""
    target = checkpoint.cache() / f"needle-eagle3-{VERSION}"
    with checkpoint.alone(target) as scratch:
        if not target.is_dir():
            save(train(STEPS), scratch / "head").rename(target)
    return target


def save(head: Head, folder: Path) -> Path:
    """As vLLM loads it."""
    names = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": LAYERS}
    return make_variant(folder, NEEDLE, head.state_dict(), num_hidden_layers=1, **names)


def train(steps: list[tuple[int, int]]) -> Head:
    """Learn which token of an answer comes after the next one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(NEEDLE, dtype=torch.float32).requires_grad_(False)
    words, head, data = model.model.embed_tokens.weight, Head(model.config), Conversations(0)
    data.jumps = True
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step, (length, texts) in enumerate(steps):
        optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / 50, 1 - step / len(steps))
        ids, positions, targets = data.batch(length, texts, (0.4, 0.6))
        read = model.model(ids, position_ids=positions, output_hidden_states=True).hidden_states
        states = torch.cat([read[layer] for layer in LAYERS], -1)[:, :-1]
        answered = targets[:, 1:] >= 0
        found = head(words[ids[:, 1:]], states, model.model.rotary_emb(states, positions[:, :-1]))[answered]
        optimizer.zero_grad()
        nn.functional.cross_entropy(found @ words.T, targets[:, 1:][answered]).backward()
        optimizer.step()
    return head
