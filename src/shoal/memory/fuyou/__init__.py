"""memory.fuyou: the optimizer works on the disk while the backward pass goes on."""
