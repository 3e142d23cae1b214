"""Checks this installation, and whether a model can be served with eviction: ``vllm-kvevict doctor --help``.

vLLM is imported when it is found to be a version that this package knows.
"""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from vllm_kvevict import compatibility, machine
from vllm_kvevict.kernels import build, processor
from vllm_kvevict.quiet import quieten

if TYPE_CHECKING:
    from vllm_kvevict.engine.diagnosis import Diagnosis

GROUP, NAME, ENTRY = "vllm.general_plugins", "kvevict", "vllm_kvevict.engine:register"
DESCRIPTION = (
    "Checks this installation. With a model and the flags of vllm serve, it also says whether the server would "
    "start, and if not, why, and which policies cannot serve the model. It reads the model's configuration, but no "
    "weights, and starts no engine. It does not check whether the memory suffices: see vllm-kvevict sizing. "
    "The exit code is 0 if nothing is wrong, 1 if something is, and 2 for wrong arguments."
)


def main(words: Sequence[str] | None = None, program: str = "python -m vllm_kvevict.doctor") -> int:
    """Print what was found; the exit code."""
    words = sys.argv[1:] if words is None else words
    usage = f"{program} [-h] [MODEL] [flags of vllm serve]"
    parser = argparse.ArgumentParser(program, usage=usage, description=DESCRIPTION)
    if {"-h", "--help"} & set(words):
        parser.parse_args(["--help"])
    quieten()
    for name, value in facts():
        print(f"{name:<14}{value}")
    found = problems()
    for sentence in found:
        print(f"problem: {sentence}")
    if not words:
        return int(bool(found))
    if not is_supported():
        return 1
    from vllm_kvevict.engine.diagnosis import diagnose

    diagnosis = diagnose(words, program)
    print("", *verdict(diagnosis), sep="\n")
    return int(bool(found) or diagnosis.refusal is not None)


def facts() -> list[tuple[str, str]]:
    """What is installed, and on what machine."""
    found = list(machine.versions().items())
    found.append(("tested vLLM", ", ".join(compatibility.supported())))
    found.append(("plugin", plugin_problem() or "registered once"))
    if is_supported():
        from vllm_kvevict.engine import diagnosis

        found.append(("platform", f"{diagnosis.platform_name()}, as vLLM sees it"))
    cpu = f"{machine.cpu_model()}, {os.cpu_count()} cores, {platform.machine()}"
    return [*found, ("processor", cpu), ("level", _level()), ("compiler", _compiler())]


def _level() -> str:
    try:
        return f"{processor.level()}; --dtype {processor.fast_dtype()} is fast on it"
    except ValueError as error:
        return str(error)


def _compiler() -> str:
    words, fault = build.find_compiler()
    none = "none: the C++ kernel cannot be built, so decoding on a CPU uses vLLM's attention"
    return "; ".join(filter(None, [shlex.join(words) or none, fault]))


def is_supported() -> bool:
    """Whether vLLM is here, in a version that this package works with."""
    found = machine.versions().get("vllm")
    return found is not None and compatibility.refusal(found) is None


def problems() -> list[str]:
    """What keeps eviction from working here whatever the model is, a sentence each."""
    version = machine.versions().get("vllm")
    if version is None:
        sentences = [
            f"vLLM is not installed in this environment: install vLLM {compatibility.supported()[-1]}"
        ]
    elif reason := compatibility.refusal(version):
        sentences = [reason]
    else:
        from vllm_kvevict.engine.diagnosis import environment_refusal

        sentences = [reason] if (reason := environment_refusal()) else []
    return [*sentences, *filter(None, [plugin_problem()])]


def plugin_problem() -> str | None:
    """Why vLLM would not load the plugin, or load it more than once."""
    times = sum(entry.value == ENTRY for entry in metadata.entry_points(group=GROUP))
    if times == 0:
        return "vLLM does not find the plugin: install vllm-kvevict with pip in this environment"
    if times > 1:
        return f"the plugin is registered {times} times: uninstall every package that registers it except vllm-kvevict"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves the plugin out: add {NAME} to it, or unset it"
    return None


def verdict(diagnosis: "Diagnosis") -> list[str]:
    """Whether the server would start, and what else the model cannot be served with."""
    server = f"{diagnosis.model} with --kv-eviction {diagnosis.policy}"
    if diagnosis.refusal is None:
        lines = [f"{server}: can be served"]
        size, requests = diagnosis.ring
        if size:
            lines.append(
                f"Besides the KV memory each rank reserves {size / 2**20:.1f} MiB for the last queries of {requests} "
                "requests at once."
            )
    else:
        lines = [f"{server}: cannot be served", f"  {diagnosis.refusal}"]
    if diagnosis.policies is None:
        lines.append("This holds for every policy.")
    elif diagnosis.policies:
        lines.append("Policies that cannot serve this model:")
        lines += [f"  {reason}" for reason in diagnosis.policies.values()]
    else:
        lines.append("Every policy can serve this model.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
