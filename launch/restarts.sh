# --restarts N for horovodrun.sh and mpirun.sh: start the job again after a failure. Sourced by both.
# shellcheck shell=bash disable=SC2154  # variables that options.sh sets

# What is no failure: done, bad input, target not reached, stopped on request (`stop` saved: who asked decides what is next).
final='^(0|2|3|75|129|130|143)$'
most_pause=60 # seconds between two tries, after 1, 2, 4, ...

newest_checkpoint() { # its name, or nothing: --output-dir stands among the program's own arguments
    local i directory='' files
    for ((i = 0; i < ${#program[@]}; i++)); do
        case ${program[i]} in
        --output-dir) directory=${program[i + 1]-} ;;
        --output-dir=*) directory=${program[i]#*=} ;;
        esac
    done
    [[ -n $directory ]] || return 0
    shopt -s nullglob
    files=("$directory"/checkpoints/step-*.safetensors) # numbers of eight digits: sorted by name is sorted by step
    ((${#files[@]} == 0)) || printf '%s\n' "${files[-1]##*/}"
}

hosts_that_answer() { # sets answering (as for -H) and answering_slots; without -H, this host
    local entry name
    answering='' answering_slots=0
    [[ -n $hosts ]] || { answering_slots=$ranks && return; }
    for entry in ${hosts//,/ }; do
        name=${entry%%:*}
        if [[ $name =~ ^(localhost|127\.0\.0\.1)$ || $name == "${HOSTNAME:-}" ]] ||
            ssh -o BatchMode=yes -o ConnectTimeout=5 "$name" true </dev/null >/dev/null 2>&1; then
            answering+=${answering:+,}$entry
            if [[ $entry == *:* ]]; then ((answering_slots += ${entry##*:})); else ((answering_slots += 1)); fi
        else
            say "$name does not answer"
        fi
    done
}

say() { printf '%s: %s\n' "${0##*/}" "$1" >&2; }

run_again_and_again() { # OPTIONS...: those of this wrapper, without -np, -H, --restarts and --min-np
    local tries=0 pause=1 code before after now_ranks=$ranks child where
    answering=$hosts
    while :; do
        where=()
        [[ -z $answering ]] || where=(-H "$answering")
        before=$(newest_checkpoint)
        "$0" "$@" -np "$now_ranks" "${where[@]}" -- "${program[@]}" &
        child=$!
        # shellcheck disable=SC2064  # this child
        trap "kill -TERM $child 2>/dev/null" TERM HUP
        # shellcheck disable=SC2064
        trap "kill -USR1 $child 2>/dev/null" USR1
        trap : INT # the terminal tells the child as well; what it ends with decides
        while :; do
            code=0
            wait "$child" || code=$?
            kill -0 "$child" 2>/dev/null || break # else a signal interrupted `wait`
        done
        trap - TERM HUP USR1 INT
        [[ ! $code =~ $final ]] || return "$code"
        after=$(newest_checkpoint)
        ((tries < restarts)) || { say "exit code $code; giving up after $restarts restarts" && return "$code"; }
        if ((tries)) && [[ $before == "$after" ]]; then
            say "exit code $code; giving up: no checkpoint was written between two failures (newest: ${after:-none})"
            return "$code"
        fi
        [[ $before == "$after" ]] || pause=1
        say "exit code $code; starting again in $pause s, restart $((++tries)) of $restarts, from ${after:-the beginning}"
        sleep "$pause"
        pause=$((pause * 2 < most_pause ? pause * 2 : most_pause))
        hosts_that_answer
        now_ranks=$((ranks < answering_slots ? ranks : answering_slots))
        ((now_ranks >= ${min_ranks:-$ranks})) || {
            say "only $now_ranks ranks could start, and --min-np is ${min_ranks:-$ranks}: giving up"
            return "$code"
        }
        ((now_ranks == ranks)) || say "going on with $now_ranks ranks${answering:+ on $answering}"
    done
}
