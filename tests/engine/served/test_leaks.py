"""Nothing of a request stays in memory when it is over."""

import gc
import random
from collections import Counter

import pytest

from tests.engine.support.running import Ask, engine, num_preemptions, run
from vllm_kvevict.policies import available
from vllm_kvevict.schedules.registry import plan_of

ROUNDS, PER_ROUND = 3, 50


@pytest.mark.engine
def test_no_object_stays(models):
    """Scheduler and worker are in this process; whatever stays once per request would show fifty times."""
    options = {"policy": "take", "budget": 0.3, "take_chunk": 64, "min_prompt": 32, "decode_reserve": 1}
    options["policies"] = "all"
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "block_size": 32}
    settings |= {"num_gpu_blocks_override": 24, "additional_config": {"kv_eviction": options}}
    choose, counts = random.Random(0), []
    with engine(models("llama"), **settings) as llm:
        for _ in range(ROUNDS):
            asks = [
                Ask(
                    choose.randint(1, 300), choose.choice(available()), 0.3, max_tokens=choose.randint(1, 120)
                )
                for _ in range(PER_ROUND)
            ]
            run(llm, asks, recorded=False)
            assert (
                plan_of.cache_info().maxsize == 128
            )  # a bounded number of plans stays, by length and configuration
            plan_of.cache_clear()
            gc.collect()
            counts.append(Counter(type(thing).__name__ for thing in gc.get_objects()))
        assert num_preemptions(llm) > 0
    grown = {name: count for name, count in (counts[-1] - counts[-2]).items() if count > PER_ROUND // 5}
    assert grown == {}
