# The environment inside the images, on top of the host's: what names files that only the host has is unset or replaced.
# Sourced by /bin/sh, and by Apptainer's own shell: only what POSIX has, and no other program.
# Not for podman and Kubernetes: there, a variable is in the container because somebody put it there.

# Apptainer and Singularity source this without the host's variables. Afterwards they set those that are unset, and unset those
# that are empty (restore_env). So here they are set first, and emptied instead of unset. \u000A: a newline in a value.
if [ -n "${__exported_env__+set}" ]; then
    hvdtrain_ifs=$IFS
    IFS='
'
    set -f
    for hvdtrain_rest in $__exported_env__; do
        hvdtrain_name=${hvdtrain_rest%%=*}
        case $hvdtrain_name in '' | *[!A-Za-z0-9_]*) continue ;; esac
        case $hvdtrain_rest in *\\u000A*) continue ;; esac
        eval "[ -n \"\${$hvdtrain_name+set}\" ]" || export "$hvdtrain_rest"
    done
    set +f
    IFS=$hvdtrain_ifs
fi
hvdtrain_drop() { # NAME...
    for hvdtrain_dropped; do
        eval "[ -n \"\${$hvdtrain_dropped+set}\" ]" || continue
        if [ -n "${__exported_env__+set}" ]; then export "$hvdtrain_dropped="; else unset "$hvdtrain_dropped"; fi
    done
}

# The image's Python and no other's packages, whatever the host's modules and the mounted home directory have.
[ ! -d /opt/hvdtrain/.venv/bin ] || PATH=/opt/hvdtrain/.venv/bin:$PATH
export PATH LC_ALL=C.UTF-8 PYTHONNOUSERSITE=1
hvdtrain_drop PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONUSERBASE VIRTUAL_ENV

# Of the directories for libraries, those of Apptainer's --nv and of NVIDIA's images.
hvdtrain_kept=
hvdtrain_rest=${LD_LIBRARY_PATH-}:
while [ -n "$hvdtrain_rest" ]; do
    case ${hvdtrain_rest%%:*} in
    /.singularity.d/* | /usr/local/cuda* | /usr/local/nvidia/* | /usr/local/lib/*)
        hvdtrain_kept=${hvdtrain_kept:+$hvdtrain_kept:}${hvdtrain_rest%%:*} ;;
    esac
    hvdtrain_rest=${hvdtrain_rest#*:}
done
hvdtrain_drop LD_LIBRARY_PATH LD_PRELOAD
[ -z "$hvdtrain_kept" ] || export LD_LIBRARY_PATH="$hvdtrain_kept"

# Open MPI, PMIx and UCX find their own files; the host's paths make ranks wait in MPI_Init for ever.
hvdtrain_drop OPAL_PREFIX OPAL_EXEC_PREFIX OPAL_BINDIR OPAL_LIBDIR OPAL_DATADIR OPAL_SYSCONFDIR OPAL_PKGDATADIR OPAL_PKGLIBDIR
hvdtrain_drop PMIX_INSTALL_PREFIX PMIX_PREFIX PMIX_MCA_mca_base_component_path PRTE_PREFIX PRTE_MCA_prte_base_component_path
hvdtrain_drop OMPI_MCA_mca_base_component_path OMPI_MCA_mca_base_param_files OMPI_MCA_mca_base_envar_file_prefix
hvdtrain_drop OMPI_MCA_orte_launch_agent UCX_MODULE_DIR UCX_CONFIG_DIR
[ ! -d /opt/hpcx/ompi ] || export OPAL_PREFIX=/opt/hpcx/ompi # NVIDIA's images, whose Open MPI was moved there

# Directories that are written to: kept where they are here, or can be made.
for hvdtrain_name in MPLCONFIGDIR TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TORCH_HOME CUDA_CACHE_PATH NUMBA_CACHE_DIR \
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_STATE_HOME XDG_RUNTIME_DIR; do
    eval "hvdtrain_rest=\${$hvdtrain_name-}"
    case $hvdtrain_rest in
    /*) while [ -n "$hvdtrain_rest" ] && [ ! -e "$hvdtrain_rest" ]; do hvdtrain_rest=${hvdtrain_rest%/*}; done ;;
    *) hvdtrain_rest=/dev/null ;;
    esac
    [ -d "${hvdtrain_rest:-/}" ] && [ -w "${hvdtrain_rest:-/}" ] || hvdtrain_drop "$hvdtrain_name"
done

# Directories that must be here: mpirun, torch and multiprocessing have their sockets and files in the first of these.
for hvdtrain_name in TMPDIR TMP TEMP OMPI_MCA_orte_tmpdir_base PRTE_MCA_prte_tmpdir_base; do
    eval "hvdtrain_rest=\${$hvdtrain_name-}"
    [ -d "$hvdtrain_rest" ] && [ -w "$hvdtrain_rest" ] || hvdtrain_drop "$hvdtrain_name"
done
[ -w /tmp ] || [ ! -w /dev/shm ] || export TMPDIR="${TMPDIR:-/dev/shm}"

# Of a mpirun or srun around the container, whose directory is not here: a rank makes one of its own, and asks over TCP.
if [ ! -d "${PMIX_SERVER_TMPDIR-/}" ]; then
    hvdtrain_drop PMIX_SERVER_TMPDIR PMIX_SYSTEM_TMPDIR PMIX_DSTORE_21_BASE_PATH PMIX_DSTORE_ESH_BASE_PATH OMPI_FILE_LOCATION
    hvdtrain_drop OMPI_MCA_orte_top_session_dir OMPI_MCA_orte_jobfam_session_dir
    export PMIX_GDS_MODULE=hash
fi

# A container for each rank of the host's mpirun: in user namespaces of their own, ranks cannot read each other's memory.
# Open MPI finds that out by itself, and says so in ten lines.
if [ -n "${OMPI_COMM_WORLD_RANK-}" ] && [ -r /proc/self/uid_map ]; then
    read -r hvdtrain_kept hvdtrain_kept hvdtrain_rest </proc/self/uid_map
    [ "$hvdtrain_rest" = 4294967295 ] || # the host's own has all user ids
        export OMPI_MCA_btl_vader_single_copy_mechanism="${OMPI_MCA_btl_vader_single_copy_mechanism:-none}"
fi
unset hvdtrain_kept hvdtrain_rest hvdtrain_name hvdtrain_dropped hvdtrain_ifs
unset -f hvdtrain_drop
