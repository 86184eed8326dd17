"""Clients whose labels are wrong, and who train as everybody does.

Source: Tolpegin et al., Data Poisoning Attacks Against Federated Learning Systems, 2020.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.core.parts import part
from shoal.fields.federate.attacks.protocols import Attack
from shoal.fields.federate.learn.protocols import Examples


@part
class LabelFlip(Attack):
    """Learn from label ``classes - 1 - y`` in the place of label y."""

    def examples(self, examples: Examples) -> Examples:
        """With their labels in reverse."""
        return replace(examples, y=examples.classes - 1 - examples.y)
