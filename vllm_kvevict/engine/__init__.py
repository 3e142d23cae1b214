"""The vLLM side: flags, scheduler, workers, attention. Importing this package registers the plugin."""

from vllm_kvevict.engine.frontend.plugin import register

register()
