#!/usr/bin/env bash
# Held-out loss of checkpoints on this machine.   validate.sh CHECKPOINT|RUN|STUDY PREFIX|DATAPATH [option ...]
# Checkpoints that were scored before are skipped. GPUS=2 takes two; without a GPU: GPUS=1 and --device cpu.
set -euo pipefail
if (($# < 2)); then echo "usage: validate.sh CHECKPOINT|RUN|STUDY PREFIX|DATAPATH [option ...]" >&2; exit 2; fi
cd "$(dirname "$0")/../.."
models=$1
data=$2
shift 2
exec torchrun --standalone --nproc-per-node="${GPUS:-gpu}" tools/validate.py "$models" --data "$data" "$@"
