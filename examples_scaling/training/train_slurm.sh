#!/usr/bin/env bash
# Train one run under Slurm, one task per GPU. Adapt the header to your cluster, and nothing below it.
#   MODEL=425M DATA=utils/datapaths/c4.txt EPOCHS=100 OBJECTIVE=mdm sbatch train_slurm.sh [section.key=value ...]
# Submit from the checkout; settings.sh lists the variables. Two minutes before its time limit, or when preempted,
# the job saves, requeues itself and resumes, until the run is done.
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
if [ -z "${SLURM_SUBMIT_DIR:-}" ]; then echo "error: not a Slurm job. Submit this script with sbatch." >&2; exit 2; fi
cd "$SLURM_SUBMIT_DIR"
if ! [ -f tools/pretrain.py ]; then echo "error: $PWD: not a checkout. Submit from the checkout's root." >&2; exit 2; fi
source examples_scaling/training/settings.sh
source examples_scaling/training/requeue.sh
declare -a srun_words # more arguments for srun, set by a script that sources this one
requeue srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    "${srun_words[@]}" "${around[@]}" python tools/pretrain.py "$config" "${words[@]}"
