"""Levels of processors, by what Linux says of them."""

import pytest

from vllm_kvevict.kernels import processor

SAPPHIRE_RAPIDS, GENOA, ROME, SKYLAKE, IVY_BRIDGE, CORE2 = (
    {"sse2", "avx", "avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"},
    {"sse2", "avx", "avx2", "avx512f", "avx512_bf16"},
    {"sse2", "avx", "avx2"},
    {"sse2", "avx", "avx2", "avx512f"},
    {"sse2", "avx"},
    {"sse2"},
)


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be another processor."""
    monkeypatch.delenv(processor.ENVIRONMENT, raising=False)

    def pretend(features, name="x86_64"):
        monkeypatch.setattr(processor, "features", lambda: frozenset(features))
        monkeypatch.setattr(processor.platform, "machine", lambda: name)

    return pretend


@pytest.mark.parametrize(
    "features, level, lanes, dtype",
    [
        (SAPPHIRE_RAPIDS, "amx", 16, "bfloat16"),
        (GENOA, "avx512", 16, "bfloat16"),
        (SKYLAKE, "avx512", 16, "float32"),
        (ROME, "avx2", 8, "float32"),
        (IVY_BRIDGE, "avx", 8, "float32"),
        (CORE2, "sse", 4, "float32"),
    ],
)
def test_the_width_follows_the_processor(machine, features, level, lanes, dtype):
    machine(features)
    assert processor.level() == level
    assert processor.levels()[level].lanes == lanes
    assert processor.fast_dtype() == dtype


def test_other_processors_have_vectors_of_four(machine):
    machine({"asimd", "bf16"}, "aarch64")
    assert list(processor.levels()) == ["generic"] and processor.levels()["generic"].lanes == 4
    assert processor.fast_dtype() == "bfloat16"


def test_a_lower_level_can_be_forced(machine, monkeypatch):
    machine(GENOA)
    monkeypatch.setenv(processor.ENVIRONMENT, "avx2")
    assert processor.level() == "avx2" and processor.fast_dtype() == "float32"


@pytest.mark.parametrize("name", ["avx512", "neon", "AVX2"])
def test_what_the_processor_has_not_is_refused(machine, monkeypatch, name):
    machine(ROME)
    monkeypatch.setenv(processor.ENVIRONMENT, name)
    with pytest.raises(ValueError, match=f"must be one of avx2, avx, sse on this processor, got '{name}'"):
        processor.level()
