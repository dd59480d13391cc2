#!/bin/bash
# Submits the jobs of run {{ run }}: the server first, the trainer when that has begun, and the workers after the trainer.
set -euo pipefail
cd {{ directory | quote }}
rm -f ended server.url
server=$(sbatch --parsable server.sbatch)
trainer=$(sbatch --parsable --dependency=after:"${server%;*}" trainer.sbatch)
workers=$(sbatch --parsable --dependency=after:"${trainer%;*}" workers.sbatch)
echo "submitted the jobs ${server%;*} (server), ${trainer%;*} (trainer) and ${workers%;*} (workers); their logs are in $PWD"
echo "to stop the run after the current step, with a checkpoint: echo stopped > $PWD/ended"
echo "to stop it at once: scancel ${server%;*} ${trainer%;*} ${workers%;*}"
