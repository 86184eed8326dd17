"""gnn: the job that trains a graph neural network, and the ways that it pools neighbours."""
