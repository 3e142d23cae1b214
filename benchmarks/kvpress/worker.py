"""kvpress and transformers behind standard input and output, one JSON object per line.

Runs in the environment of kvpress, which this project is not installed in: imports nothing of the project.
``python worker.py MODEL DTYPE`` first says which versions it runs, then answers each order

    {"prompts": [[...], ...], "output_len": 256, "press": "snapkv", "budget": 0.2}

where all prompts have the same length and are one batch, and ``press`` is null for plain transformers. The answer
holds what :func:`generate` returns.
"""

import contextlib
import json
import os
import sys
import time
from importlib import metadata

import torch
from kvpress import SnapKVPress  # type: ignore
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

PACKAGES = ("kvpress", "transformers", "torch")
WINDOW, KERNEL = 32, 7


@torch.inference_mode()
def generate(model, prompts, output_len, press, budget):
    """Compress while the prompts are read, then decode greedily, without looking for the end of the text.

    A loop of one's own, as in kvpress's pipeline; ``model.generate`` takes as long and tells less.

    Returns:
        wall, cpu: seconds; cpu of all threads.
        steps: (seconds, prompt tokens, requests) of each.
        ids: [requests][output_len].
        likely: [requests][5], the most likely first tokens.
        entries: in the cache right after the prefill, of all layers, heads and requests.
    """
    batch = torch.tensor(prompts)
    cache = DynamicCache()
    start, cpu = time.perf_counter(), time.process_time()
    snapkv = SnapKVPress(compression_ratio=1 - budget, window_size=WINDOW, kernel_size=KERNEL)
    with snapkv(model) if press else contextlib.nullcontext():
        logits = model(batch, past_key_values=cache, logits_to_keep=1).logits
    ids = [logits[:, -1].argmax(-1, keepdim=True)]
    steps = [(time.perf_counter() - start, batch.numel(), len(batch))]
    found = {
        "likely": logits[:, -1].topk(5).indices.tolist(),
        "entries": sum(layer.keys[..., 0].numel() for layer in cache.layers),
    }
    # True positions: the cache is shorter than the text, so the model could not count them itself.
    positions = torch.full_like(ids[0], batch.shape[1])
    for step in range(output_len - 1):
        start = time.perf_counter()
        logits = model(ids[-1], past_key_values=cache, position_ids=positions + step).logits
        ids.append(logits[:, -1].argmax(-1, keepdim=True))
        steps.append((time.perf_counter() - start, 0, len(batch)))
    return {
        "wall": sum(seconds for seconds, *_ in steps),
        "cpu": time.process_time() - cpu,
        "steps": steps,
        "ids": torch.cat(ids, dim=1).tolist(),
        **found,
    }


def main():
    # Libraries print what they like; the answers keep the real standard output to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    disable_progress_bar()
    path, dtype = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    versions = {name: metadata.version(name) for name in PACKAGES}
    print(json.dumps({"versions": versions, "threads": torch.get_num_threads()}), file=answers)
    for line in sys.stdin:
        print(json.dumps(generate(model, **json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
