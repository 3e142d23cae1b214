"""Without the flag vLLM is as if the package were not installed."""

import json
import re
import sys
from functools import cache

import pytest

from tests.engine.support.other_vllm import installed
from tests.engine.support.serving import command

pytestmark = pytest.mark.engine

REPORT = """
import json, sys
from vllm import LLM, SamplingParams

def of_worker(wrapper):
    worker = wrapper.worker
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [
        f"{type(worker).__module__}.{type(worker).__name__}",
        sorted({f"{type(x.impl).__module__}.{type(x.impl).__name__}" for x in layers}),
        sorted({f"{x.attn_backend.__module__}.{x.attn_backend.__name__}" for x in layers}),
    ]

llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=1024)
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
prompts = [{"prompt_token_ids": [7 + 13 * i * k % 490 for i in range(n)]} for k, n in ((1, 300), (3, 40), (1, 310))]
unknown = {"kv_eviction": "snapkv", "kv_budget": 0.1}
params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1, extra_args=unknown)
outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
config = llm.llm_engine.vllm_config
print("REPORT " + json.dumps({
    "plugin": "vllm_kvevict.engine.frontend.plugin" in sys.modules,
    "ours": sorted(name for name in sys.modules if name.startswith("vllm_kvevict")),
    "scheduler": f"{type(scheduler).__module__}.{type(scheduler).__name__}",
    "manager": f"{type(scheduler.kv_cache_manager).__module__}.{type(scheduler.kv_cache_manager).__name__}",
    "connector": [str(scheduler.connector), str(config.kv_transfer_config)],
    "workers": llm.collective_rpc(of_worker),
    "prefix caching": config.cache_config.enable_prefix_caching,
    "additional_config": config.additional_config,
    "hash": config.compute_hash(),
    "tokens": [list(output.token_ids) for output in outputs],
    "logprobs": [output.cumulative_logprob for output in outputs],
}))
llm.llm_engine.engine_core.shutdown()
"""


@pytest.fixture(scope="module")
def run(models):
    """Runs vLLM with the package installed, or as if it were not: what it reports and all it wrote."""

    @cache
    def get(installed: bool) -> tuple[dict, str]:
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        if not installed:
            env["VLLM_PLUGINS"] = ""
        ended = command(sys.executable, "-c", REPORT, models("llama"), **env)
        assert ended.returncode == 0, ended.stderr
        (line,) = re.findall(r"^REPORT (.*)$", ended.stdout, re.M)
        return json.loads(line), ended.stdout.replace(line, "") + ended.stderr

    return get


def test_the_two_runs_differ_in_the_plugin_alone(run):
    assert run(installed=True)[0]["plugin"]
    assert run(installed=False)[0]["ours"] == []


def test_nothing_else_differs(run):
    """The classes of scheduler, workers and layers are vLLM's, too."""
    mine, stock = (dict(run(installed=installed)[0]) for installed in (True, False))
    for report in (mine, stock):
        del report["plugin"], report["ours"]
    assert mine == stock
    assert stock["prefix caching"] is True and stock["additional_config"] == {}


def test_only_what_the_flags_need_is_loaded(run):
    modules = run(installed=True)[0]["ours"]
    assert not [name for name in modules if re.match(r"vllm_kvevict\.engine\.(scheduler|worker)\b", name)]


def without_paths(line: str) -> str:
    """A line of a log without where vLLM lies, which may be in a folder of our name."""
    return line.replace(str(installed()), "")


def test_no_line_of_ours_is_logged(run):
    _, log = run(installed=True)
    assert "INFO" in log  # logging was on
    assert [line for line in log.splitlines() if re.search("kv.?evict", without_paths(line), re.I)] == []
