"""Scores by the suites' own definitions, each from 0 to 1.

``qa_f1``: F1 of the words of reply and answer, without case, punctuation and articles.
``rouge_l``: as the package ``rouge`` computes it for LongBench. Texts are cut into sentences at full stops; a word is
    covered if it is in a longest common subsequence of any sentence of the answer and any of the reply; precision and
    recall are the covered words' shares of the distinct words of reply and answer. Not the plain ROUGE-L of the papers.
    That package gives 0 where a sentence is too long for its recursion; here it is scored.
``rouge_l_sum``: rougeLsum of ``rouge_score`` without stemming, as InfiniteBench uses it: sentences are lines, and of a
    word no more occurrences count than both texts have.
``code_similarity``: as ``fuzzywuzzy.ratio`` without python-Levenshtein, which is difflib's ratio in whole percent.
``string_match_all``, ``string_match_part``: RULER's; the share of the expected strings in the reply, or any of them.
"""

import importlib
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from difflib import SequenceMatcher
from typing import Any

from vllm_kvevict.quality.suites.sample import SuiteError

Pair = Callable[..., float]
"""From a reply and one answer to a score."""

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
CHINESE = (
    "–—‘’‛“”„‟…‧、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿﹏"  # noqa: RUF001
    "！＂＃＄％＆＇（）＊＋，－／：；＜＝＞？＠［＼］＾＿｀｛｜｝～｟｠｡｢｣､"  # noqa: RUF001
)
CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE)


def best(reply: str, answers: Sequence[Any], pair: Pair, first_line: bool = False) -> float:
    """The highest score over all answers.

    Args:
        first_line: of the reply, only the first line that is not empty counts.
    """
    if first_line:
        reply = reply.lstrip("\n").split("\n")[0]
    return max((pair(reply, answer) for answer in answers), default=0.0)


def f1(reply: Sequence[Hashable], answer: Sequence[Hashable]) -> float:
    """F1 of two bags of tokens."""
    same = sum((Counter(reply) & Counter(answer)).values())
    return 2 * same / (len(reply) + len(answer)) if same else 0.0


def words(text: str) -> list[str]:
    """Words without case, punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def qa_f1(reply: str, answer: str) -> float:
    return f1(words(reply), words(answer))


def chinese_words() -> Callable[[str], list[str]]:
    """The splitter of Chinese text into words.

    Raises:
        SuiteError: the package ``jieba`` is not installed.
    """
    try:
        return importlib.import_module("jieba").lcut
    except ImportError:
        raise SuiteError(
            "LongBench's multifieldqa_zh, dureader and vcsum are scored by words that the package 'jieba' finds, "
            "which is not installed: install it, or name other tasks"
        ) from None


def bare(text: str) -> str:
    """Chinese text without case, punctuation and spaces."""
    return "".join(text.lower().translate(CHINESE_PUNCTUATION).split())


def qa_f1_zh(reply: str, answer: str) -> float:
    """`qa_f1` of Chinese words."""
    split = chinese_words()
    first, second = ([bare(word) for word in split(text)] for text in (reply, answer))
    return f1([word for word in first if word], [word for word in second if word])


def character_f1(reply: str, answer: str) -> float:
    """`qa_f1` of characters, for Chinese."""
    return f1(bare(reply), bare(answer))


def common(answer: Sequence[str], reply: Sequence[str], keep_answer: bool) -> list[int]:
    """Places in `answer` of a longest common subsequence.

    Args:
        keep_answer: going backwards, where either text can be shortened, shorten the reply instead of the answer.
    """
    rows = [[0] * (len(reply) + 1)]
    for word in answer:
        above, row = rows[-1], [0]
        for place, other in enumerate(reply):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[place]))
        rows.append(row)
    places: list[int] = []
    i, j = len(answer), len(reply)
    while i and j:
        up, left = rows[i - 1][j], rows[i][j - 1]
        if answer[i - 1] == reply[j - 1]:
            i, j = i - 1, j - 1
            places.append(i)
        elif left > up or (left == up and keep_answer):
            j -= 1
        else:
            i -= 1
    return places


def rouge_l(reply: str, answer: str) -> float:
    """ROUGE-L as in the package ``rouge``; see above."""
    replied, expected = (
        [" ".join(part.split()).split(" ") for part in text.split(".") if part] for text in (reply, answer)
    )
    if not replied or not expected:
        return 0.0
    covered = {
        sentence[place]
        for sentence in expected
        for other in replied
        for place in common(sentence, other, keep_answer=True)
    }
    precision, recall = (
        len(covered) / len({word for sentence in text for word in sentence}) for text in (replied, expected)
    )
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(reply: str, answer: str) -> float:
    """`rouge_l` of Chinese words."""
    split = chinese_words()
    return rouge_l(" ".join(split(reply)), " ".join(split(answer)))


def rouge_l_sum(reply: str, answer: str) -> float:
    """rougeLsum as in the package ``rouge_score``; see above."""
    replied, expected = (
        [re.findall("[a-z0-9]+", line.lower()) for line in text.split("\n")] for text in (reply, answer)
    )
    counts = [Counter(word for line in text for word in line) for text in (replied, expected)]
    left, hits = counts[0] & counts[1], 0
    for line in expected:
        covered = {place for other in replied for place in common(line, other, keep_answer=False)}
        for place in sorted(covered):
            if left[line[place]]:
                left[line[place]] -= 1
                hits += 1
    return 2 * hits / sum(map(Counter.total, counts)) if hits else 0.0


def classification(reply: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes that the reply names, if the answer is among them.

    A class whose name is a part of the answer's does not count. As in the suite, the class that follows such a one is
    not examined for that.
    """
    named = [name for name in classes if name in reply]
    place = 0
    while place < len(named):
        if named[place] in answer and named[place] != answer:
            del named[place]
        place += 1
    return 1 / len(named) if answer in named else 0.0


def share_of_numbers(reply: str, number: str) -> float:
    """The share of a reply's numbers that are this one."""
    numbers = re.findall(r"\d+", reply)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def count(reply: str, answer: str) -> float:
    return share_of_numbers(reply, str(answer))


def retrieval(reply: str, answer: str) -> float:
    """The answer reads "Paragraph 3"."""
    return share_of_numbers(reply, re.findall(r"Paragraph (\d+)", answer)[0])


def retrieval_zh(reply: str, answer: str) -> float:
    return share_of_numbers(reply, re.findall(r"段落(\d+)", answer)[0])


def code_similarity(reply: str, answer: str) -> float:
    """Similarity of the answer to the reply's first line without a comment sign or backtick."""
    lines = reply.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("[`#]|//", line)), "")
    if line == answer:
        return 1.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100 if line and answer else 0.0


def string_match_all(reply: str, answers: Sequence[str]) -> float:
    """The share of the answers that the reply contains, in any case."""
    return sum(answer.lower() in reply.lower() for answer in answers) / len(answers)


def string_match_part(reply: str, answers: Sequence[str]) -> float:
    """Whether the reply contains any of the answers, in any case."""
    return float(any(answer.lower() in reply.lower() for answer in answers))
