"""Answer a batch of questions inside this process: with the full KV cache, and with two policies, in one call.

    python examples/offline.py MODEL [--policies ada-snapkv lava] [--budget 0.2]

MODEL is whatever `vllm serve` takes, for example benchmarks/quality/needle, the small model of this repository.
"""

import argparse

from vllm import LLM, SamplingParams

import vllm_kvevict.engine  # noqa: F401  adds kv_eviction and kv_budget to LLM(...)

PEOPLE = """
mary george victoria daniel grace simon lisa robert kevin brian anne louis clark jeff jimmy chris
bruce luke stephen gary matthew david howard james nick rick kate ryan philip roman francis charlie
johnny robin billy lawrence morgan davis hamilton russell lewis gordon diego charles andy eric larry
peter matt roger adam kelly john
"""
PLACES = ["london", "berlin", "austin", "dallas", "houston", "toronto", "italy"]
THINGS = ["coffee", "music", "tennis", "wine", "poetry", "cake", "fish", "horse", "truck"]
TEXT = " ".join(
    f"{name} {verb} {things[number * (number + 1) % len(things)]} ."
    for verb, things in (("lives", PLACES), ("works", PLACES), ("likes", THINGS), ("drives", THINGS))
    for number, name in enumerate(PEOPLE.split())
)
QUESTIONS = ("what daniel lives ?", "what anne likes ?", "what chris drives ?")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--policies", nargs="+", default=["ada-snapkv", "lava"])
    parser.add_argument("--budget", type=float, default=0.2)
    arguments = parser.parse_args()

    llm = LLM(
        arguments.model,
        kv_eviction="full",  # evicts only where a request asks for it
        kv_budget=arguments.budget,
        max_model_len=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=False,
    )
    # extra_args is what vllm_xargs is over HTTP: it chooses the policy of one request.
    batch = [(policy, question) for policy in ("full", *arguments.policies) for question in QUESTIONS]
    outputs = llm.chat(
        [[{"role": "system", "content": TEXT}, {"role": "user", "content": asked}] for _, asked in batch],
        [SamplingParams(max_tokens=8, temperature=0, extra_args={"kv_eviction": name}) for name, _ in batch],
        use_tqdm=False,
    )
    for (policy, question), output in zip(batch, outputs, strict=True):
        tokens, answer = len(output.prompt_token_ids), output.outputs[0].text
        print(f"{policy}: {tokens} prompt tokens, {question} {answer!r}")
    for metric in llm.get_metrics():
        if metric.name in ("vllm:kv_eviction_evicted_tokens", "vllm:kv_eviction_freed_pages"):
            print(f"{metric.name} {metric.value:.0f}")


if __name__ == "__main__":
    main()
