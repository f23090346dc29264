"""A spec from a live pipeline: what it is made of and where each part lives now, as a file that loads it again.

What can be seen is written; what cannot be known is said, and stands in the file as a variable that has to be set,
so that the file never loads something else in silence.
"""

from dmconfig.export.spec import Export, to_spec

__all__ = ["Export", "to_spec"]
