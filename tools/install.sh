#!/usr/bin/env bash
# Builds .venv for development on a CPU: what the CPU image holds (docker/install-cpu.sh), this project (editable), and
# what tests and benchmarks need.
# `make` calls it. PYTHON chooses the interpreter; pip's own configuration (index, proxy, find-links) is respected.
# It can be repeated: what is already in .venv is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$PWD/.venv/install.log
. docker/pip.sh

supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))'
base=
# Each candidate is run, not only looked up: a version manager's shim may exist for an interpreter that does not.
for candidate in ${PYTHON:-python3.11 python3}; do
  if "$candidate" -c "$supported" 2>/dev/null; then
    base=$candidate
    break
  fi
done
[ -n "$base" ] || fail "Python >=3.11,<3.15 is needed, tried: ${PYTHON:-python3.11 python3} (set PYTHON=/path/to/python3)"

echo "install 1/4: .venv ($("$base" --version))"
python=$PWD/.venv/bin/python
if ! "$python" -m pip --version >/dev/null 2>&1; then
  "$base" -m venv --clear .venv || fail "could not create .venv (on Debian and Ubuntu: apt install python3-venv)"
fi
: >"$log"

echo "install 2/4: vLLM for CPU (about 2 minutes)"
docker/install-cpu.sh "$python" "$log"

echo "install 3/4: this project, test and benchmark tools"
# Without the extra `cpu`: pip would fetch again what install-cpu.sh has just removed.
pip_install --editable '.[test,bench]'
# Tests compare decisions with kvpress's. Its declared range of transformers excludes the version that vLLM needs, and
# its other dependencies belong to parts that no test imports: pip installs it alone and resolves nothing.
pip_install --no-deps kvpress==0.5.5

echo "install 4/4: a small real model to measure with (540 MB in the cache, shared by all clones)"
# Without it everything else works; the command has said in one sentence why it is not there.
if ! "$python" -m vllm_kvevict quality checkpoint >>"$log"; then
  echo "install: going on without it: tests on a real model are skipped, or fail where CI=true"
fi

# pip would compile on one core. Some packages carry files that are not valid Python, hence the `|| true`.
"$python" -m compileall -qq -j 0 .venv/lib || true

echo "install: done"
