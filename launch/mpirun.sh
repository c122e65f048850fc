#!/usr/bin/env bash
# Train under the first mpirun on PATH: Open MPI 4 or 5, MPICH or Intel MPI, each with its own options.
set -euo pipefail
# shellcheck source=launch/options.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/options.sh"
usage='launch/mpirun.sh [OPTIONS] [--] PROGRAM...
  launch/mpirun.sh -np 8 python -m hvdtrain.mnist
  launch/mpirun.sh -H a:4,b:4 --interface eth0 python -m hvdtrain.mnist'
read_options "$@"
choose_transport

settings=() # NAME=VALUE, for every rank
if [[ $transport == gloo ]]; then # mpirun starts the processes, hvdtrain.starter connects them
    [[ ${#program[@]} -gt 1 && ${program[0]} =~ (^|/)python[0-9.]*$ ]] ||
        refuse "--transport gloo starts Python programs: python -m MODULE, or python FILE (or use --transport mpi)"
    [[ -n $interface ]] || ! ((remote)) || refuse "-H $hosts needs --interface NAME: the interface that joins the hosts"
    safe_path=(-P) # as under `python FILE`, modules in the working directory do not replace those of the library
    [[ ${program[1]} != -m ]] || safe_path=()
    program=("${program[0]}" "${safe_path[@]}" -m hvdtrain.starter --interface "${interface:-lo}" "${program[@]:1}")
    if ((remote)) && [[ ${DRY_RUN:-0} == 0 ]]; then # its value is on no command line
        export HVDTRAIN_JOB_SECRET=${HVDTRAIN_JOB_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
        pass_anyway+=(HVDTRAIN_JOB_SECRET)
    fi
    settings+=("MASTER_ADDR=${host_names[0]:-localhost}" "MASTER_PORT=$port")
elif ((${#host_names[@]} > 1)); then
    settings+=(HOROVOD_CPU_OPERATIONS=mpi)
fi
[[ -z $interface ]] || settings+=("NCCL_SOCKET_IFNAME=$interface")
[[ -z $fusion_mb ]] || settings+=("HOROVOD_FUSION_THRESHOLD=$((fusion_mb * 1024 * 1024))")
[[ -z $cycle_ms ]] || settings+=("HOROVOD_CYCLE_TIME=$cycle_ms")
[[ -z $timeline ]] || settings+=("HOROVOD_TIMELINE=$timeline")
[[ -z $autotune ]] || settings+=(HOROVOD_AUTOTUNE=1 "HOROVOD_AUTOTUNE_LOG=$autotune")
((start_timeout == 600)) || export HVDTRAIN_START_TIMEOUT=$start_timeout # for hvdtrain/launching/import_timeout.py
split_environment

open_mpi() { # MAJOR VERSION
    local name control=--mca
    command=(mpirun -np "$ranks")
    [[ -z $hosts ]] || command+=(-H "$hosts")
    ((!remote)) || command[0]=$(command -v mpirun) # called by its path, Open MPI uses the same path on every host
    # Bound to one core per rank, the threads of torch, Horovod and MPI would compete for it.
    command+=(--bind-to none --map-by slot)
    (($1 < 5)) || control=--prtemca # for the connections of the daemons, which version 5 has in PRRTE
    if [[ -n $interface ]]; then
        command+=(--mca btl_tcp_if_include "$interface" "$control" oob_tcp_if_include "$interface")
    elif ! ((remote)); then
        command+=(--mca btl '^tcp,ofi') # only shared memory; ofi would sleep for a second at the end
    fi
    # ssh only starts Open MPI's daemon on a host, and then ends. In SGE's jobs, Open MPI uses qrsh in place of ssh.
    if ((remote && start_timeout)) && [[ -z ${OMPI_MCA_plm_rsh_agent-}${PRTE_MCA_plm_ssh_agent-}${PE_HOSTFILE-} ]]; then
        command+=(--mca plm_rsh_agent "timeout --foreground $start_timeout ssh -x $ssh_limits")
    fi
    for name in "${passed[@]}"; do # names only; ranks on this host inherit the others from mpirun
        [[ $name =~ $own_host ]] || command+=(-x "$name")
    done
    for name in "${settings[@]}"; do command+=(-x "$name"); done
}

hydra() { # mpich or intel
    local name names list=''
    command=(mpirun -np "$ranks")
    if ((remote && start_timeout)); then # Hydra's ssh lasts as long as the job
        [[ $1 == intel ]] && name=I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS || name=HYDRA_LAUNCHER_EXTRA_ARGS
        [[ -n ${!name-} ]] || command=(env "$name=$ssh_limits" "${command[@]}")
    fi
    if [[ -n $hosts ]]; then
        [[ -n $slots_each ]] || refuse "-H $hosts: $1's -hosts takes the same number of slots on every host"
        printf -v names '%s,' "${host_names[@]}"
        command+=(-hosts "${names%,}" -ppn "$slots_each")
    fi
    [[ -z $interface ]] || command+=(-iface "$interface")
    [[ $1 == intel ]] || command+=(-bind-to none) # Intel MPI binds each rank to its share of the cores
    for name in "${passed[@]}"; do
        ((remote)) && [[ $name =~ $own_host ]] || list+=${list:+,}$name
    done
    command+=(-genvlist "$list")
    for name in "${settings[@]}"; do command+=(-genv "${name%%=*}" "${name#*=}"); done
}

version=$(mpirun --version 2>/dev/null) || refuse "no mpirun on PATH: activate the environment, or load the MPI module"
case $version in
*'(Open MPI) '*) major=${version#*'(Open MPI) '} && open_mpi "${major%%.*}" ;;
*'Intel(R) MPI'*) hydra intel ;;
*HYDRA* | *MPICH*) hydra mpich ;;
*) refuse "unknown MPI (mpirun --version says: ${version%%$'\n'*}): use Open MPI, MPICH or Intel MPI" ;;
esac
run_without_dropped "${command[@]}" "${program[@]}"
