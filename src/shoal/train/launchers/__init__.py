"""Files that start a plan elsewhere."""
