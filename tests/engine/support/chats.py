"""Chat templates of many kinds, chats, and renderers for them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm import EngineArgs
from vllm.renderers import ChatParams
from vllm.renderers.base import BaseRenderer
from vllm.renderers.registry import renderer_from_config

import vllm_kvevict.engine  # noqa: F401
from benchmarks.harness.models import make_model
from vllm_kvevict.engine.request_options import facts_of

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"]
VOCAB = 700
DOCUMENT = "The harbour of Rotterdam moved 467 million tonnes in 2022.\n\nIt is the largest port of Europe. "
QUESTION = "Which port is the largest?"

TEMPLATES = Path(__file__).with_name("templates")


def template(name: str) -> str:
    """A template for chats."""
    return (TEMPLATES / f"{name}.jinja").read_text().removesuffix("\n")


TURNS = "{% for m in messages %}"
CHATML = template("chatml")
LLAMA3 = template("llama3")
STRICT = template("strict")
PLAIN = template("plain")
SYSTEM_LAST = template("system_last")
THINKING = template("thinking")
GLUED = TURNS + "{{ m.content }}{% endfor %}"
REVERSED = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
BLIND = "{{ messages[0].content }}"
PICKY = (
    TURNS
    + "{% if m.content | length < 2 %}{{ raise_exception('too short') }}{% endif %}{{ m.content }}{% endfor %}"
)

TURN = [{"role": "user", "content": DOCUMENT}, {"role": "assistant", "content": "I have read it."}]
SYSTEM = [{"role": "system", "content": DOCUMENT}]


def ask(question: object = QUESTION) -> dict:
    return {"role": "user", "content": question}


def save_byte_tokenizer(path: Path, further: str = "") -> None:
    """Write a byte-level BPE tokenizer that was trained on this file, and on further text, beside a model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(), further], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHATML
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    fast.save_pretrained(path)


@contextlib.contextmanager
def byte_renderers(path: Path) -> Iterator[Callable[..., BaseRenderer]]:
    """Makes renderers of a byte-level tokenizer; ``get(scope="prefix")``."""
    make_model(path, layers=1, vocab=VOCAB)
    save_byte_tokenizer(path)
    made: list[BaseRenderer] = []

    def get(**options: Any) -> BaseRenderer:
        config = {"policy": "snapkv", "min_prompt": 0, **options}
        args = EngineArgs(model=str(path), additional_config={"kv_eviction": config} if options else {})
        made.append(renderer_from_config(args.create_engine_config()))
        return made[-1]

    yield get
    for renderer in made:
        renderer.shutdown()


def render(
    renderer: BaseRenderer, messages: list[Any], template: str = CHATML, tok_params: Any = None, **kwargs: Any
) -> tuple[Any, str | None]:
    """A chat's prompt, and the text of its prefix (None if there is none)."""
    params = ChatParams(
        chat_template=template, chat_template_kwargs={"add_generation_prompt": True, "tokenize": False, **kwargs}
    )  # fmt: skip
    _, (prompt,) = renderer.render_chat([messages], params, tok_params)
    prefix = decoded(renderer, prompt["prompt_token_ids"][: prefix_len_of(prompt)])
    return prompt, None if facts_of(prompt).ends is None else prefix


def prefix_len_of(prompt: Any) -> int:
    """Where a prompt is evicted, for the last time if it has turns; 0 if nowhere."""
    return (facts_of(prompt).ends or [0])[-1]


def decoded(renderer: BaseRenderer, ids: Any) -> str:
    """The text of tokens, as it is."""
    text: str = renderer.get_tokenizer().decode(list(ids), clean_up_tokenization_spaces=False)
    return text


READ = "<|im_start|>user\n" + DOCUMENT + "<|im_end|>\n<|im_start|>assistant\nI have read it.<|im_end|>\n"
HEAD = "<s><|head|>{}<|/head|>\n\n" + DOCUMENT.strip() + "<|eot|>"

# Template, messages before the question, and the prefix: the last token of the question's header is left out.
CASES = {
    "a turn": (CHATML, TURN, READ + "<|im_start|>"),
    "instructions": (CHATML, SYSTEM, f"<|im_start|>system\n{DOCUMENT}<|im_end|>\n<|im_start|>"),
    "two user messages": (CHATML, TURN[:1], f"<|im_start|>user\n{DOCUMENT}<|im_end|>\n<|im_start|>"),
    "trimmed": (LLAMA3, SYSTEM, HEAD.format("system") + "<|head|>user"),
    "strict roles": (STRICT, TURN, f"<s>[INST] {DOCUMENT.strip()} [/INST]I have read it.</s>[INST"),
    "no special tokens": (PLAIN, TURN, f"USER: {DOCUMENT}\nASSISTANT: I have read it.\nUSER"),
    "instructions at the end": (
        SYSTEM_LAST, SYSTEM + TURN, f"[INST] {DOCUMENT} [/INST]I have read it.</s>[INST] {DOCUMENT.strip()[:-1]}",
    ),
    "thoughts": (THINKING, TURN, READ + "<|im_start|>"),
    "no header": (GLUED, SYSTEM, DOCUMENT.strip()[:-1]),
    "the question first": (REVERSED, SYSTEM, "user"),
    "nothing before": (CHATML, [], "<|im_start|>"),
    "nothing at all before": (GLUED, [], ""),
}  # fmt: skip
