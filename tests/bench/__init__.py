"""The sweep, its rows, tables and pictures."""
