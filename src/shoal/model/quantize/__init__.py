"""Making a model's weights few bits, and reading models that others have made so.

``rtn``, ``gptq`` and ``awq`` are parts of kind ``quantizer``: how the codes of one layer are
chosen.
:mod:`~shoal.model.quantize.blocks` takes them through a model, block by block,
:mod:`~shoal.model.quantize.stored` says how packed weights lie in a directory, ours and those
of other programs.
"""
