"""strided: pack and unpack any nest of strided blocks.

``datatype`` describes bytes with holes, ``canonical`` reduces what it describes to one
strided block, the kernels pack and unpack, ``explain`` shows all of it for one expression.

Source: Pearson et al., TEMPI: An Interposed MPI Library with a Canonical Representation of
CUDA-aware Datatypes, 2021.
"""
