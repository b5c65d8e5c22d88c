"""``python -m bench compare``: what changed between two files of rows."""
