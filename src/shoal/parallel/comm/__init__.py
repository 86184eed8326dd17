"""parallel.comm: ranks and the collectives between them, with every byte counted."""
