#!/usr/bin/env bash
# Train one run with mpirun, one process per GPU of each host. Start it on the first host.
#   MODEL=425M DATA=utils/datapaths/c4.txt EPOCHS=100 OBJECTIVE=mdm RANKS=16 train_mpi.sh [section.key=value ...]
# Relative paths start at the checkout, whatever the working directory.
# settings.sh lists the variables. RANKS: default is the GPUS of this host. MPI_FLAGS: more arguments for mpirun, such
# as "--hostfile hosts". After an interruption, run the same command again to resume.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples_scaling/training/settings.sh
gpus=${GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
export MASTER_ADDR=${MASTER_ADDR:-$(hostname)}
read -ra flags <<<"${MPI_FLAGS:-}"
# Open MPI passes only the variables named with -x to other hosts; MPICH passes all of them
if [[ $(mpirun --version) == *"Open MPI"* ]]; then
    flags+=(--bind-to none)
    read -ra network <<<"$(compgen -e | grep -E '^(NCCL|GLOO|FI|CXI|UCX|HSA|CACHE)_' | tr '\n' ' ')"
    for name in MASTER_ADDR MASTER_PORT PATH PYTHONPATH LD_LIBRARY_PATH OMP_NUM_THREADS "${network[@]}"; do
        if [ -n "${!name:-}" ]; then flags+=(-x "$name"); fi
    done
fi
exec mpirun -n "${RANKS:-$gpus}" "${flags[@]}" "${around[@]}" \
    python tools/pretrain.py "$config" "${words[@]}"
