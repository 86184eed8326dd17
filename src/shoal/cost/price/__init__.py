"""cost.price: operators, collectives and transfers, each with its seconds and bytes."""
