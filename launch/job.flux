#!/bin/bash
# Train under Flux: edit what is marked EDIT, then `flux batch launch/job.flux`. DRY_RUN=1 bash launch/job.flux prints the
# command. It has not run at such a site. A job that comes to its time limit ends: submit it again, and it continues from its
# newest checkpoint.
# flux: --job-name=hvdtrain
# EDIT the following lines: hosts, time, and the log, on a file system that all hosts share
# flux: --nodes=2
# flux: --exclusive
# flux: --time-limit=60m
# flux: --output=hvdtrain-{{id}}.log
set -euo pipefail

ranks=4                             # EDIT: of a host: its GPUs
checkout=$HOME/hvdtrain             # EDIT: this repository, on a file system that all hosts share
modules=''                          # EDIT: the site's modules; what they set reaches the ranks
port=20123                          # EDIT: where the ranks meet, on the first host; another for two jobs on one host
output=$checkout/runs/hvdtrain      # EDIT: the same in the next job continues this one
program=(-m hvdtrain.mnist --output-dir "$output" --no-progress) # EDIT

first=localhost nodes=1
if command -v flux >/dev/null; then
    first=$(flux hostlist --nth=0 local) nodes=$(flux hostlist --count local)
elif [[ ${DRY_RUN:-0} == 0 ]]; then
    echo "job.flux: error: no flux on PATH: submit this file with flux batch" >&2 && exit 2
fi
if [[ ${DRY_RUN:-0} == 0 ]]; then
    # shellcheck disable=SC2086  # several modules; their scripts may ask for variables that are not set
    [[ -z $modules ]] || { set +u && module load $modules && set -u; } || exit
    cd "$checkout"
    # shellcheck disable=SC1091
    source .venv/bin/activate       # EDIT: or `true`, where modules have the environment
fi

# One process on each host, with all its cores and GPUs: it imports once and forks the ranks.
step=(flux run --nodes="$nodes" --ntasks="$nodes" --exclusive --env=MASTER_ADDR="$first" --env=MASTER_PORT="$port"
    python -m hvdtrain.starter --local-ranks "$ranks" "${program[@]}")
if [[ ${DRY_RUN:-0} != 0 ]]; then
    printf -v quoted '%q ' "${step[@]}"
    printf '%s\n' "${quoted% }"
    exit
fi
exec "${step[@]}"
