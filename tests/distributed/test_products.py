"""Products beside their communication give what one GPU gives, and a rank that dies gives an error."""

from __future__ import annotations

import pytest

from . import group, products


@pytest.mark.parametrize("ranks", [2, 4])
def test_products_and_gradients(ranks, tmp_path):
    group.run(ranks, tmp_path, products.everything)
