"""Rows as tables, pictures and a page."""
