# The environment inside the images, on top of the host's: what names files that only the host has is unset or replaced.
# Sourced by /bin/sh, and by Apptainer's own shell: only what POSIX has, and no other program.
# Not for podman and Kubernetes: there, a variable is in the container because somebody put it there.

# The image's Python and no other's packages, whatever the host's modules and the mounted home directory have.
[ ! -d /opt/hvdtrain/.venv/bin ] || PATH=/opt/hvdtrain/.venv/bin:$PATH
export PATH LC_ALL=C.UTF-8 PYTHONNOUSERSITE=1
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONUSERBASE VIRTUAL_ENV

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
unset LD_LIBRARY_PATH LD_PRELOAD
[ -z "$hvdtrain_kept" ] || export LD_LIBRARY_PATH="$hvdtrain_kept"

# Open MPI, PMIx and UCX find their own files; the host's paths make ranks wait in MPI_Init for ever.
unset OPAL_PREFIX OPAL_EXEC_PREFIX OPAL_BINDIR OPAL_LIBDIR OPAL_DATADIR OPAL_SYSCONFDIR OPAL_PKGDATADIR OPAL_PKGLIBDIR
unset PMIX_INSTALL_PREFIX PMIX_PREFIX PMIX_MCA_mca_base_component_path PRTE_PREFIX PRTE_MCA_prte_base_component_path
unset OMPI_MCA_mca_base_component_path OMPI_MCA_mca_base_param_files OMPI_MCA_mca_base_envar_file_prefix
unset OMPI_MCA_orte_launch_agent UCX_MODULE_DIR UCX_CONFIG_DIR
[ ! -d /opt/hpcx/ompi ] || export OPAL_PREFIX=/opt/hpcx/ompi # NVIDIA's images, whose Open MPI was moved there

# Directories that are written to: unset unless they are here, or can be made here.
hvdtrain_can_be_made() { # DIRECTORY
    hvdtrain_rest=$1
    case $1 in /*) ;; *) return 1 ;; esac
    while [ -n "$hvdtrain_rest" ] && [ ! -e "$hvdtrain_rest" ]; do hvdtrain_rest=${hvdtrain_rest%/*}; done
    [ -d "${hvdtrain_rest:-/}" ] && [ -w "${hvdtrain_rest:-/}" ]
}
hvdtrain_can_be_made "${MPLCONFIGDIR-}" || unset MPLCONFIGDIR
hvdtrain_can_be_made "${XDG_CACHE_HOME-}" || unset XDG_CACHE_HOME
hvdtrain_can_be_made "${XDG_CONFIG_HOME-}" || unset XDG_CONFIG_HOME
hvdtrain_can_be_made "${XDG_DATA_HOME-}" || unset XDG_DATA_HOME
hvdtrain_can_be_made "${XDG_STATE_HOME-}" || unset XDG_STATE_HOME
hvdtrain_can_be_made "${XDG_RUNTIME_DIR-}" || unset XDG_RUNTIME_DIR
hvdtrain_can_be_made "${TRITON_CACHE_DIR-}" || unset TRITON_CACHE_DIR
hvdtrain_can_be_made "${TORCHINDUCTOR_CACHE_DIR-}" || unset TORCHINDUCTOR_CACHE_DIR
hvdtrain_can_be_made "${TORCH_HOME-}" || unset TORCH_HOME
hvdtrain_can_be_made "${CUDA_CACHE_PATH-}" || unset CUDA_CACHE_PATH
hvdtrain_can_be_made "${NUMBA_CACHE_DIR-}" || unset NUMBA_CACHE_DIR

# Directories that must be here: mpirun, torch and multiprocessing have their sockets and files in the first of these.
[ -d "${TMPDIR-}" ] && [ -w "$TMPDIR" ] || unset TMPDIR
[ -d "${TMP-}" ] && [ -w "$TMP" ] || unset TMP
[ -d "${TEMP-}" ] && [ -w "$TEMP" ] || unset TEMP
[ -w /tmp ] || [ ! -w /dev/shm ] || export TMPDIR="${TMPDIR:-/dev/shm}"
[ -d "${OMPI_MCA_orte_tmpdir_base-}" ] && [ -w "$OMPI_MCA_orte_tmpdir_base" ] || unset OMPI_MCA_orte_tmpdir_base
[ -d "${PRTE_MCA_prte_tmpdir_base-}" ] && [ -w "$PRTE_MCA_prte_tmpdir_base" ] || unset PRTE_MCA_prte_tmpdir_base

# Of a mpirun or srun around the container, whose directory is not here: a rank makes one of its own, and asks over TCP.
if [ ! -d "${PMIX_SERVER_TMPDIR-/}" ]; then
    unset PMIX_SERVER_TMPDIR PMIX_SYSTEM_TMPDIR PMIX_DSTORE_21_BASE_PATH PMIX_DSTORE_ESH_BASE_PATH OMPI_FILE_LOCATION
    unset OMPI_MCA_orte_top_session_dir OMPI_MCA_orte_jobfam_session_dir
    export PMIX_GDS_MODULE=hash
fi

# A container for each rank of the host's mpirun: in user namespaces of their own, ranks cannot read each other's memory.
# Open MPI finds that out by itself, and says so in ten lines.
if [ -n "${OMPI_COMM_WORLD_RANK-}" ] && [ -r /proc/self/uid_map ]; then
    read -r hvdtrain_kept hvdtrain_kept hvdtrain_rest </proc/self/uid_map
    [ "$hvdtrain_rest" = 4294967295 ] || # the host's own has all user ids
        export OMPI_MCA_btl_vader_single_copy_mechanism="${OMPI_MCA_btl_vader_single_copy_mechanism:-none}"
fi
unset hvdtrain_kept hvdtrain_rest
unset -f hvdtrain_can_be_made
