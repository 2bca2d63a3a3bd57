#!/usr/bin/env bash
# Downstream scores of checkpoints on this machine.   downstream.sh ranking|generation CHECKPOINT|RUN|STUDY [option ...]
# GPUS=2 takes two; without a GPU: GPUS=1 and --device cpu.
set -euo pipefail
if (($# < 2)); then echo "usage: downstream.sh ranking|generation CHECKPOINT|RUN|STUDY [option ...]" >&2; exit 2; fi
cd "$(dirname "$0")/../.."
kind=$1
models=$2
shift 2
case $kind in
    ranking) tasks=arc_easy,boolq,copa,hellaswag,piqa,race,winogrande,sciq ;;
    generation) tasks=lambada_openai ;;
    *) echo "error: $kind: wanted ranking or generation" >&2; exit 2 ;;
esac
exec torchrun --standalone --nproc-per-node="${GPUS:-gpu}" tools/evaluate_downstream.py "$models" --tasks "$tasks" "$@"
