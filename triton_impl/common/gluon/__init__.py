"""Device functions in Gluon, Triton's lower-level language, for Hopper."""
