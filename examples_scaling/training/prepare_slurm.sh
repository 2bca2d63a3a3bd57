#!/usr/bin/env bash
# Tokenise a corpus on many machines under Slurm: an array of PARTS tasks, one part of the input's bytes each.
#   PARTS=16 INPUT='c4/*.json.gz' OUT=tokens/c4 TOKENIZER=gpt2 sbatch --array=1-16 prepare_slurm.sh [--append-eod ...]
#   INPUT   files, folders and patterns, separated by spaces      OUT    prefix of the dataset
#   KEY     of the text, default text      MERGE   --parts (default): the last task lists the parts; --output: copies them
# Submit from the checkout. Two minutes before its time limit, or when preempted, a task stops after its current piece,
# requeues itself and resumes; a task of a node that failed is requeued by Slurm. Submit again to repeat failed tasks.
#SBATCH --job-name=prepare
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail
: "${SLURM_ARRAY_TASK_ID:?Submit this script with sbatch --array=1-PARTS}" "${PARTS:?Set it to the number of parts}"
: "${INPUT:?Set it to the files}" "${OUT:?Set it to the prefix of the dataset}" "${TOKENIZER:?Set it, such as gpt2}"
cd "${SLURM_SUBMIT_DIR:?}"
if ! [ -f tools/pretrain.py ]; then echo "error: $PWD: not a checkout. Submit from the checkout's root." >&2; exit 2; fi
source examples_scaling/training/requeue.sh
read -ra input <<<"$INPUT" # not expanded here: the tool expands patterns, and a word of 1,024 files is long
step=(srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
requeue "${step[@]}" python tools/preprocess_data_many_cores.py --input "${input[@]}" --output-prefix "$OUT" \
    --tokenizer-model "$TOKENIZER" --json-keys "${KEY:-text}" --workers "${SLURM_CPUS_PER_TASK:-1}" \
    --part "$SLURM_ARRAY_TASK_ID/$PARTS" "$@"
# the task that finishes last joins the parts; flock: two may finish at the same time
name=_${KEY:-text}_document
parts=("$OUT"-part-*-of-"$(printf %05d "$PARTS")$name.json")
if ((${#parts[@]} < PARTS)); then echo "${#parts[@]} of $PARTS parts are finished"; exit; fi
requeue "${step[@]}" flock --nonblock --conflict-exit-code=0 "${parts[0]}" \
    python tools/merge_datasets.py "${parts[@]%.json}" "${MERGE:---parts}" "$OUT$name"
