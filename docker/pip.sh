# shellcheck shell=bash disable=SC2154 # two variables are its caller's
# Sourced by install-cpu.sh and tools/install.sh, which set: python, whose environment pip fills; log, a file.

fail() {
  echo "install: $*" >&2
  exit 1
}

# Passes only what tells a waiting reader something: downloads of 10 MB and more, and the final step.
pip_install() {
  "$python" -m pip install --no-input --disable-pip-version-check --no-compile "$@" 2>&1 | tee -a "$log" |
    sed -un -e 's/^ *Downloading [^ ]*\/\([^ ]* ([0-9]\{2,\}\(\.[0-9]*\)\? MB)\).*/  \1/p' \
      -e 's/^ *Downloading \([^ ]* ([0-9]\{2,\}\(\.[0-9]*\)\? MB)\).*/  \1/p' \
      -e 's/^Installing collected packages:.*/  installing/p' ||
    {
      tail -n 15 "$log" >&2
      fail "pip could not install: $* (the whole output is in $log)"
    }
}
