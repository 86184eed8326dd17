"""paged_attention: query tokens over the blocks of the cache that their requests hold."""
