"""What has moved between the supported versions of vLLM."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Moves:
    """Places in one version of vLLM, as ``module:name``.

    Attributes:
        unify_page_size: how vLLM gives blocks of several kinds of layers one size in memory.
        groups_of_one_page_size: how it groups these layers.
        max_memory_usage_bytes: what vLLM's check at start-up asks of each layer. Only tests look at it.
        make_arg_parser: the flags of ``vllm serve``.
        parse_media_part, media_parser: how vLLM reads an image of a message. Only tests look at it.
        ray_executor_variable: the environment variable that, if it is off, chooses a Ray executor that calls the model
            runner directly; None where there is no such executor.
    """

    unify_page_size: str
    groups_of_one_page_size: str
    max_memory_usage_bytes: str
    make_arg_parser: str
    parse_media_part: str
    media_parser: str
    ray_executor_variable: str | None
