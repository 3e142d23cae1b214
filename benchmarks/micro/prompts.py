"""Attention of a prompt that is read in one step, by vLLM's op and by our kernel.

One layer of 8 query and 4 KV heads of 64, no engine, behind nothing. The op reads blocks of 128 tokens of all heads, as
stock vLLM does. Both attend in turns, by each number of threads.
"""

import argparse
import os

import torch
from rich.progress import track
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from benchmarks.harness.measure import kind, timed
from benchmarks.harness.options import whole
from benchmarks.micro.holding import HEAD_DIM, KERNEL, KV_HEADS, OP, QUERY_HEADS
from benchmarks.micro.loop import Cell, Found, compared, in_turns
from vllm_kvevict.kernels.prefill_attention import PrefillAttention

BLOCK = 128
OPTIONS = (
    ("rounds", whole, 9, "runs of each side"),
    ("tokens", whole, [256, 1024, 2048, 8192], "lengths of the prompt"),
    ("threads", whole, [*range(1, min(2, len(os.sched_getaffinity(0))) + 1)], "numbers of threads"),
)


class Prompt:
    """Queries, keys and values of a prompt, views of one projection's output, and both ways to attend."""

    def __init__(self, tokens: int, dtype: torch.dtype):
        whole = torch.randn(tokens, QUERY_HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
        self.query, self.key, self.value = whole.split([QUERY_HEADS, KV_HEADS, KV_HEADS], 1)
        self.output = torch.empty(tokens, QUERY_HEADS, HEAD_DIM, dtype=dtype)
        self._kernel = PrefillAttention(dtype)
        self._starts = torch.tensor([0, tokens], dtype=torch.int32)
        self._lengths = torch.tensor([tokens], dtype=torch.int32)
        self._isa = _get_attn_isa(dtype, BLOCK, HEAD_DIM)
        torch.cpu._init_amx()  # a process that multiplies no matrices has not asked for it yet
        pages = torch.zeros(-(-tokens // BLOCK), KV_HEADS, 2 * BLOCK, HEAD_DIM, dtype=dtype)
        self._pages = pages.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(self.key, self.value, *self._pages, torch.arange(tokens), self._isa)

    def by_op(self) -> None:
        """Attend by vLLM's op; its plan of the step, which serves all layers, is made anew each time."""
        keys, values = self._pages
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=QUERY_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            seq_lens=self._lengths,
            dtype=self.query.dtype,
            query_start_loc=self._starts,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=True,
        )
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=keys,
            value_cache=values,
            output=self.output,
            query_start_loc=self._starts,
            seq_lens=self._lengths,
            scale=HEAD_DIM**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=torch.arange(len(keys), dtype=torch.int32).unsqueeze(0),
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )

    def by_kernel(self) -> None:
        """Attend by our kernel."""
        matrices = self.query, self.key, self.value, self.output
        self._kernel(*matrices, self._lengths, None, None, HEAD_DIM**-0.5)


def compare(tokens: int, threads: int, rounds: int, dtype: str) -> Cell:
    """Both ways in turns."""
    torch.set_num_threads(threads)
    prompt = Prompt(tokens, getattr(torch, dtype))
    repeats = max(1, 2048 // tokens)
    calls = {way.__name__: lambda way=way: timed(way, repeats) for way in (prompt.by_op, prompt.by_kernel)}
    pairs = [*zip(*in_turns(calls, rounds).values(), strict=True)]
    return Cell({"tokens": tokens, "threads": threads}, pairs, over=(1, 0))


def measure(arguments: argparse.Namespace) -> Found:
    """Every length on every number of threads."""
    current_platform.import_kernels()
    torch.manual_seed(0)
    sizes = [(tokens, threads) for threads in arguments.threads for tokens in arguments.tokens]
    with torch.inference_mode():
        cells = [compare(*size, arguments.rounds, arguments.dtype) for size in track(sizes, "cells")]
    title = f"attention of a prompt, {' '.join(kind(arguments.dtype))}; ratios are {KERNEL} over {OP}"
    shown = compared(title, cells, (OP, KERNEL))
    return Found({"cells": [cell.summary() for cell in cells]}, [shown])
