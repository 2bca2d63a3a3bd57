# shellcheck shell=bash
# Sourced by the Slurm scripts of this folder.   requeue COMMAND ...
# Runs the command as the step of this job and passes on the signal that Slurm sends to the batch script (--signal in
# its header, or a preemption). If the step was stopped, the job is requeued; if it failed, the shell exits with the
# step's status. A run that was stopped by its stop file is not requeued while that file exists.
stop_file() { # print misc.stop_file of the command's run, read from its configuration
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
    local step='' status before n_signals=0
    trap 'n_signals=$((n_signals + 1)); kill -USR1 "$step" 2>/dev/null || true' USR1 TERM
    "$@" &
    step=$!
    # pass on signals that arrived before the step was started
    if ((n_signals)); then kill -USR1 "$step" 2>/dev/null || true; fi
    # a signal interrupts `wait`, whether or not the step has ended; only an uninterrupted `wait` returns its status
    while before=$n_signals status=0; wait "$step" || status=$?; ((n_signals > before)); do :; done
    if ((status == 0)); then
        trap - USR1 TERM
        return
    fi
    local stop
    stop=$(stop_file "$@")
    if [ -n "$stop" ] && [ -e "$stop" ]; then
        echo "not requeued: the stop file $stop exists. Remove it and submit the job again." >&2
        exit "$status"
    fi
    if ((status == 75 || n_signals)); then
        # a job that was cancelled, or that Slurm itself requeues, is no longer RUNNING
        local state='' tries=10 # a controller that restarts is unavailable for a while
        until state=$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID") || ((--tries == 0)); do
            sleep "${REQUEUE_PAUSE:-5}"
        done
        if [ "$state" = RUNNING ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi
    fi
    exit "$status"
}
