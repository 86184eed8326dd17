"""memory.offload: techniques that train beyond the device's memory."""
