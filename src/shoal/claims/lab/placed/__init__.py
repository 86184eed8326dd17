"""placed: tensors that lie on a mesh of ranks, and what ranks compute of their parts."""
