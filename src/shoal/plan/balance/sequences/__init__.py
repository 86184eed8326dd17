"""plan.balance.sequences: which ranks compute which sequences of a batch."""
