"""Defaults for every test, set before anything imports vLLM or transformers. Values from outside win."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests build their models; none is downloaded
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Threads that wait for each other cost more than they bring on models this small, and workers are forked.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_KVEVICT_CHECK", "1")  # compare ledger and worker after every step
