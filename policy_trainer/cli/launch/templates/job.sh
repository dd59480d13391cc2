# shellcheck shell=bash
# What the jobs of run {{ run }} have in common. A script that sources this defines `run_step`, which becomes the job's
# step, and `progress`, whose output changes while the step does its work; then it calls `supervise`.

set -uo pipefail
umask 077
cd {{ working_directory | quote }} || exit
export PATH={{ programs | quote }}:"$PATH"
here={{ directory | quote }}
# A step that failed is started again after this pause. It is longer than Slurm's default KillWait, so that a job which
# Slurm is ending does not begin anew.
pause=40
# After so many failures in a row without progress a job gives up.
most_failures=3
url='' step='' stopping=''

# Asks the step to end.
terminate() { kill -TERM "$step"; }

# Stops the step once, and remembers why.
stop() {
  [ -z "$stopping" ] || return 0
  stopping=$1
  [ -z "$step" ] || terminate
}
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

# Waits for the step. Stops it when the run has ended, or when the server is at another address.
attend() {
  while kill -0 "$step" 2>/dev/null; do
    [ ! -e "$here/ended" ] || stop ended
    [ -z "$url" ] || [ "$(server_url)" = "$url" ] || stop moved
    nap 2
  done
  wait "$step"
}

# Runs the step until it succeeds, is stopped for good, or keeps failing. Returns its status.
supervise() {
  local failures=0 before status
  while :; do
    if [ -e "$here/ended" ]; then log "the run has ended: $(cat "$here/ended")"; return 0; fi
    before=$(progress) stopping=''
    run_step & step=$!
    attend; status=$?
    step=''
    case $stopping in
      "") ;;
      moved) log "the reference server has moved"; find_server; continue ;;
      ended) continue ;;
      cancelled) return "$status" ;;
      *) log "$stopping: the job is requeued"; scontrol requeue "$SLURM_JOB_ID"; return "$status" ;;
    esac
    [ "$status" -ne 0 ] && [ "$status" -ne 2 ] || return "$status"  # 2: settings that the user must correct
    [ "$(progress)" = "$before" ] || failures=0
    failures=$((failures + 1))
    log "status $status, failure $failures of $most_failures without progress"
    [ "$failures" -lt "$most_failures" ] || return "$status"
    nap "$pause"
  done
}
