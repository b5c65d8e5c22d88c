"""The build backend: setuptools, and torch as a build requirement only where the environment has none.

A build against a torch other than the installed one downloads gigabytes. So the environment's own is used where it has
one (see ``environment.show_installed_torch``). Without the CUDA extension no torch is needed to build.
"""

from __future__ import annotations

from environment import TORCH_REQUIREMENT, cuda_home, installed_torch
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return [TORCH_REQUIREMENT] if cuda_home() and installed_torch() is None else []


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return get_requires_for_build_wheel(config_settings)


def get_requires_for_build_sdist(config_settings: dict | None = None) -> list[str]:
    return []
