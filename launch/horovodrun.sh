#!/usr/bin/env bash
# Train with Horovod's own launcher: on one host over MPI, if Horovod was built with it; on several over Gloo, by ssh.
set -euo pipefail
# shellcheck source=launch/options.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/options.sh"
usage='launch/horovodrun.sh [OPTIONS] [--] PROGRAM...
  launch/horovodrun.sh -np 8 python -m hvdtrain.mnist
  launch/horovodrun.sh -H a:4,b:4 --interface eth0 python -m hvdtrain.mnist'
read_options "$@"

[[ -w /dev/shm || ${DRY_RUN:-0} != 0 ]] || refuse "/dev/shm cannot be written (read-only or absent): mount it, or use mpirun.sh"
type horovodrun >/dev/null 2>&1 || [[ ${DRY_RUN:-0} != 0 ]] || refuse "no horovodrun on PATH: activate the environment"
command=(horovodrun -np "$ranks")
[[ -z $hosts ]] || command+=(-H "$hosts")
asked=$transport
choose_transport
if ((remote)); then
    # Without a name, Horovod searches for the interface with services that unpickle what they receive (docs/reference/security.md).
    [[ -n $interface ]] || refuse "-H $hosts needs --interface NAME: the interface that joins the hosts"
    [[ $transport == gloo ]] || refuse "--transport mpi between hosts: use mpirun.sh"
    command+=(--gloo --network-interfaces "$interface")
    silent=''
    if ((start_timeout)) && [[ ${DRY_RUN:-0} == 0 ]]; then # Horovod's own check has no time limit after the login
        silent=$(silent_hosts "${host_names[@]}")
    fi
    if [[ -n $silent ]]; then # not `refuse`: with --restarts, the host may answer later
        say "error: no answer over ssh:$silent: try ssh NAME true, and look at the host"
        exit 1
    fi
elif [[ $asked != auto ]]; then
    command+=("--$transport") # else Horovod chooses: MPI if it was built with it
fi
[[ -z $fusion_mb ]] || command+=(--fusion-threshold-mb "$fusion_mb")
[[ -z $cycle_ms ]] || command+=(--cycle-time-ms "$cycle_ms")
[[ -z $timeline ]] || command+=(--timeline-filename "$timeline")
[[ -z $autotune ]] || command+=(--autotune --autotune-log-file "$autotune")

((start_timeout == 600)) || export HVDTRAIN_START_TIMEOUT=$start_timeout # for hvdtrain/launching/import_timeout.py
split_environment
run_without_dropped "${command[@]}" "${program[@]}"
