"""All ranks of a host from one process that has imported everything once (`hvdtrain.starter --local-ranks`).

starter (imports nothing heavy, watches: supervisor.py)
  importer (imports everything: preload.py; forks the ranks and ends: importer.py)
    rank 0, rank 1, ... (the starter's own children once the importer has ended)

A fork copies only the thread that forks: so the importer has one thread, no MPI, no CUDA and no OpenMP region behind it.
"""
