"""Suites read from small folders in their own formats, and their scores."""

import json
import string
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_kvevict.quality.suites import SuiteError, choices, load, metrics

LONGBENCH_PROMPTS = {
    "hotpotqa": "Read this.\n{context}\n\nNow say: {input}\nReply:",
    "trec": "Kinds of questions.\n{context}\n{input}",
    "lcc": "Go on. \n{context}Next:\n",
    "gov_report": "{context}\n\nSum {{it}} up.",
    "multifieldqa_zh": "{context}{input}",
    "qmsum": "{input} {context}",
}
LENGTHS = {"hotpotqa": 32, "trec": 64, "lcc": 64, "gov_report": 512, "multifieldqa_zh": 64, "qmsum": 512}

PROMPT_PY = """
raise RuntimeError("this file is parsed, not run")
yarn_mistral_templates = {
    "passkey": "Look.\\n\\n{context}\\n\\n{input}\\n\\nThe key is",  # noqa
    # "longbook_sum_eng": "old",
    "code_run": "There is {func}.\\n{context}\\nValue of {func_call}:",
    "longbook_choice_eng": "Book: {context}\\nAsk: {question}\\nA. {OPTION_A}\\nB. {OPTION_B}\\n"
    "C. {OPTION_C}\\nD. {OPTION_D}",
    "math_find": "{prefix}\\n{context}\\n{input}",
    "math_calc": "Work out {context}:",
    "longbook_qa_chn": "{context} {nothing}",
}
gpt4_templates = {"passkey": "Q: {input}" + " in {context}", "math_calc": "never"}
other = 3
"""


def write(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def longbench_record(**changes) -> dict:
    record = {
        "input": "Who {sings}?",
        "context": "Ann sings.\nBob {digs}.",
        "answers": ["Ann", "the Ann"],
        "all_classes": None,
        "dataset": "x",
    }
    return record | changes


@pytest.fixture
def longbench(tmp_path):
    write(tmp_path / "LongBench" / "config" / "dataset2prompt.json", LONGBENCH_PROMPTS)
    write(tmp_path / "LongBench" / "config" / "dataset2maxlen.json", LENGTHS)
    write(tmp_path / "data" / "hotpotqa.jsonl", longbench_record(), longbench_record(input="Why?"))
    classes = ["Abbreviation", "Place", "Other place"]
    write(tmp_path / "data" / "trec.jsonl", longbench_record(answers=["Place"], all_classes=classes))
    write(tmp_path / "data" / "lcc.jsonl", longbench_record(input="", answers=["return x"]))
    return tmp_path


@pytest.fixture
def infinitebench(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "prompt.py").write_text(PROMPT_PY)
    write(
        tmp_path / "data" / "passkey.jsonl", {"id": 0, "context": "hay", "input": "Key?", "answer": ["123"]}
    )
    return tmp_path


# Samples


def test_longbench_prompts_are_the_suites_own_and_split_after_the_context(longbench):
    samples = load("longbench", longbench)
    assert [(s.task, s.index) for s in samples] == [("hotpotqa", 0), ("hotpotqa", 1), ("trec", 0), ("lcc", 0)]
    for sample in samples:
        fields = {"context": "Ann sings.\nBob {digs}.", "input": ["Who {sings}?", "Why?"][sample.index]}
        assert sample.context + sample.question == LONGBENCH_PROMPTS[sample.task].format(**fields)
        assert sample.context.endswith("Bob {digs}.")
        assert sample.max_tokens == LENGTHS[sample.task]
    assert [s.chat for s in samples] == [True, True, False, False]
    assert (samples[0].suite, samples[0].answers) == ("longbench", ("Ann", "the Ann"))


def test_longbench_takes_the_best_answer_and_the_first_line_where_the_suite_does(longbench):
    hotpot, _, trec, lcc = load("longbench", longbench)
    assert hotpot.score("The ann.") == 1.0
    assert hotpot.score("Bob\nAnn") == pytest.approx(2 / 3)
    assert trec.score("\nPlace\nAbbreviation") == 1.0
    assert trec.score("Abbreviation or Place") == 0.5
    assert lcc.score("# a comment\nreturn x\nreturn y") == 1.0


def test_longbench_braces_and_questions_before_the_context(longbench):
    write(longbench / "data" / "gov_report.jsonl", longbench_record())
    write(longbench / "data" / "qmsum.jsonl", longbench_record())
    report, meeting = load("longbench", longbench, tasks=["gov_report", "qmsum"])
    assert (report.context, report.question) == ("Ann sings.\nBob {digs}.", "\n\nSum {it} up.")
    assert (meeting.context, meeting.question) == ("", "Who {sings}? Ann sings.\nBob {digs}.")


def test_longbench_older_layout_limit_and_prompts_elsewhere(tmp_path, longbench):
    write(tmp_path / "old" / "hotpotqa.jsonl", longbench_record(), longbench_record())
    (sample,) = load("longbench", tmp_path / "old", limit=1, prompts=longbench)
    assert (sample.suite, sample.task) == ("longbench", "hotpotqa")
    assert len(load("longbench", longbench, tasks=["hotpotqa"], limit=1)) == 1


def test_longbench_in_chinese_needs_jieba(longbench, monkeypatch):
    write(longbench / "data" / "multifieldqa_zh.jsonl", longbench_record(answers=["天气、好"]))
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(SuiteError, match="'jieba'"):
        load("longbench", longbench)
    assert load("longbench", longbench, tasks=["hotpotqa"])
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(lcut=list))
    (sample,) = load("longbench", longbench, tasks=["multifieldqa_zh"])
    assert sample.score("天气。坏") == pytest.approx(2 / 3)


NIAH = "Some magic is hidden. I will ask.\nWhat a day. One is: 7.\nWhat are all the special magic numbers for cat?"
PREFIX = " The special magic numbers for cat are"


@pytest.mark.parametrize("kept_apart", [False, True])
def test_ruler_prompts_are_whole_and_split_before_the_question(tmp_path, kept_apart):
    record = {"index": 3, "input": NIAH + PREFIX, "outputs": ["7", "Ab"], "length": 90}
    if kept_apart:
        record |= {"input": NIAH, "answer_prefix": PREFIX, "length_w_model_temp": 95}
    write(tmp_path / "niah_multivalue" / "validation.jsonl", record)
    (sample,) = load("ruler", tmp_path)
    assert sample.context + sample.question == NIAH + PREFIX
    assert sample.question.startswith("What are all") and sample.context.endswith("One is: 7.\n")
    assert (sample.task, sample.max_tokens) == ("niah_multivalue", 128)
    assert (sample.chat, sample.answer_prefix) == (kept_apart, PREFIX if kept_apart else "")
    assert sample.score(" 7\x01aB") == 1.0
    assert sample.score("17") == 0.5


def test_ruler_families_examples_and_layouts(tmp_path):
    example = "Track.\nQuestion: Find X. Answer: A\n\n"
    write(tmp_path / "data" / "vt.jsonl", {"input": example + "Track.\nQuestion: Find Y.", "outputs": ["B"]})
    write(tmp_path / "data" / "qa_1" / "validation.jsonl", {"input": "No mark.", "outputs": ["B", "C"]})
    samples = {sample.task: sample for sample in load("ruler", tmp_path)}
    assert samples["vt"].context == example + "Track.\n"
    assert (samples["vt"].max_tokens, samples["qa_1"].max_tokens) == (30, 32)
    assert (samples["qa_1"].context, samples["qa_1"].question) == ("", "No mark.")
    assert samples["qa_1"].score("c!") == 1.0
    assert load("ruler", tmp_path / "data" / "qa_1")[0].task == "qa_1"


def test_infinitebench_templates_are_read_without_running_the_file(infinitebench):
    (sample,) = load("infinitebench", infinitebench)
    assert (sample.context, sample.question) == ("Look.\n\nhay", "\n\nKey?\n\nThe key is")
    assert (sample.max_tokens, sample.chat, sample.score("It is 123.")) == (6, False, 1.0)


def test_infinitebench_fields_that_the_suite_derives(infinitebench):
    options = ["Ann", "Bob", "Cid", "Dan"]
    rows = {
        "code_run": {"input": "Give func_12(-3).", "answer": [-7]},
        "longbook_choice_eng": {"input": "Who?", "answer": ["Bob"], "options": options},
        "math_find": {"input": "The largest number of the list is: ", "answer": [9]},
        "math_calc": {"input": "", "answer": [[1, 2, 3, 4]]},
    }
    for task, row in rows.items():
        write(infinitebench / "data" / f"{task}.jsonl", {"context": "text"} | row)
    samples = {sample.task: sample for sample in load("infinitebench", infinitebench)}
    assert samples["code_run"].context == ""
    assert samples["code_run"].question == "There is func_12.\ntext\nValue of func_12(-3):"
    choice = samples["longbook_choice_eng"]
    assert (choice.context, choice.answers) == ("Book: text", ("Bob", "B"))
    assert choice.question == "\nAsk: Who?\nA. Ann\nB. Bob\nC. Cid\nD. Dan"
    find = samples["math_find"]
    assert find.context + find.question == (
        "What is the largest number in the following list?\ntext\nThe largest number of the list is: "
    )
    assert samples["math_calc"].score("[1, 2, 4, 4]") == 0.5


def test_hub_records_are_read_like_files(longbench, monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return [longbench_record(), longbench_record()]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    samples = load("longbench", None, tasks=["hotpotqa"], limit=1, prompts=longbench)
    assert [sample.max_tokens for sample in samples] == [32]
    assert asked == [(("THUDM/LongBench", "hotpotqa"), {"split": "test"})]


# Errors


def test_what_is_missing_is_named(tmp_path, longbench, infinitebench, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)

    def refused(match, *args, **options):
        with pytest.raises(SuiteError, match=match):
            load(*args, **options)

    refused("unknown suite 'glue'", "glue", tmp_path)
    refused("no folder .*nowhere", "ruler", tmp_path / "nowhere")
    refused("RULER: no <task>/validation.jsonl", "ruler", tmp_path / "src")
    refused("RULER is not on the hub", "ruler", None)
    refused("no task 'squad'; it has: narrativeqa", "longbench", longbench, tasks=["squad"])
    refused("no file qasper.jsonl in .*data", "longbench", longbench, tasks=["qasper"])
    refused("no dataset2prompt.json in .*--prompts", "longbench", longbench / "data")
    for suite in ("longbench", "infinitebench"):
        refused("--prompts FOLDER", suite, None)
        refused("'datasets', which is not installed", suite, None, prompts=longbench)
    refused("no prompt.py in .*--prompts", "infinitebench", tmp_path / "data")
    prompts = infinitebench / "src" / "prompt.py"
    prompts.write_text(prompts.read_text().replace("yarn_mistral", "kimi"))
    refused("no yarn_mistral_templates; it has: kimi, gpt4", "infinitebench", infinitebench)


def test_malformed_records_are_named_with_file_and_line(longbench, infinitebench):
    def refused(match, suite, folder, task, *records):
        write(folder / "data" / f"{task}.jsonl", *records)
        with pytest.raises(SuiteError, match=match):
            load(suite, folder, tasks=[task])

    short = longbench_record()
    del short["answers"]
    refused(
        "hotpotqa.jsonl, line 2: field 'answers'",
        "longbench",
        longbench,
        "hotpotqa",
        longbench_record(),
        short,
    )
    refused(
        "line 1: field 'answers' is not", "longbench", longbench, "hotpotqa", longbench_record(answers="A")
    )
    refused("line 1: field 'all_classes' is empty", "longbench", longbench, "trec", longbench_record())
    refused("line 1: not a JSON object", "longbench", longbench, "lcc", [1])
    refused("dataset2prompt.json .*'vcsum' is missing|jieba", "longbench", longbench, "vcsum", short)
    refused("vt.jsonl, line 1: field 'outputs' is missing", "ruler", longbench, "vt", {"input": "a"})
    refused("'sums' is no task of RULER", "ruler", longbench, "sums", {"input": "a", "outputs": ["b"]})
    row = {"context": "a", "input": "b", "answer": ["c"]}
    for task, match in {
        "longbook_choice_eng": "field 'options' is not a list of four",
        "code_run": "field 'input' has nothing like",
        "longbook_qa_chn": "uses 'nothing'",
        "kv_retrieval": "yarn_mistral_templates .*'kv_retrieval' is missing",
    }.items():
        refused(match, "infinitebench", infinitebench, task, row)
    path = longbench / "data" / "lcc.jsonl"
    path.write_text("\n{broken\n")
    with pytest.raises(SuiteError, match=r"lcc.jsonl, line 2: not JSON"):
        load("longbench", longbench, tasks=["lcc"])


# Metrics


@pytest.mark.parametrize(
    ("pair", "reply", "answer", "expected"),
    [
        # cat, sat / cat, sat, down: precision 1, recall 2/3
        (metrics.qa_f1, "The cat sat!", "a cat sat down", 0.8),
        (metrics.qa_f1, "", "cat", 0.0),
        (metrics.character_f1, "天气 好。", "天气", 0.8),
        # covered: a, c of the distinct words a, b, c and a, c, d
        (metrics.rouge_l, "a b c", "a c d", 2 / 3),
        # "b a" against two sentences covers b with the first and a with the second
        (metrics.rouge_l, "b a", "b. a", 1.0),
        (metrics.rouge_l, "a a a a", "a", 1.0),
        (metrics.rouge_l, "...", "a", 0.0),
        # two of three words, then two of two
        (metrics.rouge_l_sum, "A, b!", "a b c", 0.8),
        (metrics.rouge_l_sum, "a a a a", "a", 0.4),
        (metrics.rouge_l_sum, "b\na", "a\nb", 1.0),
        (metrics.rouge_l_sum, "", "a", 0.0),
        (metrics.count, "3 of 12", "3", 0.5),
        (metrics.count, "none", "3", 0.0),
        (metrics.retrieval, "Paragraph 4, not 14", "Paragraph 4", 0.5),
        (metrics.retrieval_zh, "段落4", "段落4", 1.0),
        # 2 * 3 matching characters of 4 + 4
        (metrics.code_similarity, "// no\nabcd", "abce", 0.75),
        (metrics.code_similarity, "# no", "abce", 0.0),
        # 2 * 2 of 2 + 7, in whole percent
        (metrics.code_similarity, "ab", "abcdefg", 0.44),
    ],
)
def test_metrics_of_one_answer(pair, reply, answer, expected):
    assert pair(reply, answer) == pytest.approx(expected, abs=1e-6)


def test_classes_within_the_answers_name_do_not_count():
    classes = ["Place", "Other place", "Place of birth"]
    assert metrics.classification("Place of birth", "Place of birth", classes) == 1.0
    assert metrics.classification("Place of birth", "Place", classes) == 0.5
    assert metrics.classification("nothing", "Place", classes) == 0.0


@pytest.mark.parametrize(
    ("metric", "reply", "answers", "expected"),
    [
        (metrics.string_match_all, "one, TWO", ("One", "two", "three", "four"), 0.5),
        (metrics.string_match_part, "two", ("One", "two"), 1.0),
        (metrics.string_match_part, "three", ("One", "two"), 0.0),
        (choices.first_integer, "key 12, 3", ("12",), 1.0),
        (choices.first_integer, "key 012", ("12",), 0.0),
        (choices.first_number, "It is 3.5.", (3.5,), 1.0),
        (choices.first_number, "It is 35.", ("35",), 1.0),
        (choices.first_number, "none", (35,), 0.0),
        (choices.last_integer, "The value: `-7`.", (-7,), 1.0),
        (choices.last_integer, "-7 it is", (-7,), 0.0),
        (choices.leading_numbers, "1 2 3", ("[1, 2, 3, 4]",), 0.75),
        (choices.leading_numbers, "", (1, 2), 0.0),
        (choices.contains_word, '{"k": "ab-c"}', ("ab-c",), 1.0),
        (choices.contains_word, "ab-cd", ("ab-c",), 0.0),
        (choices.names_one, "it was Ann Lee", ("BOB", "ANN LEE"), 1.0),
        (choices.choice, "B", ("Bob", "B"), 1.0),
        (choices.choice, "Anna", ("Anna", "B"), 0.0),  # begins with the letter of another option
        (choices.choice, "Bob", ("Bob", "B"), 1.0),
        (choices.choice, "the answer is: Zoe", ("Zoe", "B"), 1.0),
        (choices.choice, "who knows", ("Zoe", "B"), 0.0),
        (choices.choice, "", ("Zoe", "B"), 0.0),
        (choices.faulty_function, "Option C.", ("run", "C"), 1.0),
        (choices.faulty_function, "it is: `run`", ("run", "C"), 1.0),
        (choices.faulty_function, "it is:", ("run", "C"), 0.0),
    ],
)
def test_metrics_of_all_answers(metric, reply, answers, expected):
    assert metric(reply, answers) == expected


def test_all_ascii_punctuation_is_dropped():
    assert metrics.words(string.punctuation + "An owl") == ["owl"]
