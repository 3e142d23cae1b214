"""The vLLM side: flags, scheduler, workers, attention. Importing this package registers the plugin."""

from vllm_kvevict.engine.plugin import register

register()
