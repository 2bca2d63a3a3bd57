#!/usr/bin/env bash
# Run a command with a folder of its own for what MIOpen and Triton compile.   with_private_cache.sh COMMAND [WORD ...]
# It lies on the node (CACHE_ROOT, by itself TMPDIR or /tmp), is closed to others, and is gone when the command ends.
set -euo pipefail
if (($# < 1)); then echo "usage: with_private_cache.sh COMMAND [WORD ...]" >&2; exit 2; fi
cache=$(mktemp -d "${CACHE_ROOT:-${TMPDIR:-/tmp}}/cache-${SLURM_JOB_ID:-job}-${SLURM_PROCID:-rank}-XXXXXXXX")
export MIOPEN_USER_DB_PATH=$cache/miopen MIOPEN_CUSTOM_CACHE_DIR=$cache/miopen TRITON_CACHE_DIR=$cache/triton
mkdir "$cache/miopen" "$cache/triton"
trap 'rm -rf -- "$cache"' EXIT
for signal in USR1 TERM INT; do
    # shellcheck disable=SC2064
    trap "kill -s $signal \$command 2>/dev/null || true" "$signal"
done
"$@" &
command=$!
# a signal ends `wait` before the command has ended
while status=0; wait "$command" || status=$?; kill -0 "$command" 2>/dev/null; do :; done
exit "$status"
