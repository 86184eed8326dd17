"""cost.longctx: what long context costs at the peak of the hardware."""
