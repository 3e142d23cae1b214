"""Train the needle model: ``python -m benchmarks.quality.train``.

A small Llama learns to find things in texts made of words. Every training text is followed by many questions, so that
many tokens teach something. The curriculum goes from short to long texts: a stage ends when questions among records are
answered well. Positions jump at random between sentences of short texts, so that the model meets the distances of
long texts before it can afford to read them.
"""

import argparse
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.options import add
from benchmarks.quality import NEEDLE
from benchmarks.quality.tokenizer import ASSISTANT, END, PAD, SYSTEM, USER, make_tokenizer, vocabulary
from vllm_kvevict.quality.tasks import TASKS, Needle, Sentence, WordDraw

HIDDEN, LAYERS = 192, 4
MAX_POSITIONS = 5120
FIRST_WORDS = 150
"""Names, and values, in the first stage."""
WEIGHTS = {
    "single": 3.0,
    "multivalue": 1.0,
    "multiquery": 1.5,
    "chain": 1.5,
    "passage": 1.0,
    "count": 0.7,
    "facts": 1.5,
    "common": 0.3,
}
"""How often a task is drawn in training."""


def config(hidden: int, layers: int) -> LlamaConfig:
    """Grouped-query attention with two query heads per KV head, and positions that fade slowly."""
    return LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        # Half of a head's dimensions then turn less than once over all positions: words match at any distance.
        rope_theta=1e7,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary()[END],
        pad_token_id=vocabulary()[PAD],
    )


class Conversations:
    """Training texts of exactly `length` tokens, each with as many questions as fit behind it."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.jumps = False
        self.repeats = False
        self.ids = vocabulary()

    def batch(self, length: int, size: int, share: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and targets (-100 where there is none), each [size, length]."""
        if self.repeats:
            rows = [self.repetition(length) for _ in range(size)]
        else:
            rows = [self.conversation(length, self.rng.uniform(*share)) for _ in range(size)]
        ids, positions, targets = (torch.tensor(column) for column in zip(*rows, strict=True))
        return ids, positions, targets

    def repetition(self, length: int) -> tuple[list[int], list[int], list[int]]:
        """A few records over and over, each time in another order: the densest way to teach what follows a name."""
        draw = WordDraw(self.rng, FIRST_WORDS)
        records = [draw.record() for _ in range(self.rng.randint(2, max(3, length // 12)))]
        words = [SYSTEM]
        while len(words) <= length:
            for record in self.rng.sample(records, len(records)):
                words += record
        seen: set[str] = set()
        targets = [-100]
        for before, word in itertools.pairwise(words):
            pair = f"{before} {word}"
            targets.append(self.ids[word] if pair in seen and before != "." else -100)
            seen.add(pair)
        ids = [self.ids[word] for word in words]
        return ids[:length], list(range(length)), targets[1 : length + 1]

    def conversation(self, length: int, share: float) -> tuple[list[int], list[int], list[int]]:
        """One text that fills a share of the length, and its questions."""
        rng = self.rng
        draw = WordDraw(rng, None)
        room = int(share * length)
        density = rng.choice((0.1, 0.3, 0.6, 1.0))
        noise = rng.choice(("filler", "records"))
        needles: list[Needle] = []
        sentences: list[Sentence] = []
        used = 0
        while used < max(12, density * room) and len(needles) < 200:
            task = rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
            needle = TASKS[task][0](draw)
            size = sum(map(len, needle.sentences))
            if used and used + size > room:
                break
            needles.append(needle)
            used += size
        for needle in needles:
            places = sorted(rng.randint(0, len(sentences)) for _ in needle.sentences)
            for place, sentence in zip(reversed(places), reversed(needle.sentences), strict=True):
                sentences.insert(place, sentence)
        while used < room:
            sentence = draw.noise(noise)
            sentences.insert(rng.randint(0, len(sentences)), sentence)
            used += len(sentence)
        return self._encode(sentences, needles, length)

    def _encode(
        self, sentences: list[Sentence], needles: list[Needle], length: int
    ) -> tuple[list[int], list[int], list[int]]:
        words = [SYSTEM, *(word for sentence in sentences for word in sentence)]
        answered = [False] * len(words)
        while len(words) <= length:
            for needle in self.rng.sample(needles, len(needles)):
                question = [USER, *needle.question, ASSISTANT]
                answer = [*needle.answer, END]
                words += question + answer
                answered += [False] * len(question) + [True] * len(answer)
        ids = [self.ids[word] for word in words[: length + 1]]
        targets = [i if yes else -100 for i, yes in zip(ids, answered, strict=False)]
        return ids[:length], self._positions(sentences, length), targets[1 : length + 1]

    def _positions(self, sentences: list[Sentence], length: int) -> list[int]:
        """Consecutive, or with a few jumps between sentences of the text."""
        free = MAX_POSITIONS - length
        if not self.jumps or self.rng.random() < 0.3:
            return list(range(length))
        free = self.rng.randint(0, free)
        ends = [1]
        for sentence in sentences:
            ends.append(ends[-1] + len(sentence))
        at = sorted(self.rng.choices(ends, k=self.rng.randint(1, 8)))
        cuts = [0, *sorted(self.rng.randint(0, free) for _ in range(len(at) - 1)), free]
        jumps = dict.fromkeys(at, 0)
        for place, low, high in zip(at, cuts, cuts[1:], strict=False):
            jumps[place] += high - low
        positions, shift = [], 0
        for i in range(length):
            shift += jumps.get(i, 0)
            positions.append(i + shift)
        return positions


def answers_right(guesses: Tensor, targets: Tensor) -> tuple[int, int]:
    """How many of the answers (runs of targets in a row, each [rows, length]) are right in every token, of how many.

    An answer that the end of its row cuts off does not count.
    """
    right = total = 0
    for row, wanted in zip(guesses.tolist(), targets.tolist(), strict=True):
        ok, inside = True, False
        for guess, target in zip(row, wanted, strict=True):
            if target >= 0:
                inside = True
                ok &= guess == target
            elif inside:
                right, total = right + ok, total + 1
                ok, inside = True, False
    return right, total


def make_optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, which then learn retrieval in fewer steps; AdamW for the rest."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(inner, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learn(
    model: LlamaForCausalLM, optimizers: Sequence[torch.optim.Optimizer], batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[float, Tensor]:
    """One step on a batch. Returns the loss and the guesses, [rows, length], 0 where there is no target."""
    ids, positions, targets = batch
    chosen = targets >= 0
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(ids, position_ids=positions).last_hidden_state
        logits = model.lm_head(states[chosen])
    loss = torch.nn.functional.cross_entropy(logits.float(), targets[chosen])
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item(), torch.zeros_like(targets).masked_scatter_(chosen, logits.argmax(-1))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.train", description=__doc__)
    add(
        parser,
        ("lengths", int, [32, 64, 64, 128, 256, 512, 1024, 2048], "tokens of the texts in each stage"),
        ("tokens", int, 4096, "of a step"),
        ("steps", int, 350, "of the last stage, in which the rate falls"),
        ("patience", int, 1500, "most steps of any other stage"),
        ("goal", float, 0.83, "share of right answers that ends a stage"),
        ("lr", float, 3e-3, "learning rate"),
        ("seed", int, 0, "of texts and weights"),
        ("threads", int, torch.get_num_threads(), "of torch"),
        ("resume", Path, None, "folder of weights to go on from, with all words and long distances"),
        ("output", Path, NEEDLE, "folder"),
    )
    return parser.parse_args(argv)


def begin(args: argparse.Namespace) -> LlamaForCausalLM:
    """The model to train, in fp32."""
    if args.resume:
        return LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    model = LlamaForCausalLM(config(HIDDEN, LAYERS))
    # Word vectors of length 1: what an attention head copies then is a confident prediction from the start.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=HIDDEN**-0.5)
    return model


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    model, data = begin(args), Conversations(args.seed)
    optimizers = make_optimizers(model, args.lr)
    args.output.mkdir(parents=True, exist_ok=True)
    started, step = time.time(), 0
    for stage, length in enumerate(args.lengths):
        last = stage == len(args.lengths) - 1
        # First few words, over and over; then all words and tasks; then long distances.
        data.repeats = stage == 0 and not args.resume
        data.jumps = stage >= 2 or bool(args.resume)
        share = (0.4, 0.6) if length < 512 else (0.5, 0.9)
        recent: deque[tuple[int, int]] = deque(maxlen=10)
        for number in range(args.steps if last else args.patience):
            falling = max(0.02, 1 - number / args.steps) if last else 1.0
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / 100) * falling
            batch = data.batch(length, max(1, args.tokens // length), share)
            loss, guesses = learn(model, optimizers, batch)
            step += 1
            if step % 5 == 0:
                recent.append(answers_right(guesses, batch[2]))
            if step % 50:
                continue
            right = sum(r for r, _ in recent) / max(1, sum(t for _, t in recent))
            entry = {"step": step, "length": length, "seconds": round(time.time() - started)}
            entry |= {"loss": round(loss, 4), "answers_right": round(right, 4)}
            print(json.dumps(entry), flush=True)
            save(model, args.output)
            if not last and right >= args.goal and len(recent) == recent.maxlen:
                break


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Weights in bfloat16, tokenizer and configuration, as vLLM loads them."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    make_tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}, indent=1) + "\n")


if __name__ == "__main__":
    main()
