"""cost.step_cost: seconds of a serving step by its shape. Torch-free.

``roofline`` predicts them from the machine and the model's shape; ``fitted`` fits a line to
steps that were measured. Both promise what :class:`shoal.ir.engine.StepCost` says.
"""
