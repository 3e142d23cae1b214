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


def test_a_server_without_flags_of_memory_is_not_refused(tmp_path: Path) -> None:
    """The size of vLLM's blocks is checked with the arguments only if it is known by then."""
    with one_line("a default server with eviction"):
        importlib.import_module("vllm_kvevict.engine.frontend.plugin").register()
        from vllm.engine.arg_utils import EngineArgs

        model = make_model(tmp_path / "model")
        settings: dict[str, Any] = {"additional_config": {"kv_eviction": {"policy": "ada-snapkv"}}}
        args = EngineArgs(str(model), skip_tokenizer_init=True, dtype="float32", **settings)
        args.create_engine_config()


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


def test_our_layers_are_in_no_group_with_whole_ones() -> None:
    """Layers of a subclass of vLLM's spec would be, such as those of a draft model: these need blocks."""
    with one_line("groups of layers"):
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from vllm_kvevict.engine import versions
        from vllm_kvevict.engine.spec import BoundedAttentionSpec

        group = versions.load(versions.moves().groups_of_one_page_size)
        whole = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
        derived = dataclasses.make_dataclass(
            "Derived", [], bases=(FullAttentionSpec,), frozen=True, kw_only=True
        )
        fields = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole) if field.init}
        apart = [
            len(group(layers))
            for spec in (BoundedAttentionSpec.of(whole), derived(**fields))
            for layers in ({"ours": spec, "whole": whole}, {"whole": whole, "ours": spec})
        ]
    if apart[:2] != [2, 2]:
        source.broken("our layers are grouped with whole ones", "the layers of a draft model get no blocks")
    if apart[2:] != [1, 1]:
        source.broken("a subclass of FullAttentionSpec has groups of its own", "our spec can be one again")


def test_blocks_with_windows_and_states_are_copied_in_part() -> None:
    """Once this fails, prefixes can be cached on models with both."""
    import torch
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    window = torch.arange(2 * 4 * 64).view(2, 4, 64)[0]  # the first of two places in each block
    state = window[:, :32]
    copy_kv_cache_blocks_inplace([state, window], 4, [KVCacheBlockCopy(1, 2)])
    assert torch.equal(state[1], state[2])
    assert not torch.equal(window[1], window[2]), "vLLM copies whole blocks now"


def test_states_are_saved_within_a_step_on_every_platform() -> None:
    """Once this fails, layers with states may ask for that where vLLM can do it."""
    import inspect

    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    code = inspect.getsource(MambaMixer2.get_kv_cache_spec)
    assert "num_prefill_checkpoint_blocks=1" in code and "platform" not in code


def test_two_kinds_of_quantized_kv_have_one_number() -> None:
    """From 0.33 on. Once this fails, KV pages may be of a kind of their own there."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    octave = getattr(KVQuantMode, "OCTAVE_K3V4", None)
    assert octave is None or octave is getattr(KVQuantMode, "CUSTOM", None)
