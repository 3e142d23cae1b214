"""A family of each kind is examined; what is on record of all of them is what the page says."""

import pytest

from tests.engine.support import examine_families
from tests.engine.support.families import FAMILIES
from vllm_kvevict.compatibility import series, supported

MIXED = ("gpt_oss", "gemma2", "granitemoehybrid", "nemotron_h")
"""A model of each kind: windows with sinks, windows with softcap, states, and layers that remember nothing."""
SAMPLE = ("starcoder2", "falcon_h1", "deepseek_v2", *MIXED)
BY_NAME = {family.model_type: family for family in FAMILIES}


@pytest.mark.engine
@pytest.mark.parametrize("name", SAMPLE)
def test_a_family_is_as_on_record(name, tmp_path):
    """Without eviction its answers are vLLM's; with it those of a plain model that sees no evicted entry."""
    finding = examine_families.examine(BY_NAME[name], tmp_path)
    assert finding.refusal or finding.dtype != "float32" or finding.difference < 1e-4
    recorded = {x.model_type: x for x in examine_families.read_record()[0]}[name]
    assert (finding.evicted, finding.layers, finding.refusal) == (
        recorded.evicted,
        recorded.layers,
        recorded.refusal,
    )


def test_the_page_has_every_family():
    findings, versions = examine_families.read_record()
    assert [finding.model_type for finding in findings] == list(BY_NAME)
    assert series(versions["vLLM"]) in supported()
    assert examine_families.PAGE.read_text() == examine_families.render(findings, versions)
