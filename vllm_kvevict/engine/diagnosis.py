"""Whether a server would start with eviction: the checks of its start over its configuration; no weights are read."""

import copy
import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.ompmultiprocessing import OMPProcessManager

from vllm_kvevict.engine import versions
from vllm_kvevict.engine.config import KEY, KVEvictionError, Options
from vllm_kvevict.engine.errors import finds_none, in_one_line
from vllm_kvevict.engine.frontend import checks, command_line, plugin
from vllm_kvevict.engine.memory import ring_memory
from vllm_kvevict.engine.parameters import policy_config
from vllm_kvevict.policies import available
from vllm_kvevict.policies.inputs import ROTARY_EMBEDDING

BY_VLLM = "vLLM itself refuses: "


@dataclass(frozen=True)
class Diagnosis:
    """What a server would say of its flags.

    Attributes:
        model: as given.
        policy: of ``--kv-eviction``; ``full`` where none was given.
        refusal: why it would not start, in one sentence; None if it would.
        policies: those that this model cannot be served with, and why; None where that depends on nothing but the
            refusal.
        ring: bytes that each rank sets aside for queries at most, and for how many requests.
    """

    model: str
    policy: str
    refusal: str | None
    policies: dict[str, str] | None
    ring: tuple[int, int] = (0, 0)


def platform_name() -> str:
    """The kind of device that vLLM would use."""
    return str(current_platform.device_name or "unknown")


def environment_refusal() -> str | None:
    """Why no model can be served here, in one sentence; None where nothing speaks against it."""
    try:
        checks.check_environment()
    except KVEvictionError as error:
        return str(error)
    return None


def diagnose(words: Sequence[str], program: str) -> Diagnosis:
    """Check the arguments of a ``vllm serve``.

    Args:
        words: what would follow ``vllm serve``.
        program: whose arguments errors say they are.

    Raises:
        SystemExit: the arguments themselves are wrong; one line on stderr says how.
    """
    # vLLM's own usage would be hundreds of lines.
    parser = FlexibleArgumentParser(prog=program, usage=f"{program} [MODEL] [flags of vllm serve]")
    make_arg_parser = versions.load(versions.moves().make_arg_parser)
    namespace = command_line.parse(make_arg_parser(parser), words)
    if namespace.model_tag is not None:
        namespace.model = namespace.model_tag
    try:
        args = AsyncEngineArgs.from_cli_args(namespace)
    except Exception as error:
        return Diagnosis(namespace.model, namespace.kv_eviction or "full", _by_vllm(error), None)
    command_line.raise_errors()
    options = plugin.requested_options(args) or Options.parse({"policy": "full"})
    config, refusal = _configure(_with_options(args, options))
    if refusal is not None and not refusal.startswith(BY_VLLM) and options.policy != "full":
        # Whether it is the policy or the model that is refused. vLLM asks for no policy, and may take long to say no.
        plain = dataclasses.replace(options, policy="full", params={}, lookahead=0)
        config, _ = _configure(_with_options(args, plain))
    if config is None:
        return Diagnosis(args.model, options.policy, refusal, None)
    policies = _refused_policies(config, options)
    refusal = refusal or policies.get(options.policy) or _no_workers(config) or _no_compiler(config)
    return Diagnosis(args.model, options.policy, refusal, policies, ring_memory(config))


def _with_options(args: Any, options: Options) -> Any:
    """The arguments with these options in the place of all that asks for eviction."""
    changed = copy.copy(args)
    changed.kv_eviction = changed.kv_budget = changed.kv_eviction_config = None
    changed.additional_config = {**(args.additional_config or {}), KEY: options.to_dict()}
    return changed


def _configure(args: Any) -> tuple[Any, str | None]:
    """vLLM's configuration, or why there is none."""
    try:
        return args.create_engine_config(UsageContext.OPENAI_API_SERVER), None
    except KVEvictionError as error:
        return None, str(error)
    except Exception as error:
        return None, _by_vllm(error)


def _by_vllm(error: Exception) -> str:
    """An error of vLLM's own, in one line. They are of many kinds, and each of them would end the server."""
    return f"{BY_VLLM}{in_one_line(error)}"


def _refused_policies(config: Any, options: Options) -> dict[str, str]:
    """Policies that the model cannot be served with, and why."""
    refused = {}
    for policy in available():
        try:
            wanted = policy_config(policy, options.budget, options.params_of(policy), options.defaults)
            checks.check_policy(config, wanted)
            # Workers look at the modules of the model, which are not there; with these positions the outcome is known.
            if ROTARY_EMBEDDING in wanted.needs_of_model and config.model_config.uses_mrope:
                raise finds_none(policy, ROTARY_EMBEDDING.words)
        except KVEvictionError as error:
            refused[policy] = str(error)
        except ValueError as error:
            refused[policy] = f"--kv-eviction {policy}: {error}"
    return refused


def _no_workers(config: Any) -> str | None:
    """Why vLLM could not start its workers here, which it asks only when it is about to."""
    if config.parallel_config.use_ray:
        if current_platform.ray_device_key:
            return None
        return f"{BY_VLLM}current platform {current_platform.device_name} does not support ray."
    try:
        OMPProcessManager(config)
    except Exception as error:
        # Its words name no variable.
        return f"{_by_vllm(error)} VLLM_CPU_OMP_THREADS_BIND says how; with nobind they may share a node."
    return None


def _no_compiler(config: Any) -> str | None:
    """vLLM's own need of a compiler, which shows only when it is about to compile the model."""
    compiles = current_platform.is_cpu() and not config.model_config.enforce_eager
    if not compiles or shutil.which(os.environ.get("CXX", "g++")):
        return None
    return "vLLM compiles models on a CPU but finds no C++ compiler: install g++, set CXX, or add --enforce-eager"
