"""A long chat in which each turn adds a tool's output and a question, with a budget for each request.

    vllm serve MODEL --kv-eviction full --enable-prompt-tokens-details &
    curl -s --retry 900 --retry-delay 1 --retry-connrefused http://localhost:8000/health
    python examples/chat_agent.py --url http://localhost:8000/v1

Each turn sends the whole chat again, as every chat client does. The server starts from the part that it has cached from
the turn before, reads the rest, and evicts down to the budget before it answers. What one turn evicts is not lost for
the next: the cache has the prompt as it was before its eviction.
"""

import argparse

from openai import OpenAI

ASKED = ["mary", "george", "victoria", "daniel", "grace", "simon", "lisa", "robert"]
OTHERS = """
kevin brian anne louis clark jeff jimmy chris bruce luke stephen gary matthew david howard james
"""
THINGS = ["coffee", "music", "tennis", "wine", "poetry", "cake", "fish", "horse"]
PLACES = ["airport", "hotel", "library", "office", "market"]


def tool_output(turn: int) -> str:
    """What a tool might return: 49 lines about people, one of which matters."""
    lines = [f"{other} works {place} ." for place in PLACES[:3] for other in OTHERS.split()]
    lines.insert(7 * turn % len(lines), f"{ASKED[turn]} likes {THINGS[turn]} .")
    return " ".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--policy", default="ada-snapkv")
    parser.add_argument("--budget", type=float, default=0.3)
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.url, api_key="none")
    model = client.models.list().data[0].id
    fields = {"kv_eviction": arguments.policy, "kv_budget": arguments.budget}
    messages = []
    for turn, name in enumerate(ASKED):
        messages.append({"role": "system", "content": tool_output(turn)})
        messages.append({"role": "user", "content": f"what {name} likes ?"})
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=8, temperature=0, extra_body={"vllm_xargs": fields}
        )
        reply = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        details = answer.usage.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        print(f"turn {turn + 1}: {answer.usage.prompt_tokens} prompt tokens, {cached} cached, {reply!r}")


if __name__ == "__main__":
    main()
