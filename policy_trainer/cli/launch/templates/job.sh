# shellcheck shell=bash
# What the jobs of run {{ run }} have in common. A script that sources this defines `run_step`, which becomes the job's
# process (its step), and `progress`, whose output changes while the step does its work; then it calls `supervise`.

set -uo pipefail
umask 077
cd {{ working_directory | quote }} || exit
export PATH={{ programs | quote }}:"$PATH"
here={{ directory | quote }}
# Of an array, this task; SLURM_JOB_ID may stand for all of them.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
# A step that failed is started again after this pause. Meanwhile locks of a node that failed expire.
pause=60
# After so many failures in a row without progress a job gives up.
most_failures=3
# A step that was asked to end is killed after so many seconds.
patience=270
# The files of the node, not those of the one from which the job was submitted.
[ -d "${TMPDIR:-/tmp}" ] || unset TMPDIR
url='' step='' stopping=''

# Keeps the first reason to stop. `attend` and `supervise` act on it.
stop() { [ -n "$stopping" ] || stopping=$1; }
trap 'stop "the time limit is near"' USR1
trap 'stop cancelled' TERM INT

log() { echo "$(date --iso-8601=seconds) $*"; }

# Ends all jobs of the run: they look for this file, which gives the first reason.
end_run() { [ -e "$here/ended" ] || echo "$*" >"$here/ended"; }

nap() { sleep "$1" & wait $!; }  # unlike sleep alone, a signal interrupts it

server_url() { cat "$here/server.url" 2>/dev/null; }

# Waits until the server has published its address.
find_server() {
  log "waiting for the reference server"
  until url=$(server_url) || [ -n "$stopping" ] || [ -e "$here/ended" ]; do nap 2; done
}

# Asks the step to end.
terminate() { kill -TERM "$step"; }

# Waits for the step. Ends it if there is a reason to stop, such as a server at another address.
attend() {
  local asked=''  # when the step was asked to end, in seconds of this shell
  while kill -0 "$step" 2>/dev/null; do
    [ ! -e "$here/ended" ] || stop ended
    [ -z "$url" ] || [ "$(server_url)" = "$url" ] || stop moved
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
