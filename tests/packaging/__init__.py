"""Building, importing, documents, the test run itself."""
