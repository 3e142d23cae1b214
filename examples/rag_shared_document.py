"""Ask many questions about one document: it is read and compressed for the first one, and cached for the others.

    vllm serve MODEL --kv-eviction kvzip --kv-budget 0.3 \\
      --kv-eviction-config.scope prefix --enable-prompt-tokens-details &
    curl -s --retry 900 --retry-delay 1 --retry-connrefused http://localhost:8000/health
    python examples/rag_shared_document.py --url http://localhost:8000/v1

With `scope` `prefix` everything before the last user message is compressed without the question in view. So one
compressed document serves all questions. With `--enable-prompt-tokens-details` answers say how many tokens were cached.
"""

import argparse
import itertools
import time

from openai import OpenAI
from openai.types import CompletionUsage

PEOPLE = """
mary george victoria daniel grace simon lisa robert kevin brian anne louis clark jeff jimmy chris
bruce luke stephen gary matthew david howard james nick rick kate ryan philip roman francis charlie
johnny robin billy lawrence morgan davis hamilton russell lewis gordon diego charles andy eric larry
peter matt roger adam kelly john
"""
FACTS = {
    "lives": ["london", "berlin", "austin", "dallas", "houston", "toronto", "italy"],
    "works": ["airport", "hotel", "library", "office", "market"],
    "likes": ["coffee", "music", "tennis", "wine", "poetry", "cake", "fish", "horse"],
    "drives": ["truck", "boat"],
}


def write_document() -> tuple[str, list[tuple[str, str]]]:
    """A document of facts, and questions about it with their answers."""
    facts = [
        (person, relation, things[number * (number + 1) % len(things)])
        for number, person in enumerate(PEOPLE.split())
        for relation, things in FACTS.items()
    ]
    document = " ".join(f"{person} {relation} {thing} ." for person, relation, thing in facts)
    asked = itertools.islice(facts, 5, None, 27)
    return document, [(f"what {who} {relation} ?", thing) for who, relation, thing in asked]


def ask(client: OpenAI, model: str, document: str, question: str) -> tuple[str, float, CompletionUsage]:
    """The answer, the seconds until its first token, and the counts of tokens."""
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": document}, {"role": "user", "content": question}],
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    words, first, usage = [], None, None
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - started
            words.append(chunk.choices[0].delta.content)
    return "".join(words).strip(), first or time.perf_counter() - started, usage


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://localhost:8000/v1")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.url, api_key="none")
    model = client.models.list().data[0].id
    document, questions = write_document()
    for question, expected in questions:
        reply, seconds, usage = ask(client, model, document, question)
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        print(
            f"first token after {1000 * seconds:.0f} ms, {cached} of {usage.prompt_tokens} tokens cached: "
            f"{question} {reply!r} (expected {expected})"
        )


if __name__ == "__main__":
    main()
