"""cost: facts. What a model has, what a step costs, what a larger run would reach. Torch-free.

``shapes`` knows the models, ``arithmetic`` counts parameters, operations and bytes,
``training`` turns counts into time and memory, ``scaling`` fits laws of learning curves,
and ``score`` keeps every prediction beside its measurement.
"""
