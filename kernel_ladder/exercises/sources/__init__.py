"""The exercises' solutions, each with its gaps marked. Never imported: they are read as text and loaded from files.

What stands between ``# gap`` and ``# end`` is the solution. ``exercise start`` leaves one line in its place, which
raises NotImplementedError.
"""
