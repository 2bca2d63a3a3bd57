# shellcheck shell=bash disable=SC2034,SC1090
# Converts the variables of the training scripts to arguments of tools/pretrain.py. Sourced from the checkout's root.
#   MODEL      a name of utils/model_sizes.yaml, such as 425M            VALID  held-out documents, as DATA
#   DATA       a .bin/.idx prefix, a file of utils/datapaths, or synthetic
#   EPOCHS, TOKENS or STEPS   length of the run, one of them           OBJECTIVE   ar or mdm
#   RUN        folder of the run, default experiments/MODEL-OBJECTIVE    SEED, LR
#   ENGINE     torch (default on one node) or deepspeed (on several)   CONFIG   base YAML, default train.yaml here
#   CLUSTER    environment variables of the cluster: a name in examples_scaling/hpc/clusters, or the path of a file
# Settings that are not given come from the YAML file; section.key=value arguments override everything.
config=${CONFIG:-examples_scaling/training/train.yaml}
engine=torch # its blocks are compiled on GPUs
if ((${SLURM_JOB_NUM_NODES:-1} > 1)) || [[ ${MPI_FLAGS:-} == *host* ]]; then engine=deepspeed; fi
words=(
    "dist.engine=${ENGINE:-$engine}"
    ${MODEL:+"model.size=$MODEL"}
    ${DATA:+"dataset.path_train=$DATA"}
    ${VALID:+"dataset.path_eval=$VALID"}
    ${EPOCHS:+"lr_scheduler.total_epochs=$EPOCHS"}
    ${TOKENS:+"lr_scheduler.total_tokens=$TOKENS"}
    ${STEPS:+"lr_scheduler.total_iterations=$STEPS"}
    ${OBJECTIVE:+"objective.name=$OBJECTIVE"}
    ${LR:+"optim.lr=$LR"}
    ${SEED:+"misc.seed=$SEED"}
    "logging.run_dir=${RUN:-experiments/${MODEL:-run}-${OBJECTIVE:-ar}}"
    "$@"
)
around=() # wrapper command of each process; a cluster's file may set it
if [ -n "${CLUSTER:-}" ]; then
    cluster=$CLUSTER
    if [[ $cluster != */* ]]; then cluster=examples_scaling/hpc/clusters/$CLUSTER.sh; fi
    if ! [ -f "$cluster" ]; then
        echo "error: CLUSTER=$CLUSTER: no file $cluster. Name one in examples_scaling/hpc/clusters, or give a path." >&2
        exit 2
    fi
    source "$cluster"
fi
