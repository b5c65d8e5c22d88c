"""``python -m bench select``: tables of measured choices for ``kernel_ladder/selection``, made from rows."""
