# shellcheck shell=bash
# What the jobs of run {{ run }} have in common. A script that sources this defines `run_step`, which becomes the job's
# process (its step), and calls `supervise`.

set -uo pipefail
umask 077
cd {{ working_directory | quote }} || exit
export PATH={{ programs | quote }}:"$PATH"
here={{ directory | quote }}
# The job's id; in an array that of this task, since SLURM_JOB_ID may stand for the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
# Seconds before a failed step is started again. File locks of a failed node expire meanwhile.
pause=60
# After so many failures in a row without progress a job gives up.
most_failures=3
# Seconds from SIGTERM to SIGKILL.
patience=270
# TMPDIR comes from the submitting node and may not exist here.
[ -d "${TMPDIR:-/tmp}" ] || unset TMPDIR
unset "${!SQUEUE_@}"  # they could hide jobs from squeue
url='' step='' stopping=''

# Keeps the first reason to stop; any other replaces `moved`. `attend` and `supervise` act on it.
stop() { case $stopping in '' | moved) stopping=$1 ;; esac; }
trap 'stop "the time limit is near"' USR1
trap 'stop cancelled' TERM INT

log() { echo "$(date --iso-8601=seconds) $*"; }

# Ends all jobs of the run: they look for this file, which gives the first reason.
end_run() { [ -e "$here/ended" ] || echo "$*" >"$here/ended"; }

nap() { sleep "$1" & wait $!; }  # unlike sleep alone, a signal interrupts it

free_port() { python -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])'; }

server_url() { cat "$here/server.url" 2>/dev/null; }

# Waits until the server has published its address.
find_server() {
  log "waiting for the reference server"
  until url=$(server_url) || [ -n "$stopping" ] || [ -e "$here/ended" ]; do nap 2; done
}

# Ends the run when the job of another role has left Slurm's queue without ending it, as after scancel.
watch_job() {
  local id queue
  while nap 60; do
    id=$(sed -n "s/ $1$//p" "$here/job_ids")
    queue=$(squeue --me --noheader --format=%A) || continue
    if [ -n "$id" ] && ! grep --quiet --word-regexp "$id" <<<"$queue"; then end_run "the job of the $1 has ended"; fi
  done
}

# The output changes while the step does its work.
progress() { echo $((SECONDS / 600)); }

# Asks the step to end.
terminate() { kill -TERM "$step"; }

# Waits for the step. Ends it if there is a reason to stop, such as a server at another address.
attend() {
  local now asked=''  # when the step was asked to end, in seconds of this shell
  while kill -0 "$step" 2>/dev/null; do
    [ ! -e "$here/ended" ] || stop ended
    if [ -n "$url" ] && now=$(server_url) && [ "$now" != "$url" ]; then stop moved; fi
    if [ -n "$stopping" ] && [ -z "$asked" ]; then
      asked=$SECONDS
      terminate
    fi
    [ -z "$asked" ] || [ $((SECONDS - asked)) -lt "$patience" ] || kill -KILL "$step"
    nap 2
  done
  wait "$step"
}

# The pause between two attempts, unless there is nothing left to attempt.
rest() {
  local until=$((SECONDS + pause))
  while [ "$SECONDS" -lt "$until" ] && [ -z "$stopping" ] && [ ! -e "$here/ended" ]; do nap 2; done
}

# Runs the step until it succeeds, is stopped for good, or keeps failing. Returns its status.
supervise() {
  local failures=0 status=143 before
  while :; do
    if [ "$stopping" = moved ]; then
      log "the reference server has moved"
      stopping=''
      find_server
    fi
    if [ -e "$here/ended" ]; then log "the run has ended: $(cat "$here/ended")"; return 0; fi
    case $stopping in
      '') ;;
      cancelled) return "$status" ;;
      *) log "$stopping: the job is requeued"; scontrol requeue "$job"; return "$status" ;;
    esac
    before=$(progress)
    run_step & step=$!
    attend; status=$?
    [ -z "$stopping" ] || continue
    [ "$status" -ne 0 ] || return 0
    [ "$(progress)" = "$before" ] || failures=0
    failures=$((failures + 1))
    log "status $status, failure $failures of $most_failures without progress"
    [ "$failures" -lt "$most_failures" ] || return "$status"
    rest
  done
}
