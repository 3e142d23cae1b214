"""Send the same question to a running server with several policies and budgets.

    vllm serve MODEL --kv-eviction full &
    curl -s --retry 900 --retry-delay 1 --retry-connrefused http://localhost:8000/health
    python examples/per_request.py --url http://localhost:8000/v1

A server started with `--kv-eviction full` evicts only for requests that ask for it.
"""

import argparse

from openai import BadRequestError, OpenAI

TEXT = " ".join(f"the code of box {i} is {i * 37 % 1000} ." for i in range(100))
QUESTION = " the code of box 42 is"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://localhost:8000/v1")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.url, api_key="none")
    model = client.models.list().data[0].id
    for fields in (
        {},
        {"kv_eviction": "snapkv", "kv_budget": 0.5},
        {"kv_eviction": "ada-snapkv", "kv_budget": 256},
        {"kv_eviction": "lava"},
    ):
        answer = client.completions.create(
            model=model,
            prompt=TEXT + QUESTION,
            max_tokens=8,
            temperature=0,
            extra_body={"vllm_xargs": fields},
        )
        print(f"{fields or 'the server decides'}: {answer.choices[0].text!r}")
    try:
        client.completions.create(model=model, prompt=TEXT, extra_body={"vllm_xargs": {"kv_budget": -1}})
    except BadRequestError as error:
        print(f"a bad value is refused: {error.message}")


if __name__ == "__main__":
    main()
