"""The gallery: every paper of the catalogue, what it claims and what was measured here.

A static site without any outside request. Start reading at ``papers.py`` (what is
shown), then ``pages.py`` (how) and ``publish.py`` (where).
"""

from shoal.claims.gallery.pages import GalleryPaths, render_index, render_row
from shoal.claims.gallery.papers import Paper, index_rows
from shoal.claims.gallery.publish import write_gallery

__all__ = ["GalleryPaths", "Paper", "index_rows", "render_index", "render_row", "write_gallery"]
