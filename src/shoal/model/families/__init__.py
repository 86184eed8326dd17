"""One file per family: how its Hugging Face configuration and tensor names correspond to ours.

The parts keep :class:`shoal.model.protocols.Family`.
"""
