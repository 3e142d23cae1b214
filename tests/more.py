"""Which tests `make test` leaves to `make test-more`: the same proof over more instances, by kind.

Each name is a file below `tests/` and a pattern that matches the beginning of its tests' names; `.` is all of them.
"""

import re

POLICIES = (
    "ada-pyramid", "lava-uniform", "lava-uniform-head", "lava-pyramid", "cake", "vatp-snapkv", "tova", "knorm",
    "criticalkv", "ada-criticalkv", "defensivekv", "layer-defensivekv", "compactor", "expected-attention", "dropkv",
)  # fmt: skip
"""Run on engines there; of the others `make test` has one for each combination of schedule, inputs and competition."""

SEEDS = r"test_\w+\[(\w+-)?[1-9]\d\]"
"""Random loads, beyond the first seeds of each kind."""

INSTALLATIONS_AND_COMMANDS = {
    "distribution/test_build.py": ".",
    "distribution/test_commands.py": "test_commands_run|test_what_is_installed",
    "docker/test_entrypoint.py": "test_the_real_server",
    "docker/test_monitoring.py": "test_everything_named_exists",
    "engine/frontend/test_other_versions.py": ".",
    "engine/served/test_examples.py": ".",
    "engine/served/test_off.py": "test_the_two_runs_differ",
    "test_command_line.py": r"test_vllm_says_nothing|test_a_reader_that_goes\w+\[(sizing|doctor)",
    "vllms/test_vllms_outcomes.py": "test_two_real_runs",
}
PAGES_AND_QUALITY = {
    "engine/served/test_inspect_layouts.py": ".",
    "engine/served/test_inspect_turns.py": "test_every_policy",
    "engine/served/test_decisions.py": "test_a_real_model",
    "engine/served/test_lm_eval.py": ".",
    "engine/served/test_quality_turns.py": ".",
    "inspection/test_browser.py": "test_a_prompt_of_32k",
    "quality/test_quality_run.py": "test_killed_runs",
}
FAULTS_AND_SURROUNDINGS = {
    "engine/served/test_faults.py": r"(?!test_a_process_is_killed\[worker\])",
    "engine/served/test_leaks.py": ".",
    "engine/served/test_lora.py": ".",
    "engine/served/test_multimodal.py": ".",
    "engine/served/test_ray.py": ".",
}
RUNNERS_AND_LAYOUTS = {
    "engine/served/test_answers.py": r"test_preempted_around_a_position\[ada",
    "engine/served/test_answers_anywhere.py": r"test_servers\[PP",
    "engine/served/test_answers_shared.py": r"(?!test_two_answers\w+\[alone)",
    "engine/served/test_chains.py": r"test_preempted\[(?!kvzip)",
    "engine/served/test_chat_tails.py": r"test_a_turn\w+\[(whole|PP|TP)|test_all_turns",
    "engine/served/test_families.py": r"test_a_family\w+\[(starcoder2|falcon_h1|deepseek_v2)",
    "engine/served/test_hits.py": r"test_hits\w+\[(chunks|PP|TP 2-turns|8 bits-uncompressed)",
    "engine/served/test_int8.py": r"test_every_policy\w+\[(chunks|PP|ngram)",
    "engine/served/test_invariance.py": r"test_chunks\w+\[(PP|chunks of 64)|test_replicated",
    "engine/served/test_kvzip.py": r"test_in_a_tight_pool\[two|test_keeps\w+\[(two stages|alone-(?!all))"
    r"|test_keeps\w+\[two tensor ranks-window|test_aborted\w+\[0",
    "engine/served/test_lookahead.py": r"test_servers\[(PP|steps of 3[12])|test_preempted\w+\[caching|test_hits\[48"
    r"|test_read_token|test_models\w+\[(?!gemma2)",
    "engine/served/test_masked_model.py": r"test_every_policy\w+\[[14]\]|test_a_sliding_window\w+\[mistral",
    "engine/served/test_trained_head.py": ".",
    "engine/served/test_draft_models.py": (
        r"test_answers\w+\[(eagle\]|mtp)|test_cached\w+\[(?!eagle3 g)|test_requests\w+\[eagle3|test_tensor\w+\[eagle"
    ),
    "engine/served/test_mixed_layers.py": r"test_memory_that_both|test_workers\[(gpt|\w+-pipe)",
    "engine/served/test_speculation.py": r"test_layers|test_drafts_take|test_requests_of_every",
    "engine/served/test_stock.py": "test_compiled",
    "engine/served/test_take.py": r"test_equals\w+\[(?!half)",
    "engine/served/test_v2_runner.py": r"(?!test_equals_v1\[mixed)",
}
PROCESSORS = {
    "engine/served/test_emulated_gpu.py": r"test_layers|test_chunks_small",
    "kernels/test_build.py": "test_a_cxx",
    "kernels/test_compiles.py": ".",
}
LOADS = {
    "engine/frontend/test_fuzz.py": r"test_requests_made\w+\[/v1/chat/completions-positive",
    "engine/scheduler/test_branching.py": SEEDS,
    "engine/scheduler/test_hostile_loads.py": r"test_crowds|test_servers_that_stood_still\[\d{3}",
    "engine/scheduler/test_loads.py": rf"{SEEDS}|test_tight_loads\w+\[0",
    "engine/scheduler/test_reserve.py": "test_vllm_finds",
    "engine/scheduler/test_shared_prefixes.py": r"test_nobody_waits\w+\[2",
    "engine/scheduler/test_step_work.py": r"test_who_waits\w+\[(?!kvzip)",
    "engine/scheduler/test_windows_beside.py": r"test_nobody\w+\[2",
}
MORE = {
    **INSTALLATIONS_AND_COMMANDS,
    **PAGES_AND_QUALITY,
    **FAULTS_AND_SURROUNDINGS,
    **RUNNERS_AND_LAYOUTS,
    **PROCESSORS,
    **LOADS,
}


BY_POLICY = re.compile(rf"[\[ -]({'|'.join(POLICIES)})[\] -]")
"""Finds one of these among a test's parameters."""


def is_more(name: str, starts_engine: bool) -> bool:
    """Whether a test, such as ``tests/test_house.py::test_rules``, is left to `make test-more`."""
    file, _, test = name.removeprefix("tests/").partition("::")
    listed = file in MORE and re.match(MORE[file], test) is not None
    return listed or (starts_engine and BY_POLICY.search(test) is not None)
