# Options, environment and dry run of horovodrun.sh and mpirun.sh. Sourced by both.
# shellcheck shell=bash disable=SC2016,SC2034,SC2154  # variables are shared with the scripts that source this file

options_help='
  -np N               ranks (default: the slots of -H)
  -H A:4,B:4          hosts and their numbers of ranks (default: this host)
  --interface NAME    network interface of the job, the same name on every host (`ip -br addr` lists them)
  --pass NAME         also pass this variable to the ranks; may be repeated
  --transport NAME    what carries CPU tensors: mpi or gloo (default: MPI inside a host, Gloo between hosts)
  --port N            port of the rendezvous on the first host, for Gloo under mpirun (default: 9000)
  --fusion-mb N       maximum megabytes that Horovod fuses into one message
  --cycle-ms N        milliseconds between two cycles of Horovod
  --timeline FILE     write the timeline of every tensor (chrome://tracing)
  --autotune FILE     let Horovod search for fusion and cycle time, and log its trials
  --restarts N        restart after a failure, up to N times; the program continues from the newest checkpoint in its
                      --output-dir. Gives up after two failures in a row without a new checkpoint
  --min-np N          with --restarts: if hosts do not answer, continue with at least this many ranks (default: all)
  --start-timeout N   seconds until the job must have started: ssh on each host; Python, with --restarts; importing torch
                      in programs that import hvdtrain first (default: 600; 0: no limit)

DRY_RUN=1 prints the command, quoted for bash, and runs nothing.'

# Only these variables are passed to the ranks; all others stay in the shell that starts the job. Without these, programs are
# not found, cannot write, reach no network, or use other devices than the site chose.
passed_names=(
    PATH HOME USER LOGNAME SHELL LANG LC_ALL TZ TERM TMPDIR LD_LIBRARY_PATH VIRTUAL_ENV PYTHONPATH PYTHONUNBUFFERED
    XDG_CACHE_HOME OMP_NUM_THREADS MKL_NUM_THREADS SSH_AUTH_SOCK HF_HOME HF_HUB_OFFLINE NVIDIA_TF32_OVERRIDE
    http_proxy https_proxy no_proxy all_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
)
passed_prefixes=(
    HOROVOD_ HVDTRAIN_ GLOO_ OMPI_ OPAL_ PMIX_ PRTE_ UCX_ FI_ I_MPI_ MPICH_ HYDRA_ SLURM_
    CUDA_ NCCL_ CUBLAS_ PYTORCH_ TORCH_ TRITON_ ROCR_ HIP_ HSA_ MIOPEN_ CCL_
)
# Of these, a name like that of a secret stays behind (SLURM_JWT), and a proxy whose URL holds a password: it would be readable
# for all users of a host, since Horovod's launcher writes variables onto command lines. --pass NAME passes them nevertheless.
secret_name='(SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|JWT)'
secret_proxy='^([A-Za-z0-9]+://)?[^/]*@' # in variables of this name:
proxy_name='^(HTTPS?|ALL)_PROXY$'
pass_anyway=() # --pass
ssh_seconds=20 # for ssh to connect, and to run `true`
# ssh ends if a host does not complete its handshake, or if the connection has been silent for ten minutes.
ssh_limits="-o ConnectTimeout=$ssh_seconds -o ServerAliveInterval=30 -o ServerAliveCountMax=20"
# Of these, none is passed to another host: they describe this host, or belong to the launcher.
own_host='^(SSH_AUTH_SOCK|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|(OMPI|OPAL|PMIX|PRTE|HYDRA|SLURM)_.*)$'

say() { printf '%s: %s\n' "${0##*/}" "$1" >&2; }

refuse() { # MESSAGE: one line and exit code 2
    printf '%s: error: %s\n' "${0##*/}" "$1" >&2
    exit 2
}

[[ -r /proc/self/stat ]] || refuse 'no /proc here, which MPI and Horovod read: mount it (as root: mount -t proc proc /proc)'

[[ -n ${HOME-} ]] || id -un >/dev/null 2>&1 ||
    refuse 'HOME is not set, and this user id has no name: mpirun would crash; export HOME=DIR, a directory that you can write to'

declare -A variable_of=( # of an option with a value
    [-np]=ranks [-n]=ranks [-H]=hosts [--interface]=interface [--pass]=pass_anyway [--transport]=transport [--port]=port
    [--fusion-mb]=fusion_mb [--cycle-ms]=cycle_ms [--timeline]=timeline [--autotune]=autotune [--restarts]=restarts
    [--min-np]=min_ranks [--start-timeout]=start_timeout
)

read_options() { # ARGUMENTS...: sets these variables, and `program` to what follows the options; with --restarts, runs the job
    ranks='' hosts='' interface='' transport=auto fusion_mb='' cycle_ms='' timeline='' autotune='' port=9000
    restarts=0 min_ranks='' start_timeout=600 kept=() # kept: the options that every restart passes on unchanged
    while (($#)); do
        case $1 in
        --) shift && break ;;
        -h | --help) printf '%s\n%s\n' "$usage" "$options_help" && exit 0 ;;
        -*)
            [[ -n ${variable_of[$1]-} ]] || refuse "unknown option $1 (--help lists them; the program comes after --)"
            (($# > 1)) || refuse "$1 needs a value (--help)"
            case $1 in -np | -n | -H | --restarts | --min-np) ;; *) kept+=("$1" "$2") ;; esac
            if [[ $1 == --pass ]]; then pass_anyway+=("$2"); else printf -v "${variable_of[$1]}" %s "$2"; fi
            shift 2
            ;;
        *) break ;;
        esac
    done
    program=("$@")
    check_options
    ((restarts)) && [[ ${DRY_RUN:-0} == 0 ]] || return 0
    # shellcheck source=launch/restarts.sh
    source "$(dirname -- "${BASH_SOURCE[0]}")/restarts.sh"
    run_again_and_again "${kept[@]}"
    exit
}

check_options() {
    local number='^[0-9]+([.][0-9]+)?$' name='^[A-Za-z_][A-Za-z0-9_]*$' host='[A-Za-z0-9_][A-Za-z0-9_.-]*(:[1-9][0-9]*)?'
    ((${#program[@]})) || refuse "nothing to run: end with, for example, python -m hvdtrain.mnist"
    # Horovod's launcher and ssh do not quote these on command lines.
    [[ -z $hosts || $hosts =~ ^$host(,$host)*$ ]] || refuse "-H $hosts: write names and slots, as in -H a:4,b:4"
    [[ -z $interface || $interface =~ ^[A-Za-z0-9_.-]+$ ]] || refuse "--interface $interface: not the name of an interface"
    [[ -z $ranks || $ranks =~ ^[1-9][0-9]*$ ]] || refuse "-np $ranks: not a whole number of at least 1"
    [[ $restarts =~ ^(0|[1-9][0-9]{0,5})$ ]] || refuse "--restarts $restarts: not a whole number"
    [[ -z $min_ranks || $min_ranks =~ ^[1-9][0-9]{0,6}$ ]] || refuse "--min-np $min_ranks: not a whole number of at least 1"
    [[ $start_timeout =~ ^(0|[1-9][0-9]{0,5})$ ]] || refuse "--start-timeout $start_timeout: not a whole number of seconds"
    [[ $port =~ ^[1-9][0-9]{3,4}$ && $port -ge 1024 && $port -lt 65536 ]] || refuse "--port $port: not a port from 1024 to 65535"
    [[ -z $fusion_mb || $fusion_mb =~ ^(0|[1-9][0-9]{0,5})$ ]] || refuse "--fusion-mb $fusion_mb: not a whole number"
    [[ -z $cycle_ms || $cycle_ms =~ $number ]] || refuse "--cycle-ms $cycle_ms: not a number"
    [[ $transport =~ ^(auto|mpi|gloo)$ ]] || refuse "--transport $transport: choose auto, mpi or gloo"
    local passed
    for passed in "${pass_anyway[@]}"; do
        [[ $passed =~ $name ]] || refuse "--pass $passed: give the name of a variable, not its value"
    done
    count_hosts
    [[ -n $ranks ]] || ranks=$slots
    ((${min_ranks:-1} <= ranks)) || refuse "--min-np $min_ranks is more than the $ranks ranks of the job"
    ((ranks <= slots)) || [[ -z $hosts ]] || refuse "-np $ranks, but -H $hosts has $slots slots: use fewer ranks or more slots"
}

count_hosts() { # sets host_names, slots (in all), slots_each ('' where they differ), remote (0 or 1)
    local entry count before=''
    host_names=() slots=0 slots_each='' remote=0
    [[ -n $hosts ]] || { slots=${ranks:-1} && return; }
    for entry in ${hosts//,/ }; do # already validated: no blanks, no wildcards
        [[ $entry == *:* ]] && count=${entry##*:} || count=1
        host_names+=("${entry%%:*}")
        slots=$((slots + count))
        [[ -z $before ]] && slots_each=$count
        [[ -z $before || $before == "$count" ]] || slots_each=''
        before=$count
        is_this_host "${entry%%:*}" || remote=1
    done
    ((${#host_names[@]} < 2)) || remote=1
}

is_this_host() { [[ $1 =~ ^(localhost|127\.0\.0\.1)$ || $1 == "${HOSTNAME:-}" ]]; } # NAME

answers() { # NAME: of a host. ssh's own reason goes to standard error
    local limit=$((0 < start_timeout && start_timeout < ssh_seconds ? start_timeout : ssh_seconds))
    is_this_host "$1" ||
        timeout -k 1 "$limit" ssh -o BatchMode=yes -o LogLevel=ERROR -o ConnectTimeout=5 "$1" true </dev/null >/dev/null
}

silent_hosts() { # NAMES...: prints those that do not answer, each after a blank. All are asked at once, so for ssh_seconds at most
    local name
    for name in "$@"; do { answers "$name" || printf ' %s' "$name"; } & done
    wait
}

choose_transport() { # replaces auto: MPI's shared memory is faster inside a host, Gloo between hosts (docs/run.md)
    [[ $transport == auto ]] || return 0
    if ((${#host_names[@]} > 1)); then transport=gloo; else transport=mpi; fi
}

is_passed() { # NAME
    local item upper=${1^^}
    for item in "${pass_anyway[@]}"; do [[ $1 != "$item" ]] || return 0; done
    [[ ! $upper =~ $secret_name ]] || return 1
    if [[ $upper =~ $proxy_name && ${!1-} =~ $secret_proxy ]]; then
        say "$1 holds a password and is not passed on; to pass it: --pass $1"
        return 1
    fi
    for item in "${passed_names[@]}"; do [[ $1 != "$item" ]] || return 0; done
    for item in "${passed_prefixes[@]}"; do [[ $1 != "$item"* ]] || return 0; done
    return 1
}

split_environment() { # sets `passed` and `dropped`: sorted names, as values must not appear on a command line
    local entry
    passed=() dropped=()
    while IFS= read -r -d '' entry; do
        if is_passed "${entry%%=*}"; then passed+=("${entry%%=*}"); else dropped+=("${entry%%=*}"); fi
    done < <(env -u _ -u SHLVL -u PWD -u OLDPWD -u DRY_RUN -0 | LC_ALL=C sort -z)
}

run_without_dropped() { # COMMAND...: run it with only the passed variables, or print exactly that command
    local name clean=(env)
    for name in "${dropped[@]}"; do clean+=(-u "$name"); done
    ((${#dropped[@]})) || clean=()
    [[ ${DRY_RUN:-0} != 0 ]] || exec "${clean[@]}" "$@"
    local quoted
    printf -v quoted '%q ' "${clean[@]}" "$@"
    printf '%s\n' "${quoted% }"
}
