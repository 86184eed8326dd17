"""memory.streaming: parameters and gradients that come and go during a step."""
