"""What only a running vLLM can tell: that modules import, and what flags, plugins and registries do with ours."""

import contextlib
import dataclasses
import importlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.models import make_model
from tests.contract import source
from tests.contract.test_names import imported

CPU_MODULES = {"vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn"}
"""Importable where vLLM's platform is a CPU; ``engine/worker`` imports them there only."""

ENGINE_MODULES = sorted(
    ".".join(("vllm_kvevict.engine", *file.relative_to(source.ENGINE).with_suffix("").parts))
    for file in source.ENGINE.rglob("[!_]*.py")
)


@contextlib.contextmanager
def one_line(what: str) -> Iterator[None]:
    """Whatever goes wrong inside is said in one line."""
    try:
        yield
    except Exception as error:
        source.broken(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def skip_elsewhere(module: str) -> None:
    """Skip CPU modules where vLLM was built for another platform."""
    if module in CPU_MODULES or module == "vllm_kvevict.engine.worker.cpu":
        with one_line("import vllm.platforms"):
            platforms = importlib.import_module("vllm.platforms")
        if not platforms.current_platform.is_cpu():
            pytest.skip("vLLM's platform is no CPU")


@pytest.mark.parametrize("module", sorted({place.partition(":")[0] for place in imported()}))
def test_module_of_vllm_imports(module: str) -> None:
    skip_elsewhere(module)
    with one_line(f"import {module}"):
        importlib.import_module(module)


@pytest.mark.parametrize("module", ENGINE_MODULES)
def test_module_of_ours_imports(module: str) -> None:
    skip_elsewhere(module)
    with one_line(f"import {module}"):
        importlib.import_module(module)


def test_plugin_is_found() -> None:
    """Where the entry point is not found, ``vllm serve`` does not know ``--kv-eviction``."""
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "vllm_kvevict.engine:register" not in {entry.value for entry in entries}:
        source.broken("the entry point kvevict is not installed", "vllm serve does not know --kv-eviction")


def test_flags_reach_engine_arguments() -> None:
    """Plain and dotted options in one command line; vLLM's parser hands dotted ones over as one more JSON object."""
    with one_line("--kv-eviction on a command line"):
        # By itself it would leave a version that it does not know as it is.
        importlib.import_module("vllm_kvevict.engine.frontend.plugin").register()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        words = ["--model", "m", "--kv-eviction", "snapkv", "--kv-budget", "0.5"]
        words += ["--kv-eviction-config", '{"kernel": 5}', "--kv-eviction-config.window", "16"]
        parsed = parser.parse_args(words)
        known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    values = (parsed.kv_eviction, parsed.kv_budget, parsed.kv_eviction_config)
    if values != ("snapkv", 0.5, {"kernel": 5, "window": 16}):
        source.broken(f"the flags are parsed as {values}", "eviction is configured otherwise than asked for")
    if not {"kv_eviction", "kv_budget", "kv_eviction_config"} <= known:
        source.broken(
            "dataclasses.fields(AsyncEngineArgs) lacks our fields", "flags are parsed and forgotten"
        )


def test_a_server_without_flags_of_memory_is_not_refused(tmp_path: Path) -> None:
    """The size of vLLM's blocks is checked with the arguments only if it is known by then."""
    with one_line("a default server with eviction"):
        importlib.import_module("vllm_kvevict.engine.frontend.plugin").register()
        from vllm.engine.arg_utils import EngineArgs

        model = make_model(tmp_path / "model")
        settings: dict[str, Any] = {"additional_config": {"kv_eviction": {"policy": "ada-snapkv"}}}
        args = EngineArgs(str(model), skip_tokenizer_init=True, dtype="float32", **settings)
        args.create_engine_config()


def test_backend_is_used_where_a_kind_of_layers_asks_for_it() -> None:
    with one_line("register_backend(CUSTOM)"):
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from vllm_kvevict.engine.devices import CPU

        entry = CPU.register_backend()
        registered = entry.get_path()
        chosen = current_platform.get_attn_backend_cls(entry, attn_selector_config=None, num_heads=None)
        entry.clear_override()
    if not registered == chosen == CPU.backend or entry is not AttentionBackendEnum.CUSTOM:
        source.broken(f"{registered} is registered and {chosen} used", "vLLM's attention is used")


def test_our_layers_have_a_manager_without_blocks() -> None:
    """vLLM looks up what manages the blocks of a layer by the class of its spec."""
    with one_line("a manager for our layers"):
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

        from vllm_kvevict.engine.spec import BoundedAttentionSpec, NoBlocksManager

        plain = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
        ours = BoundedAttentionSpec.of(plain)
        manager = KVCacheSpecRegistry.get_manager_class(ours)
    if manager is not NoBlocksManager or ours.page_size_bytes != plain.page_size_bytes:
        source.broken(f"our layers are managed by {manager}", "they get blocks beside their pages")


def test_blocks_that_vllm_keeps_back(tmp_path: Path) -> None:
    """Its check at start-up passes with exactly what we say that it asks for, and its pool then has the rest free."""
    with one_line("the check at start-up"):
        importlib.import_module("vllm_kvevict.engine.frontend.plugin").register()
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.engine import core
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from vllm_kvevict.engine.config import require_options
        from vllm_kvevict.engine.groups import NULL_BLOCKS
        from vllm_kvevict.engine.memory import bytes_for
        from vllm_kvevict.engine.spec import BoundedAttentionSpec

        settings: dict[str, Any] = {"additional_config": {"kv_eviction": {"policy": "full"}}}
        settings |= {
            "dtype": "float32",
            "block_size": 128,
            "max_model_len": 1024,
            "skip_tokenizer_init": True,
        }
        config = EngineArgs(str(make_model(tmp_path / "model")), **settings).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"  # which engines ask their workers for
        layer = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=32, dtype=torch.float32)
        specs = [{f"layers.{index}.attn": BoundedAttentionSpec.of(layer) for index in range(4)}]
        needed = bytes_for(config, [require_options(config).plan(1024)], 1024)
        find_groups = getattr(core, "get_global_kv_cache_groups", None)  # in 0.32 the check finds them itself
        groups = [] if find_groups is None else [find_groups(config, specs)]
        (cache,) = core.get_kv_cache_configs(config, specs, [needed], *groups)
        pool = BlockPool(cache.num_blocks, enable_caching=False, hash_block_size=128)
    breaks = "vllm-kvevict inspect does not start, or takes more memory than it needs"
    if (cache.num_blocks, pool.get_num_free_blocks()) != (8 + NULL_BLOCKS, 8):
        source.broken(f"of {cache.num_blocks} blocks {pool.get_num_free_blocks()} are free", breaks)
    with contextlib.suppress(ValueError):
        core.get_kv_cache_configs(config, specs, [needed - 1], *groups)
        source.broken("the check at start-up passes with less than we say", breaks)
