"""The needle model's tokenizer: one token per word, full stop or mark; and its chat template."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vllm_kvevict.quality.tasks import FUNCTION_WORDS, words

PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END = "<pad>", "<unk>", "<system>", "<user>", "<assistant>", "<end>"
SPECIAL = (PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<{{ message.role }}> {{ message.content | trim }} "
    "{%- if message.role == 'assistant' -%}<end> {%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


def vocabulary() -> dict[str, int]:
    """Token ids by word."""
    return {word: index for index, word in enumerate((*SPECIAL, *FUNCTION_WORDS, *words()))}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer in the form that transformers saves and loads."""
    backend = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    backend.add_special_tokens(list(SPECIAL))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins tokens with spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
