"""How many requests fit a KV memory, with and without eviction: ``python -m vllm_kvevict.sizing --help``.

No server is started, no weights are read. The engine's own ledger and bounds compute the numbers, for the kind of
device that the installed vLLM is built for; vLLM is imported once they are needed.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.policies import available, take

DTYPES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
FLAGS = {"--kv-eviction-config": "--config", "--kv-eviction": "--policy", "--kv-budget": "--budget"}
COLUMNS = ("budget", "kept", "reading", "evicted", "end", "at once", "at end", "longest", "layered", "limit")
LEGEND = """
kept: entries per KV head. reading, evicted, end: MiB of a request on its fullest rank: at most while its prompt is
read, after its eviction, at its last token. at once: how many run when many arrive together, and what limits it; at
end: how many fit if all are at their last token (if fewer, some may be preempted). longest: prompt that fits alone.
layered: whether it is evicted layer by layer as it is read. Heads that compete are taken to share ranks evenly."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A model and what ``vllm serve`` makes of it; ``memory`` in bytes per rank, sizes of pages and steps in tokens."""

    layers: int
    kv_heads: int
    head_dim: int
    max_len: int
    memory: int
    dtype_size: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    page_size: int = 32
    block_size: int = 128
    max_num_batched_tokens: int = 2048

    @property
    def entry(self) -> int:
        """Bytes of one token in one KV head of one layer."""
        return 2 * self.head_dim * self.dtype_size

    @property
    def heads(self) -> int:
        """KV heads of one rank."""
        return max(1, self.kv_heads // self.tensor_parallel_size)

    @property
    def blocks(self) -> int:
        """vLLM's blocks: the stage with the most layers has room for the fewest, and every stage gets as many."""
        from vllm.distributed.utils import get_pp_indices

        stages = self.pipeline_parallel_size
        spans = [get_pp_indices(self.layers, stage, stages) for stage in range(stages)]
        most = max(end - first for first, end in spans)
        return self.memory // (self.entry * self.heads * self.block_size * most)

    def vllm_config(self, options: Any) -> Any:
        """As much of a VllmConfig as the engine's memory checks read."""
        space, step = SimpleNamespace, self.max_num_batched_tokens
        model = space(max_model_len=self.max_len)
        model.get_total_num_hidden_layers = lambda: self.layers
        model.get_num_kv_heads = lambda parallel_config: self.heads
        model.get_total_num_kv_heads = lambda: self.kv_heads
        scheduler = space(max_num_scheduled_tokens=step, long_prefill_token_threshold=0)
        return space(
            additional_config={"kv_eviction": options.to_dict()},
            model_config=model,
            parallel_config=space(pipeline_parallel_size=self.pipeline_parallel_size),
            cache_config=space(block_size=self.block_size, num_gpu_blocks=self.blocks),
            scheduler_config=scheduler,
        )

    def ledger(self, options: Any, ranks: Sequence[Any]) -> Any:
        """The ledger of the server's scheduler, without the scheduler."""
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from vllm_kvevict.engine.ledger import PageLedger

        block, step, stages = self.block_size, self.max_num_batched_tokens, self.pipeline_parallel_size
        spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=16, dtype=torch.float16)
        idle = KVCacheConfig(2, [], [KVCacheGroupSpec(["layer"], spec)])
        ours = {"max_num_batched_tokens": step, "longest_step": step, "num_stages": stages}
        ledger = PageLedger(idle, self.max_len, block, block, enable_caching=False, options=options, **ours)
        ledger.ranks, ledger.capacity = list(range(len(ranks))), list(ranks)
        return ledger


SIZES: dict[str, Any] = {x.name: x.default for x in fields(Server) if isinstance(x.default, int)}


def size(server: Server, settings: Mapping[str, Any], prompt: int, output: int) -> dict[str, Any]:
    """A row of the table, memory in bytes, for requests of ``prompt`` and ``output`` tokens; see ``LEGEND``.

    Settings are as of ``additional_config["kv_eviction"]``; ValueError names one that cannot be served.
    """
    from vllm_kvevict.engine import checks, memory
    from vllm_kvevict.engine.config import Options

    options = Options.parse({"page_size": server.page_size, **settings})
    vllm_config = server.vllm_config(options)
    checks.check_policy(vllm_config, options.request_config(None)[0], "--policy")
    ranks, step = memory.rooms(vllm_config), server.max_num_batched_tokens
    ledger = server.ledger(options, ranks)
    request: Any = SimpleNamespace(request_id="", num_preemptions=0, sampling_params=None, max_tokens=output)
    request.num_tokens = request.num_prompt_tokens = prompt
    plan = ledger.plan(request)
    steps = max(-(-prompt // step), len(plan.cuts) + 1)
    counts = [after_eviction(plan, prompt, room, server.page_size) for room in ranks]
    alone = ledger._open(request, min(prompt, step))

    def admits(others: int) -> bool:
        """Whether one more is admitted beside others whose prompts were read one after the other, the last just now."""
        tokens = [prompt + min(steps * i, output - 1) for i in range(others)]
        ledger.accounts = {str(i): replace(alone, counts=counts, tokens=n) for i, n in enumerate(tokens)}
        new = ledger._open(request, min(prompt, step - others))
        peaks = any(new.peak[r] + ledger._held_soon(r, steps) > room.pages for r, room in enumerate(ranks))
        limits.append("reading prompts" if peaks else "answers")
        return ledger.fits(plan, prompt, new.recycles) and ledger._admits(new)

    limits, low, high = [""], 0, step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if admits(middle - 1) else (low, middle - 1)
    if low < step:
        admits(low)
    now, ends = ([count.at(tokens) for count in counts] for tokens in (prompt, prompt + output - 1))
    row = (
        "full" if plan.config.policy == "full" else f"{options.budget:g}",
        prompt if plan.evict_at is None else plan.config.budget_for(prompt),
        *(max(pages) * server.entry * server.page_size for pages in (alone.peak, now, ends)),
        low,
        min(room.pages // pages for room, pages in zip(ranks, ends, strict=True)),
        memory._longest(vllm_config, options, plan, ranks),
        "yes" if alone.recycles else "no",
        limits[-1] if low < step else "tokens of a step",
    )
    return dict(zip(COLUMNS, row, strict=True))


def after_eviction(plan: Any, prompt: int, room: Any, page_size: int) -> PageCount:
    """Pages of a request on a rank once its prompt is read; rows that compete are taken to end anywhere in a page."""
    config, rows, layers = plan.config, room.rows, room.num_model_layers
    budgets = config.layer_budgets(prompt, layers) if plan.evict_at else [prompt] * layers
    if plan.evict_at and config.chunked:
        budgets = [take.chunk_budget(config, prompt, layer, layers, True) for layer in range(layers)]
    mine = budgets[room.first_layer :][: room.num_layers]
    lengths = [budget for budget in mine for _ in range(room.num_kv_heads)]
    if plan.evict_at and (config.heads_compete or config.weighted or config.one_stage):
        spread = [(2 * row + 1) * page_size // (2 * rows) - page_size // 2 for row in range(rows)]
        lengths = [max(1, min(kept + more, prompt)) for kept, more in zip(lengths, spread, strict=True)]
    residues = [sum(kept % page_size == rest for kept in lengths) for rest in range(page_size)]
    return PageCount.from_residues(sum(-(-kept // page_size) for kept in lengths), prompt, residues)


def read_model(name: str) -> dict[str, int]:
    """What the KV cache depends on, from a folder, a config.json or a Hugging Face id that transformers can find."""
    path = Path(name)
    try:
        if path.exists():
            config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        else:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(name).to_dict()
        config = config.get("text_config") or config
        heads = config["num_attention_heads"]
        others = {*(config.get("layer_types") or ())} - {"attention", "full_attention"}
        if others or config.get("kv_lora_rank"):
            raise NotImplementedError
        return {
            "layers": config["num_hidden_layers"],
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "max_len": config["max_position_embeddings"],
        }
    except NotImplementedError:
        reason = "eviction serves models with full attention in every layer only"
    except KeyError as error:
        reason = f"its configuration has no {error.args[0]}"
    except (OSError, ValueError, ImportError) as error:
        reason = f"there is no configuration ({' '.join(str(error).split())[:200]})"
    raise ValueError(f"--model {name}: {reason}")


def parse_memory(text: str) -> int:
    """Bytes in ``20GiB``, ``500MB`` or a plain number."""
    found = re.fullmatch(r"(\d+\.?\d*)\s*(?:([kmgt]?)(i?)b)?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 20GiB, got {text!r}")
    number, prefix, binary = found.groups("")
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m vllm_kvevict.sizing", description=__doc__, epilog=LEGEND)
    parser.add_argument("--model", required=True, help="folder, config.json or Hugging Face id")
    parser.add_argument("--memory", required=True, type=parse_memory, help="per rank, such as 20GiB")
    parser.add_argument("--budget", nargs="+", default=["0.1", "0.2", "0.4"], help="as of --kv-budget")
    parser.add_argument("--policy", default="ada-snapkv", choices=available(), metavar="POLICY")
    parser.add_argument("--config", type=json.loads, default={}, help="as of --kv-eviction-config")
    for name, default in {"prompt": 8192, "output": 512, **SIZES}.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="default the model's")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of keys and values; auto is 16 bit")
    args = parser.parse_args(arguments)
    try:
        print(report(args))
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: the engine's own functions compute the numbers")
    except ValueError as error:
        parser.error(re.sub("|".join(FLAGS), lambda found: FLAGS[found[0]], str(error)))


def report(args: argparse.Namespace) -> str:
    """The model's figures and the table, a line without eviction first."""
    model = read_model(args.model)
    model["max_len"] = args.max_model_len or model["max_len"]
    for name in ("prompt", "output", *SIZES):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.prompt + args.output > model["max_len"]:
        raise ValueError(f"--prompt and --output exceed the {model['max_len']} tokens of --max-model-len")
    if args.block_size % args.page_size:
        raise ValueError(f"--page-size {args.page_size} must divide --block-size {args.block_size}")
    model |= {name: getattr(args, name) for name in SIZES}
    server = Server(**model, memory=args.memory, dtype_size=DTYPES[args.dtype])
    runs: list[dict[str, Any]] = [{"policy": "full"}]
    if args.policy != "full":
        runs += [{**args.config, "policy": args.policy, "budget": budget} for budget in args.budget]
    rows = [size(server, settings, args.prompt, args.output) for settings in runs]
    cells = [[f"{x / 2**20:.1f}" if k in COLUMNS[2:5] else str(x) for k, x in row.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
    table = ["  ".join(map(str.rjust, line, widths)) for line in (COLUMNS, *cells)]
    token, fit = server.entry * server.kv_heads * server.layers, server.blocks * server.block_size
    head = f"KV of one token: {token:,} bytes in all layers and heads; {fit:,} tokens fit without eviction"
    return "\n".join((head, *table, LEGEND))


if __name__ == "__main__":
    main()
