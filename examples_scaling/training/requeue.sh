# shellcheck shell=bash
# Sourced by the Slurm scripts of this folder, which start nothing but what they give it.   requeue COMMAND ...
# Runs the command as the step of this job, passes on the signal that Slurm sends to the batch script (its header's
# --signal, or a preemption), puts the job into the queue again where the step was stopped, and ends with its status.
requeue() {
    local step status asked=
    trap 'asked=yes; kill -USR1 "$step" 2>/dev/null || true' USR1 TERM
    "$@" &
    step=$!
    # a signal ends `wait` before the step has ended
    while status=0; wait "$step" || status=$?; kill -0 "$step" 2>/dev/null; do :; done
    if ((status == 75)) || { ((status)) && [ -n "$asked" ]; }; then
        # a job that somebody has cancelled, or that Slurm itself puts back, is not running any more
        if [ "$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")" = RUNNING ]; then
            exec scontrol requeue "$SLURM_JOB_ID"
        fi
    fi
    exit "$status"
}
