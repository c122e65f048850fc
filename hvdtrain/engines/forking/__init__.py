"""Fork all ranks of a host from one process that has imported all modules once (`hvdtrain.starter --local-ranks`).

starter (imports no large modules, supervises the ranks: supervisor.py)
  importer (imports all modules: preload.py; forks the ranks and exits: importer.py)
    rank 0, rank 1, ... (children of the starter once the importer has exited)

A fork copies only the calling thread. Therefore the importer has one thread, and uses neither MPI, CUDA nor OpenMP before
the fork.
"""
