"""parallel.placed: any module's graph placed on a mesh of ranks."""
