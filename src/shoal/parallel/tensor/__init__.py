"""parallel.tensor: layers of which every rank holds a part."""
