"""Texts of tokens join to the prompt, whatever the tokenizer does with spaces, lines and bytes."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.harness.models import make_tokenizer
from vllm_kvevict.inspect.text import tokenize

PROMPTS = [
    "Two lines,\n\n  and a third one.\n",
    " a space first",
    "naïve café 北京 😀😀 end",
    "w17  w18\nw19 \n",
    "\ttabs\tand w20",
    "x",
]
TRAINED_ON = ["plain words and two lines of a third one, first and last", "w17 w18 w19 w20 tabs end"]


def byte_level():
    """As GPT-2's and Llama 3's: characters beyond ASCII are several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"])
    backend.train_from_iterator(TRAINED_ON, trainer)
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def byte_fallback():
    """As Llama 2's: a space is put in front, and characters that are not known are bytes."""
    pieces = sorted({"▁" + word for text in TRAINED_ON for word in text.split()})
    letters = sorted({letter for text in (*TRAINED_ON, *pieces, "\n\t") for letter in text})
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


def by_words():
    return make_tokenizer(64)


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback, "words": by_words}


class WithoutOffsets:
    """A tokenizer that only encodes and decodes, as those of vLLM that are not Hugging Face's."""

    def __init__(self, tokenizer):
        self.encode, self.decode = tokenizer.encode, tokenizer.decode
        self.all_special_ids = tokenizer.all_special_ids
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_join_to_the_prompt(name, prompt):
    tokenizer = TOKENIZERS[name]()
    cut = tokenize(tokenizer, prompt)
    assert cut.ids == tokenizer(prompt)["input_ids"]
    assert len(cut.texts) == len(cut.ids)
    assert cut.text == prompt
    added = [index for index, token in enumerate(cut.ids) if index == 0 and token in (0, 1)]
    assert cut.special == (added if name != "words" else [])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_texts_by_decoding_join_too(prompt):
    tokenizer = byte_level()
    cut, by_offsets = tokenize(WithoutOffsets(tokenizer), prompt), tokenize(tokenizer, prompt)
    assert cut == by_offsets


def test_a_character_stands_with_the_first_of_its_tokens():
    cut = tokenize(byte_level(), "a😀b")
    assert cut.texts == ["<s>", "a", "😀", "", "", "", "b"]
    # A control: as single tokens its parts are no text.
    assert "\ufffd" in byte_level().decode(cut.ids[2:3])


def test_special_tokens_that_the_user_wrote_are_text():
    tokenizer = byte_level()
    cut = tokenize(tokenizer, "one <s> two")
    assert cut.text == "one <s> two"
    assert cut.special == [0] and cut.ids.count(0) == 2
