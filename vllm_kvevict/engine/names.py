"""The names by which users ask for eviction; imports nothing, so that it can be read under any version of vLLM."""

KEY = "kv_eviction"
"""The key of our part of ``VllmConfig.additional_config``."""

FLAGS = {"--kv-eviction", "--kv-budget", "--kv-decode-budget", "--kv-eviction-config"}
