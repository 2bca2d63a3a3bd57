# shellcheck shell=bash
# Sourced by the Slurm scripts of this folder, which start nothing but what they give it.   requeue COMMAND ...
# Runs the command as the step of this job, passes on the signal that Slurm sends to the batch script (its header's
# --signal, or a preemption), puts the job into the queue again where the step was stopped, and ends with its status.
# A run that was stopped by its stop file, the kill switch, stays out of the queue while that file is there.
stop_file() { # of the command's run, as its folder's configuration says it
    local word file=/dev/null
    for word in "$@"; do
        case $word in
            *.yaml) file=$word ;;
            logging.run_dir=*) file=${word#*=}/config.yaml ;;
        esac
    done
    if [ -f "$file" ]; then sed -n 's/^  stop_file: //p' "$file"; fi
}
requeue() {
    local step='' status before asked=0
    trap 'asked=$((asked + 1)); kill -USR1 "$step" 2>/dev/null || true' USR1 TERM
    "$@" &
    step=$!
    # what came before there was a step to pass it on to
    if ((asked)); then kill -USR1 "$step" 2>/dev/null || true; fi
    # a signal ends `wait`, whether the step has ended by then or not: its own status is what a `wait` without one says
    while before=$asked status=0; wait "$step" || status=$?; ((asked > before)); do :; done
    local stop
    stop=$(stop_file "$@")
    if ((status)) && [ -n "$stop" ] && [ -e "$stop" ]; then
        echo "not put into the queue again: $stop is there; remove it and submit once more" >&2
        exit "$status"
    fi
    if ((status == 75)) || ((status && asked)); then
        # a job that somebody has cancelled, or that Slurm itself puts back, is not running any more
        local state='' tries=10 # a controller that restarts does not answer for a while
        until state=$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID") || ((--tries == 0)); do
            sleep "${REQUEUE_PAUSE:-5}"
        done
        if [ "$state" = RUNNING ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi
    fi
    exit "$status"
}
