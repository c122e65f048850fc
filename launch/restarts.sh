# --restarts N for horovodrun.sh and mpirun.sh: start the job again after a failure. Sourced by both.
# shellcheck shell=bash disable=SC2154  # variables that options.sh sets

# Exit codes that are not retried: done, bad input, target not reached, stopped on request or by a signal.
final='^(0|2|3|75|129|130|143)$'
end_seconds=10 # between SIGTERM and SIGKILL for a job that has not started

read_program() { # sets `checkpoints`, the directory or nothing, and `resume`, from the arguments of the program
    local i
    checkpoints='' resume=auto
    for ((i = 0; i < ${#program[@]}; i++)); do
        case ${program[i]} in
        --output-dir) checkpoints=${program[i + 1]-}/checkpoints ;;
        --output-dir=*) checkpoints=${program[i]#*=}/checkpoints ;;
        --resume) resume=${program[i + 1]-} ;;
        --resume=*) resume=${program[i]#*=} ;;
        esac
    done
}

newest_checkpoint() { # prints its name, or nothing
    local files
    [[ -n $checkpoints ]] || return 0
    shopt -s nullglob
    files=("$checkpoints"/step-*.safetensors) # numbers have eight digits, so the order by name is that by step
    ((${#files[@]} == 0)) || printf '%s\n' "${files[-1]##*/}"
}

identity() { # prints that of the directory, if it has checkpoints: `--resume never` and PATH move an earlier run's aside
    [[ -z $(newest_checkpoint) ]] || stat -c %d:%i "$checkpoints" || :
}

resume_own() { # the next attempts continue from what this job has written, and do not start over as --resume says
    local i
    for ((i = 0; i < ${#started[@]}; i++)); do
        case ${started[i]} in
        --resume) started[i + 1]=auto ;;
        --resume=*) started[i]=--resume=auto ;;
        esac
    done
    resume=auto
}

hosts_that_answer() { # sets answering (as for -H) and answering_slots; without -H, this host
    local entry name silent
    answering='' answering_slots=0
    [[ -n $hosts ]] || { answering_slots=$ranks && return; }
    silent=$(silent_hosts "${host_names[@]}" 2>/dev/null)
    for entry in ${hosts//,/ }; do
        name=${entry%%:*}
        if [[ "$silent " == *" $name "* ]]; then
            say "$name does not answer"
            continue
        fi
        answering+=${answering:+,}$entry
        if [[ $entry == *:* ]]; then ((answering_slots += ${entry##*:})); else ((answering_slots += 1)); fi
    done
}

ask_to_stop() { # PID: Open MPI's mpirun (also under horovodrun) sends SIGKILL after SIGTERM, but forwards SIGUSR1
    local name='' signal=TERM
    { read -r name <"/proc/$1/comm"; } 2>/dev/null || :
    [[ ! $name =~ ^(mpirun|orterun|prterun)(_wrapper|\.real)?$ ]] || ((stopped)) || signal=USR1 # the second request: SIGTERM
    stopped=1
    kill "-$signal" "$1" 2>/dev/null
}

serve_imports() { # sets `started`: the program, with ranks from a fork server if possible (hvdtrain/launching/forker.py)
    local name='' dropped_here=() answers python=("${program[0]}")
    local limit=$((0 < start_timeout && start_timeout < 20 ? start_timeout : 20))
    started=("${program[@]}")
    # On this host only, and not if hvdtrain.starter or hvdtrain.tuned must run first in each rank's process.
    ((!remote)) && [[ $transport == auto || $transport == mpi || ${0##*/} == horovodrun.sh ]] || return 0
    [[ ${#program[@]} -gt 1 && ${program[0]} =~ (^|/)python[0-9.]*$ ]] || return 0
    case ${program[1]} in
    -m) [[ ! ${program[2]-} =~ ^hvdtrain\.(starter|tuned)$ ]] || return 0 ;;
    -*) return 0 ;;
    *) python+=(-P) ;; # as under `python FILE`, modules in the working directory do not replace those of the library
    esac
    # It may hang, as on a file system that does not answer: then not even SIGKILL ends it, so only `read` is waited for.
    read -r -t "$limit" < <(exec 2>/dev/null && timeout -k 1 "$limit" "${python[@]}" -c 'import hvdtrain' >&2 && echo) || return 0
    split_environment
    for name in "${dropped[@]}"; do dropped_here+=(-u "$name"); done
    exec {answers}< <(exec env "${dropped_here[@]}" "${python[@]}" -m hvdtrain.launching.forker "${program[@]:1}")
    # shellcheck disable=SC2064  # this process
    trap "kill $! 2>/dev/null || :" EXIT
    if read -r -t "$limit" name <&"$answers"; then
        export HVDTRAIN_FORK_SERVER=$name
        started=("${python[@]}" -m hvdtrain.launching.fork_client "${program[@]:1}")
    fi
    exec {answers}<&-
}

reports_its_start() { # whether a rank on this host imports hvdtrain.training, which then writes to HVDTRAIN_START_PIPE
    local entry here=0
    [[ -n $answering ]] || here=1
    for entry in ${answering//,/ }; do ! is_this_host "${entry%%:*}" || here=1; done
    ((here && start_timeout)) && [[ ${#started[@]} -gt 1 && ${started[0]} =~ (^|/)python[0-9.]*$ ]] || return 1
    case ${started[1]} in
    -P) [[ ${started[3]-} == hvdtrain.launching.fork_client ]] ;; # by serve_imports; else the option of a program
    -m) [[ ${started[2]-} == hvdtrain.* ]] ;;
    -*) return 1 ;;
    *) grep -qsE '^(import hvdtrain\.training|from hvdtrain\.training|from hvdtrain import (.*, *)?training)\>' -- "${started[1]}" ;;
    esac
}

wait_for_start() { # PID: until a rank has reported, or the job has ended. Returns 1 after start_timeout seconds
    local waited
    for ((waited = 0; waited < start_timeout; waited++)); do
        ! read -r -t 1 <&"$start_pipe" || return 0 # usually within the first second
        kill -0 "$1" 2>/dev/null || return 0
    done
    return 1
}

end_job() { # PID: SIGTERM, then SIGKILL
    local waited
    kill -TERM "$1" 2>/dev/null || return 0
    for ((waited = 0; waited < end_seconds; waited++)); do
        sleep 1
        kill -0 "$1" 2>/dev/null || return 0
    done
    kill -KILL -- "-$1" 2>/dev/null || :
    sleep 1
}

run_again_and_again() { # OPTIONS...: of this wrapper, without -np, -H, --restarts and --min-np
    local tries=0 code before after now_ranks=$ranks child where started stopped=0 start_pipe late
    local checkpoints resume earlier from
    local unstarted='say "asked to stop while no attempt runs: nothing to save"; exit 75'
    trap "$unstarted" USR1
    answering=$hosts answering_slots=$slots
    read_program
    earlier=$(identity)
    # Open MPI ends the other ranks of a failed job with SIGCONT, SIGTERM and SIGKILL, this many seconds apart. Without the
    # failed rank they cannot complete a step, so there is no reason to wait. (PRTE: Open MPI 5.)
    export OMPI_MCA_odls_base_sigkill_timeout=${OMPI_MCA_odls_base_sigkill_timeout-0}
    export PRTE_MCA_odls_base_sigkill_timeout=${PRTE_MCA_odls_base_sigkill_timeout-0}
    serve_imports
    exec {start_pipe}<> <(:) # an anonymous pipe, which ranks on this host open through /proc
    export HVDTRAIN_START_PIPE="$$ $start_pipe $(readlink "/proc/$$/fd/$start_pipe")"
    while :; do
        now_ranks=$((ranks < answering_slots ? ranks : answering_slots))
        where=() late=0
        [[ -z $answering ]] || where=(-H "$answering")
        while read -r -t 0 <&"$start_pipe"; do read -r <&"$start_pipe"; done # reports of the attempt before
        before=$(newest_checkpoint)
        # In a new session, so that Ctrl-C reaches only this shell, which then asks the job to stop, as for SIGTERM.
        setsid "$0" "$@" -np "$now_ranks" "${where[@]}" -- "${started[@]}" {start_pipe}>&- &
        child=$!
        # shellcheck disable=SC2064  # this child
        trap "ask_to_stop $child" TERM HUP INT
        # shellcheck disable=SC2064
        trap "stopped=1; kill -USR1 $child 2>/dev/null" USR1
        if reports_its_start && ! wait_for_start "$child"; then
            say "no rank on this host has started Python within $start_timeout s (--start-timeout): look at ssh, mpirun and the file system that Python is on; ending the job"
            late=1
            end_job "$child"
        fi
        while ! ((late)) && kill -0 "$child" 2>/dev/null; do wait "$child" || :; done # a signal ends `wait`, not the job
        code=0
        if ((late)); then code=1; else wait "$child" || code=$?; fi # bash remembers it
        trap - TERM HUP INT
        trap "$unstarted" USR1
        [[ ! $code =~ $final ]] || return "$code"
        ((!stopped)) || { say "exit code $code; asked to stop: not started again" && return "$code"; }
        after=$(newest_checkpoint)
        ((tries < restarts)) || { say "exit code $code; giving up after $restarts restarts" && return "$code"; }
        if ((tries)) && [[ $before == "$after" ]]; then
            say "exit code $code; giving up: no checkpoint was written between two failures (newest: ${after:-none})"
            return "$code"
        fi
        ((++tries))
        from=${after:-the beginning}
        if [[ $resume != auto ]]; then
            if [[ -n $after && $(identity) != "$earlier" ]]; then
                resume_own
            elif [[ $resume == never ]]; then
                from='the beginning'
            else
                from=$resume
            fi
        fi
        say "exit code $code; starting again, restart $tries of $restarts, from $from"
        [[ $before != "$after" ]] || sleep 1 # without progress, what failed has a moment
        hosts_that_answer
        now_ranks=$((ranks < answering_slots ? ranks : answering_slots))
        ((now_ranks >= ${min_ranks:-$ranks})) || {
            say "only $now_ranks ranks could start, and --min-np is ${min_ranks:-$ranks}: giving up"
            return "$code"
        }
        ((now_ranks == ranks)) || say "continuing with $now_ranks ranks${answering:+ on $answering}"
    done
}
