"""curator: a tree of clusters that tenants share, each with a cut of its own."""
