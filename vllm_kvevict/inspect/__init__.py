"""What policies keep of a prompt, as a page to look at and as JSON: ``python -m vllm_kvevict.inspect --help``."""
