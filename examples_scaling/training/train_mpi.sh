#!/usr/bin/env bash
# Train one run through mpirun, a process for each GPU of each host. Run it on the first host.
#   MODEL=425M DATA=utils/datapaths/c4.txt EPOCHS=100 OBJECTIVE=mdm RANKS=16 train_mpi.sh [section.key=value ...]
# Relative paths are seen from the checkout, from wherever this is started.
# settings.sh lists the variables. RANKS: by itself the GPUS of this host. MPI_FLAGS: further words for mpirun, such
# as "--hostfile hosts". Run the same command again to go on after a stop.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples_scaling/training/settings.sh
gpus=${GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
export MASTER_ADDR=${MASTER_ADDR:-$(hostname)}
read -ra flags <<<"${MPI_FLAGS:-}"
# Open MPI gives the environment to other hosts only when told which variables; MPICH gives all of it
if [[ $(mpirun --version) == *"Open MPI"* ]]; then
    flags+=(--bind-to none)
    read -ra network <<<"$(compgen -e | grep -E '^(NCCL|GLOO|FI|CXI|UCX|HSA|CACHE)_' | tr '\n' ' ')"
    for name in MASTER_ADDR MASTER_PORT PATH PYTHONPATH LD_LIBRARY_PATH OMP_NUM_THREADS "${network[@]}"; do
        if [ -n "${!name:-}" ]; then flags+=(-x "$name"); fi
    done
fi
exec mpirun -n "${RANKS:-$gpus}" "${flags[@]}" "${around[@]}" \
    python tools/pretrain.py "$config" "${words[@]}"
