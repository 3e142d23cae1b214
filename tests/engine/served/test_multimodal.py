"""Prompts with images: what is kept of them, and that everything else is as without eviction."""

from dataclasses import replace

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.support.clients import words
from tests.engine.support.masked import CLOSE, expected_logits
from tests.engine.support.multimodal import AskWithImages, make_multimodal_model, picture
from tests.engine.support.running import Ask, decided, engine, evicting_engine, metric, run

KINDS = ("llava", "qwen2_vl")
SETTINGS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "limit_mm_per_prompt": {"image": 4, "video": 0},
}
SIZES = ((56, 56), (112, 56), (84, 168))
CHUNKED = {**SETTINGS, "max_num_batched_tokens": 64}
"""Chunks end within images of both kinds."""


def asks(kind, policy="full", budget=None, tokens=24):
    def ask(length, *sizes, seed=0):
        return AskWithImages(length, policy, budget, max_tokens=tokens, seed=seed, sizes=sizes, kind=kind)

    return [ask(250, *SIZES), ask(40, SIZES[1], seed=1), Ask(180, policy, budget, max_tokens=tokens)]


def differences(answers, others):
    """The largest difference between logits of two answers, for each request."""
    return [
        float((one.logits - other.logits).abs().max()) for one, other in zip(answers, others, strict=True)
    ]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory):
    return make_multimodal_model(tmp_path_factory.mktemp("multimodal"), kind)


@pytest.fixture(scope="module")
def stock(model, kind):
    with engine(model, enable_prefix_caching=False, **SETTINGS) as llm:
        return run(llm, asks(kind), logits=True, recorded=False)


@pytest.mark.engine
def test_nothing_evicted_equals_stock(model, kind, stock):
    other_images = [AskWithImages(250, max_tokens=24, sizes=SIZES[::-1], kind=kind)]
    with evicting_engine(model, **CHUNKED) as llm:
        for policy, budget in (("full", None), ("ada-snapkv", 1.0)):
            answers = run(llm, asks(kind, policy, budget), logits=True)
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in stock]
            assert max(differences(answers, stock)) < 1e-4
        assert min(differences(run(llm, asks(kind, "ada-snapkv", 0.2), logits=True), stock)) > 1e-2
        assert min(differences(run(llm, other_images, logits=True), stock[:1])) > 1e-2


@pytest.mark.engine
@pytest.mark.parametrize("lookahead", [0, 12])
def test_logits_equal_those_of_a_masked_model(model, kind, lookahead, stock):
    evicted = [*asks(kind, "ada-snapkv", 0.3), *asks(kind, "pyramidkv", 0.4)[:1]]
    with evicting_engine(model, eviction={"policy": "snapkv", "lookahead": lookahead}, **CHUNKED) as llm:
        answers = run(llm, evicted, logits=True)
    for ask, answer, plain in zip(evicted, answers, [*stock, stock[0]], strict=True):
        assert answer.tokens[: lookahead + 1] == plain.tokens[: lookahead + 1]
        tokens = answer.prompt + answer.tokens
        images = ask.inputs(model, tokens) if isinstance(ask, AskWithImages) else {}
        expected, unevicted = (
            expected_logits(
                model,
                ask,
                replace(answer, kept=kept),
                [len(answer.prompt) + lookahead] * len(kept),
                images=images,
            )
            for kept in (answer.kept, [])
        )
        torch.testing.assert_close(answer.logits, expected, **CLOSE)
        assert (answer.logits - unevicted).abs().max() > 1e-2


@pytest.mark.engine
def test_cached_prefixes(model, kind):
    """Prompts that begin alike share what was kept, if their images are the same, too."""
    first = AskWithImages(250, "knorm", 0.4, 300, sizes=SIZES, kind=kind, max_tokens=12)
    same_tokens = replace(first, sizes=(SIZES[0], *SIZES[1:]), image_seed=5)
    caching = {"enable_prefix_caching": True, "block_size": 32}
    for prefix_len in (None, 200):
        asked = [replace(ask, prefix_len=prefix_len) for ask in (first, same_tokens)]
        with evicting_engine(model, **SETTINGS) as llm:
            expected = run(llm, asked, logits=True)
        with evicting_engine(model, **SETTINGS, **caching) as llm:
            hits = []
            for ask, known in zip((*asked, *asked), (*expected, *expected), strict=True):
                (answer,) = run(llm, [ask], logits=True, recorded=False)
                assert max(differences([answer], [known])) < 1e-4
                hits.append(metric(llm, "prefix_cache_hits"))
        assert min(differences(expected[:1], expected[1:])) > 1e-2
        before_images = hits[1] - hits[0]
        assert hits[0] == 0 and before_images <= 32 < hits[2] - hits[1]
        assert hits[3] - hits[2] == hits[2] - hits[1]


@pytest.mark.engine
@pytest.mark.parametrize("policy", ["take", "kvzip"])
@pytest.mark.parametrize("kind", ["qwen2_vl"], scope="module", indirect=True)
def test_policies_that_read_text_only(model, kind, policy):
    with_images, text = asks(kind, policy, 0.4)[0], Ask(300, policy, 0.4)
    with evicting_engine(model, **SETTINGS) as llm:
        with pytest.raises(VLLMValidationError, match=f"kv_eviction {policy} needs a text-only prompt"):
            run(llm, [with_images], recorded=False)
        (answer,) = run(llm, [text])
    assert answer.kept


# Chats, of which what comes before the question is evicted.

DOCUMENT = words(200)


def conversation(*pictures_of_messages):
    """A chat whose user messages have so many images each, behind the text."""
    messages = [{"role": "system", "content": DOCUMENT}]
    for number, count in enumerate(pictures_of_messages):
        images = [{"type": "image_pil", "image_pil": picture(10 * number + i)} for i in range(count)]
        text = {"type": "text", "text": words(20, number)}
        messages.append({"role": "user", "content": [text, *images]})
        messages.append({"role": "assistant", "content": words(5, number)})
    return messages[:-1]


@pytest.mark.engine
@pytest.mark.parametrize("scope", ["prefix", "turns"])
def test_the_prefix_of_a_chat_ends_before_its_question(model, kind, scope):
    """Wherever images stand, and whatever is asked; other ends of turns are not looked for."""
    scope = {"scope": scope, "policy": "knorm", "budget": 0.5}
    sampling = SamplingParams(max_tokens=2, temperature=0)
    with evicting_engine(model, eviction=scope, **SETTINGS) as llm:
        for pictures in [(1, 0), (0, 2), (2, 1), (1, 2, 0), (1,), (0, 0)]:
            questions = conversation(*pictures), conversation(*pictures)
            questions[1][-1]["content"][0] = {"type": "text", "text": words(50, 9)}
            answers = decided(llm, llm.chat(list(questions), sampling, use_tqdm=False))
            user = llm.get_tokenizer().convert_tokens_to_ids("<user>")
            for answer in answers:
                before = len(answer.prompt) - 1 - answer.prompt[::-1].index(user)
                # The policy keeps the last token of what it evicts.
                assert {heads[0][-1] for heads in answer.kept[-1].values()} == {before - 1}
                assert len(answer.kept) == (1 if any(pictures) or scope["scope"] == "prefix" else 2)
            assert answers[0].kept == answers[1].kept and answers[0].prompt != answers[1].prompt


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["llava"], scope="module", indirect=True)
def test_prompts_that_fit_in_one_step_only(model, kind):
    """Text is read so; images are refused, since their encoder may need several steps."""
    policy = {"policy": "snapkv", "budget": 0.1}
    small = {**SETTINGS, "num_gpu_blocks_override": 5, "block_size": 128, "enable_prefix_caching": False}
    with evicting_engine(model, eviction=policy, **small) as llm:
        run(llm, [Ask(640, "snapkv", 0.1)])
        with pytest.raises(VLLMValidationError, match="tokens do not fit the KV cache: the longest"):
            run(llm, [AskWithImages(600, "snapkv", 0.1, sizes=SIZES)])
        run(llm, [AskWithImages(400, "snapkv", 0.1, sizes=SIZES)])
