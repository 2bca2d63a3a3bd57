# shellcheck shell=bash disable=SC2034,SC1090
# What the three training scripts understand, as words for tools/pretrain.py. Sourced by them, from the checkout's root.
#   MODEL      a name of utils/model_sizes.yaml, such as 425M            VALID  held-out documents, as DATA
#   DATA       a .bin/.idx prefix, a file of utils/datapaths, or synthetic
#   EPOCHS, TOKENS or STEPS   length of the run, one of them           OBJECTIVE   ar or mdm
#   RUN        folder of the run, by itself experiments/MODEL-OBJECTIVE   SEED, LR
#   ENGINE     deepspeed or torch       CONFIG   base YAML, by itself train.yaml in this folder
#   CLUSTER    what this cluster wants in the environment: a file of examples_scaling/hpc/clusters, or a path of your own
# Settings that are not given are those of the YAML file; section.key=value words go on top of everything.
config=${CONFIG:-examples_scaling/training/train.yaml}
words=(
    "dist.engine=${ENGINE:-deepspeed}"
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
around=() # a command that each process runs under; a cluster's file may set it
if [ -n "${CLUSTER:-}" ]; then
    cluster=$CLUSTER
    if [[ $cluster != */* ]]; then cluster=examples_scaling/hpc/clusters/$CLUSTER.sh; fi
    if ! [ -f "$cluster" ]; then
        echo "error: CLUSTER=$CLUSTER: no file $cluster; take one of examples_scaling/hpc/clusters, or a path" >&2
        exit 2
    fi
    source "$cluster"
fi
