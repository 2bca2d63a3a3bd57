#!/usr/bin/env bash
# Run a command with private MIOpen and Triton compile caches.   with_private_cache.sh COMMAND [WORD ...]
# The folder is on the node (CACHE_ROOT, default TMPDIR or /tmp), with mode 0700, and is removed when the command ends.
set -euo pipefail
if (($# < 1)); then echo "usage: with_private_cache.sh COMMAND [WORD ...]" >&2; exit 2; fi
cache=$(mktemp -d "${CACHE_ROOT:-${TMPDIR:-/tmp}}/cache-${SLURM_JOB_ID:-job}-${SLURM_PROCID:-rank}-XXXXXXXX")
export MIOPEN_USER_DB_PATH=$cache/miopen MIOPEN_CUSTOM_CACHE_DIR=$cache/miopen TRITON_CACHE_DIR=$cache/triton
mkdir "$cache/miopen" "$cache/triton"
trap 'rm -rf -- "$cache"' EXIT
passed='' command=''
trap 'passed+=" USR1"; kill -s USR1 "$command" 2>/dev/null || true' USR1
# a terminal's Ctrl-C also reaches the command directly, and a second INT would end it before it has saved
trap 'passed+=" TERM"; kill -s TERM "$command" 2>/dev/null || true' TERM INT
trap 'passed+=" HUP"; kill -s HUP "$command" 2>/dev/null || true' HUP
"$@" &
command=$!
# pass on signals that arrived before the command was started
for signal in $passed; do kill -s "$signal" "$command" 2>/dev/null || true; done
# a signal interrupts `wait`, whether or not the command has ended; only an uninterrupted `wait` returns its status
while before=$passed status=0; wait "$command" || status=$?; [ "$passed" != "$before" ]; do :; done
exit "$status"
