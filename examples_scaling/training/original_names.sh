# shellcheck shell=bash disable=SC2154,SC1091
# Sourced from the checkout's root by scripts with the names of the original study (arm/, mdm/, ../quickstart): starts
# train.sh, or train_slurm.sh in a Slurm job, with the original's variables. All may be set in the environment:
#   MODEL_PARAM=425M   DATA_CNT=100M (utils/epoch_tokens.yaml) or a number: unique tokens   EPOCH_CNT
#   FLOPS_FACTOR=6: tokens for 6e18 FLOPs by the original's count, 6 N D; then EPOCH_CNT is optional
#   VARIANT: the run's folder is experiments/VARIANT   TRAIN_DATA_PATH, VALID_DATA_PATH   OBJECTIVE   SEQ_LEN
#   MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE   TP_SIZE, PP_SIZE   ZERO_STAGE   SAVE_, EVAL_, LOG_INTERVAL, EVAL_ITERS
#   ATTENTION_DROPOUT, HIDDEN_DROPOUT: 0.1, Megatron's default, which the original's commands do not change
#   CHECKPOINT_PATH, KILL_SWITCH_PATH   WANDB_PROJECT, WANDB_EXP_NAME, WANDB_GROUP
# GPUS, ENGINE, LR, SEED, RUN and CLUSTER are as in settings.sh; section.key=value arguments override everything.
source utils/epoch_tokens.sh
: "${DATA_CNT:=}" "${FLOPS_FACTOR:=}" "${SEQ_LEN:=2048}" "${TP_SIZE:=1}" "${PP_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=256}" \
    "${SAVE_INTERVAL:=1000}" "${EVAL_INTERVAL:=1000}" "${LOG_INTERVAL:=10}" "${EVAL_ITERS:=10}"
name=DATA_$DATA_CNT size="PARAM_${MODEL_PARAM}[@]" tokens='' total=''
unique=$([[ $DATA_CNT =~ ^[0-9]+$ ]] && echo "$DATA_CNT" || echo "${!name:-}") # empty: all of TRAIN_DATA_PATH
if [[ -n $FLOPS_FACTOR && -n ${!size:-} ]]; then # for an unknown size train.sh reports the nearest
    shape=("${!size}") # d_model ffw_size kv_size n_heads n_layers
    weights='4 * l * d**2 + 3 * l * d * (8 * d // 192 * 64) + 6 * l * d + 50257 * d' # N of the original's scripts
    total=$(python -c "d, l, s = ${shape[0]}, ${shape[4]}, $SEQ_LEN
print(round(int($FLOPS_FACTOR * 1e9 / 6 * (1e9 / ($weights))) / s) * s)")
    if [ "${EPOCH_CNT:-1}" != 1 ]; then tokens=$((total / EPOCH_CNT / SEQ_LEN * SEQ_LEN)); fi
elif [ -n "$unique" ]; then
    tokens=$(((unique - 1) / SEQ_LEN * SEQ_LEN)) # whole samples; the last token is only a target
elif [ -n "$DATA_CNT" ]; then
    echo "error: DATA_CNT: got $DATA_CNT, expected a number or a name of utils/epoch_tokens.yaml" >&2 && exit 2
fi
if ((TP_SIZE * PP_SIZE > 1)); then
    ENGINE=${ENGINE:-torch} # on several nodes too: DeepSpeed's engine has neither
fi
export OBJECTIVE ENGINE MODEL=$MODEL_PARAM DATA=$TRAIN_DATA_PATH VALID=$VALID_DATA_PATH RUN=${RUN:-experiments/$VARIANT}
if [ -n "${WANDB_GROUP:-}" ]; then export WANDB_RUN_GROUP=$WANDB_GROUP; fi
if [ -n "$total" ]; then export TOKENS=$total; else export EPOCHS=${EPOCH_CNT:-1}; fi
set -- "name=${WANDB_EXP_NAME:-$VARIANT}" "dataset.seq_len=$SEQ_LEN" "dataset.batch_size=$GLOBAL_BATCH_SIZE" \
    "dist.tensor_parallel=$TP_SIZE" "dist.pipeline_parallel=$PP_SIZE" ${tokens:+"dataset.unique_tokens=$tokens"} \
    "checkpoint.chkpt_saving_iterations=$SAVE_INTERVAL" "evaluation.every_iterations=$EVAL_INTERVAL" \
    "logging.every_iterations=$LOG_INTERVAL" "evaluation.max_samples=$((EVAL_ITERS * GLOBAL_BATCH_SIZE))" \
    ${MICRO_BATCH_SIZE:+"dataset.microbatch_size=$MICRO_BATCH_SIZE"} \
    "model.attention_dropout=${ATTENTION_DROPOUT:-0.1}" "model.hidden_dropout=${HIDDEN_DROPOUT:-0.1}" \
    ${ZERO_STAGE:+"dist.sharding_stage=zero$ZERO_STAGE"} ${CHECKPOINT_PATH:+"checkpoint.directory=$CHECKPOINT_PATH"} \
    ${KILL_SWITCH_PATH:+"misc.stop_file=$KILL_SWITCH_PATH"} ${WANDB_PROJECT:+"logging.wandb=$WANDB_PROJECT"} "$@"
if [ -z "${SLURM_JOB_ID:-}" ]; then exec bash examples_scaling/training/train.sh "$@"; fi
source examples_scaling/training/train_slurm.sh
