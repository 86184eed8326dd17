"""cost.serving: engines and fleets in virtual time."""
