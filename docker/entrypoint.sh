#!/usr/bin/env bash
# Turns the container's environment into flags of `vllm serve`. The container's own arguments follow them and win.
#   MODEL               folder (mounted below /models) or name on the Hugging Face hub; required
#   KV_EVICTION         policy; empty: vLLM without eviction
#   KV_BUDGET           ratio of the prompt, or tokens per KV head
#   KV_EVICTION_CONFIG  JSON with further keys
#   PORT                8000 if not given
set -euo pipefail

fail() {
  echo "entrypoint: $*" >&2
  exit 64 # EX_USAGE
}

[ -n "${MODEL:-}" ] || fail "MODEL is not set: a folder below /models, or a name on the Hugging Face hub"
if [ -d "$MODEL" ]; then
  export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" # everything is there: without a network nothing must wait for one
elif [[ $MODEL == /* ]]; then
  fail "MODEL=$MODEL is not a folder in this container: is it mounted?"
fi

flags=(--host 0.0.0.0 --port "${PORT:-8000}")
[ -z "${KV_EVICTION:-}" ] || flags+=(--kv-eviction "$KV_EVICTION")
[ -z "${KV_BUDGET:-}" ] || flags+=(--kv-budget "$KV_BUDGET")
[ -z "${KV_EVICTION_CONFIG:-}" ] || flags+=(--kv-eviction-config "$KV_EVICTION_CONFIG")

# Another user of the group may go on with what this one has compiled.
umask 0002

# exec: signals of the container's engine reach vLLM itself, and its exit status is the container's.
exec vllm serve "$MODEL" "${flags[@]}" "$@"
