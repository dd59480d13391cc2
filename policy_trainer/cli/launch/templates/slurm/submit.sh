#!/bin/bash
# Submits the jobs of run {{ run }}: the server, the trainer when that has begun, and the workers after the trainer.
set -Eeuo pipefail
cd {{ directory | quote }}

# job_ids lists the jobs of the last submission, a line `ID ROLE` for each.
unset "${!SQUEUE_@}"
queue=$(squeue --me --noheader --format=%F)
if [ -e job_ids ] && grep --quiet --word-regexp --file <(cut -d ' ' -f 1 job_ids) <<<"$queue"; then
  echo "jobs of this run are in the queue; wait for them, or: scancel $(cut -d ' ' -f 1 job_ids | xargs)" >&2
  exit 1
fi
rm -f job_ids ended server.url
# If this is called inside an allocation, its variables are not for the jobs.
mapfile -t of_allocation < <(compgen -e | grep -E '^(SLURM|SRUN)_' | grep -v '^SLURM_CONF$')
unset "${of_allocation[@]}"

trap 'if [ -e job_ids ]; then scancel $(cut -d " " -f 1 job_ids); fi' ERR
submit() {  # the role, then options
  local answer
  answer=$(sbatch --parsable "${@:2}" "$1.sbatch")
  echo "${answer%;*} $1" >>job_ids
}
id_of() { sed -n "s/ $1$//p" job_ids; }
submit server
submit trainer --dependency=after:"$(id_of server)"
submit workers --dependency=after:"$(id_of trainer)"

echo "submitted the jobs $(id_of server) (server), $(id_of trainer) (trainer) and $(id_of workers) (workers); their logs are in $PWD"
echo "to stop the run after the current step, with a checkpoint: echo stopped > ${PWD@Q}/ended"
echo "to stop it at once: scancel $(cut -d ' ' -f 1 job_ids | xargs)"
