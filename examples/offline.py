"""Answer questions about a long text inside this process, with the full KV cache and with a part of it.

    python examples/offline.py MODEL [--policy ada-snapkv] [--budget 0.2]

MODEL is whatever `vllm serve` takes, for example benchmarks/quality/needle, the small model of this repository.
"""

import argparse

from vllm import LLM, SamplingParams

import vllm_kvevict.engine  # noqa: F401  adds kv_eviction and kv_budget to LLM(...)

TEXT = " ".join(f"the code of box {i} is {i * 37 % 1000} ." for i in range(150))
QUESTION = " the code of box 77 is"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--policy", default="ada-snapkv")
    parser.add_argument("--budget", type=float, default=0.2)
    arguments = parser.parse_args()

    llm = LLM(
        arguments.model,
        kv_eviction=arguments.policy,
        kv_budget=arguments.budget,
        max_model_len=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=False,
    )
    # extra_args is what vllm_xargs is over HTTP: it overrides the server's policy for one request.
    ways = {"full cache": {"kv_eviction": "full"}, f"{arguments.policy}, budget {arguments.budget:g}": {}}
    for name, fields in ways.items():
        sampling = SamplingParams(max_tokens=8, temperature=0, extra_args=fields)
        (output,) = llm.generate([TEXT + QUESTION], sampling, use_tqdm=False)
        print(f"{name}: {len(output.prompt_token_ids)} prompt tokens, answer {output.outputs[0].text!r}")
    for metric in llm.get_metrics():
        if metric.name in ("vllm:kv_eviction_evicted_tokens", "vllm:kv_eviction_freed_pages"):
            print(f"{metric.name} {metric.value:.0f}")


if __name__ == "__main__":
    main()
