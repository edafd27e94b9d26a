"""Plots of rendered pages that a phone would shrink until nobody can read them.

A plot much wider than high keeps its letters there, and is moved sideways in its box:
`img[data-flat]` of site.css."""
import base64,re,struct

# The first 24 bytes of a PNG have its width and height at their end
PNG = re.compile(r'<img (?=src="data:image/png;base64,([\w+/]{32}))')
FLAT = 2.2 # Widths for a height, from which a plot is flat

def marked(page):
    "A page in which flat plots are told from others"
    def mark(m):
        width,height = struct.unpack_from('>2I', base64.b64decode(m[1]), 16)
        return '<img data-flat ' if width>FLAT*height else m[0]
    return PNG.sub(mark, page)
