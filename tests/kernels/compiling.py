"""Compiles what the Triton kernels' wrappers launch for real GPUs, where there may be none: to machine code.

    python -m tests.kernels.compiling

The interpreter accepts much that a GPU does not. Here every launch goes through Triton's own argument handling, its
compiler and NVIDIA's assembler; only the launch itself is left out. Which launches: those of the `launches()` of this
folder's test modules, each a call of a wrapper with CPU tensors. All are compiled for compute capability 9.0, and each
kernel once, as its test module launches it first, for 8.0 and 10.0.

Prints one line per compiled kernel. Exits with 1 if one does not compile or needs more shared memory than there is, or
if a kernel that Python launches was not among them.
"""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import tests.kernels
import vllm_kvevict.kernels

MAIN, OTHERS = 90, (80, 100)
MAX_SHARED = 160 << 10
"""Bytes of shared memory of one program: what the smallest of these GPUs has."""
_launch = JITFunction.run


class _Device:
    """As much of a GPU's driver as the compiler asks for."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # of the cache of compiled kernels

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiler:
    """Takes the place of Triton's launch: compiles what would be launched.

    Attributes:
        compiled: names and capabilities of the kernels seen so far.
        failures: what went wrong, a line each.
    """

    def __init__(self) -> None:
        self.compiled: set[tuple[str, int]] = set()
        self.failures: list[str] = []
        self._reported: set[int] = set()

    def __call__(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = f"{kernel.module.rpartition('.')[2]}.{kernel.__name__}"
        for capability in (MAIN, *OTHERS):
            if capability != MAIN and (name, capability) in self.compiled:
                continue
            self.compiled.add((name, capability))
            triton.runtime.driver.set_active(_Device(capability))
            try:
                binary = _launch(kernel, *args, grid=grid, warmup=True, **options)
            except Exception as error:
                traceback.print_exc()
                self.failures.append(f"{name} sm_{capability}: {type(error).__name__}")
                continue
            if id(binary) not in self._reported:  # Triton keeps it, so no other gets its id
                self._reported.add(id(binary))
                self._report(f"{name} sm_{capability}", binary)

    def _report(self, name: str, binary: Any) -> None:
        shared = binary.metadata.shared
        print(f"{name} {_registers(binary.asm['cubin'])} shared={shared}", flush=True)
        if shared > MAX_SHARED:
            self.failures.append(f"{name}: {shared} bytes of shared memory")


def _registers(cubin: bytes) -> str:
    """Registers of each thread, and bytes of what did not fit them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return f"registers={found['REG']} spills={int(found['STACK']) + int(found['LOCAL'])}"


def _compile_module(name: str) -> tuple[set[tuple[str, int]], list[str]]:
    """A test module's launches: what they compiled, and what went wrong. Replaces the launch for good."""
    compiler = _Compiler()
    JITFunction.run = lambda kernel, *args, **options: compiler(kernel, *args, **options)
    for launch in getattr(importlib.import_module(name), "launches", tuple)():
        launch()
    return compiler.compiled, compiler.failures


def _launched() -> set[str]:
    """The kernels that Python launches: those whose name is followed by a grid somewhere in their module."""
    names = set()
    for found in pkgutil.iter_modules(vllm_kvevict.kernels.__path__):
        module = importlib.import_module(f"vllm_kvevict.kernels.{found.name}")
        source = inspect.getsource(module)
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.module == module.__name__ and f"{name}[" in source:
                names.add(f"{found.name}.{name}")
    return names


def main() -> int:
    if triton.knobs.runtime.interpret:
        raise RuntimeError("Triton's interpreter is on: unset TRITON_INTERPRET")
    found = [module.name for module in pkgutil.iter_modules(tests.kernels.__path__)]
    modules = [f"tests.kernels.{name}" for name in found if name.startswith("test_")]
    expected = {(name, capability) for name in _launched() for capability in (MAIN, *OTHERS)}
    failures = []
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
        for compiled, problems in pool.map(_compile_module, modules):
            expected -= compiled
            failures += problems
    failures += [f"{name} sm_{capability}: not among the launches()" for name, capability in sorted(expected)]
    print(*failures, sep="\n", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
