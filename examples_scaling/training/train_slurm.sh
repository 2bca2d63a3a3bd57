#!/usr/bin/env bash
# Train one run under Slurm, a task for each GPU. Change the header to your cluster's words and nothing below it.
#   MODEL=425M DATA=utils/datapaths/c4.txt EPOCHS=100 OBJECTIVE=mdm sbatch train_slurm.sh [section.key=value ...]
# Submit from the checkout; settings.sh lists the variables. Two minutes before its time is up, or when preempted,
# the job saves, puts itself into the queue again and goes on from there, until the run is done.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail
if [ -z "${SLURM_SUBMIT_DIR:-}" ]; then echo "error: no job of Slurm; submit this script with sbatch" >&2; exit 2; fi
cd "$SLURM_SUBMIT_DIR"
if ! [ -f tools/pretrain.py ]; then echo "error: $PWD: no checkout; sbatch from the checkout's root" >&2; exit 2; fi
source examples_scaling/training/settings.sh
source examples_scaling/training/requeue.sh
declare -a srun_words # further words for srun, if a script that sources this one has set them
requeue srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    "${srun_words[@]}" "${around[@]}" python tools/pretrain.py "$config" "${words[@]}"
