"""plan.serving: plans of serving jobs: split, cache, phases, guesses."""
