"""train.watch: who is slow, who hangs, and what to do about it.

Every rank keeps a flight recorder of its collectives (``recorder``, ``watched``); a part of
kind ``locator`` names faults from the records of all ranks (``c4d``, ``megascale``);
``robust`` stops, checks, excludes and restarts; ``diagnose`` shows a run to people.
"""

from shoal.core.parts import PartTable

__all__ = ["LOCATORS"]

LOCATORS = PartTable(
    "locator",
    {
        "c4d": "shoal.train.watch.c4d:C4D",
        "megascale": "shoal.train.watch.megascale:MegaScale",
    },
    about=(
        "How hanging and slow ranks are located from the records of the ranks. Chosen by "
        "`--locator` "
        "of `shoal train --robust` and `shoal train diagnose`."
    ),
    protocol="shoal.train.watch.protocols:FaultLocator",
)
