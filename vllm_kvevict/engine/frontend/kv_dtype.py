"""Which types of a KV cache can be served, refused at start-up in one sentence that names the flag."""

from typing import Any

from vllm_kvevict.cache.format import dtype_of
from vllm_kvevict.engine.config import KVEvictionError, require_options
from vllm_kvevict.engine.devices import CPU, this_device
from vllm_kvevict.engine.layers import DRAFTERS, LayerMap
from vllm_kvevict.engine.memory import FLOATS, layout_of
from vllm_kvevict.kernels import decode_attention, prefill_attention
from vllm_kvevict.kernels.build import find_compiler
from vllm_kvevict.kernels.layout import INT8, KVLayout


def check_kv_dtype(vllm_config: Any) -> None:
    """Refuse a KV cache in another type than the model's, also where the checkpoint asks for it, unless it is one of 8
    bits that can be served.

    Raises:
        KVEvictionError: one sentence that says what to do.
    """
    model, given = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    if given == INT8:
        _check_int8(vllm_config)
        return
    dtype = layout_of(vllm_config).dtype
    # What "auto" means vLLM says of some checkpoints here already, of others when a worker builds the layers.
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None)
    asked = "fp8" if given == "auto" and scheme is not None else given
    if asked not in FLOATS:
        advice = f"--kv-cache-dtype {dtype}"
        if dtype == "float32":  # which vLLM has no such flag for
            advice = "--dtype and --kv-cache-dtype to bfloat16"
        raise KVEvictionError(
            f"--kv-eviction cannot serve {model.model} as it is: the checkpoint asks for a KV cache of type {asked}, "
            f"but KV pages have the model's dtype, {dtype}, so set {advice}"
        )
    if given not in ("auto", dtype):
        raise KVEvictionError(
            f"--kv-eviction cannot be combined with --kv-cache-dtype {given}: KV pages have the model's dtype, "
            f"{dtype}, so set it to {'auto' if dtype == 'float32' else dtype}"
        )


def _check_int8(vllm_config: Any) -> None:
    """Refuse what entries in 8 bits cannot be combined with, and CPUs without a compiler for their kernels."""
    for words, is_given in _conflicts_of_int8(vllm_config).items():
        if is_given:
            raise KVEvictionError(
                f"--kv-eviction cannot be combined with --kv-cache-dtype {INT8} and {words}: leave --kv-cache-dtype out"
            )
    if this_device() is CPU and not find_compiler()[0]:
        raise KVEvictionError(
            f"--kv-eviction serves --kv-cache-dtype {INT8} by kernels of its own, but finds no C++ compiler: install "
            "g++, set CXX, or leave --kv-cache-dtype out"
        )


def _conflicts_of_int8(vllm_config: Any) -> dict[str, bool]:
    """What entries in 8 bits cannot be combined with, and whether it is given."""
    layout = layout_of(vllm_config)
    speculation = vllm_config.speculative_config
    method = speculation.method if speculation is not None else ""
    return {
        f"a model with heads of {layout['key'].numbers} numbers in {layout.dtype}": not _are_supported(
            layout
        ),
        "--kv-cache-dtype-skip-layers": bool(vllm_config.cache_config.kv_cache_dtype_skip_layers),
        f"speculative decoding by {method}": method in DRAFTERS,
        "a model with layers of several kinds": not LayerMap.predicted(vllm_config).all_evicted,
        "--kv-eviction-config.kernels false": not require_options(vllm_config).kernels,
    }


def _are_supported(layout: KVLayout) -> bool:
    """Whether our kernels can read pages of such entries."""
    if this_device() is not CPU:
        return layout.dtype != "float16"  # weights times scales can be smaller than its smallest numbers
    dtype, sizes = dtype_of(layout.computed_key), (layout.page_size, layout["key"].numbers)
    return decode_attention.supports(dtype, *sizes) and prefill_attention.supports(dtype, *sizes)
