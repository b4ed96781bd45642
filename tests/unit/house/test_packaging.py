"""Tests of an installation: it contains the whole package, and requires nothing that a container
brings itself."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import megatron_ext

ROOT = Path(__file__).resolve().parents[3]

# Without isolation and dependencies, pip needs no network.
OFFLINE = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")

# Programs for a separate process that call the functions pip calls: one builds a wheel, the other a
# source distribution and a wheel from it.
WHEEL = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
SOURCE_AND_WHEEL = """
import os
import sys
import tarfile
from setuptools import build_meta
folder = sys.argv[1]
with tarfile.open(os.path.join(folder, build_meta.build_sdist(folder))) as archive:
    archive.extractall(folder, filter="data")
(source,) = (entry.path for entry in os.scandir(folder) if entry.is_dir())
os.chdir(source)
build_meta.build_wheel(folder)
"""
METADATA = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(r'{}')"

IMPORT = """
import sys
import megatron_ext
import megatron_ext.patches.engine
print(megatron_ext.__file__)
print(megatron_ext.patches.engine.__file__)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, f"{command} failed:\n{ran.stdout}{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that git would commit, with the link to patches/ as a link."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout, to copy what belongs to the repository")
    copy = tmp_path_factory.mktemp("tree")
    listing = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT)
    for name in listing.split("\0"):
        if name and os.path.lexists(ROOT / name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-c", WHEEL, folder, cwd=tree)
    (built,) = folder.glob("*.whl")
    return built


def patch_files(tree: Path) -> set[str]:
    names = {path.relative_to(tree).as_posix() for path in (tree / "patches").rglob("*.py")}
    assert "patches/engine.py" in names
    return {f"megatron_ext/{name}" for name in names}


def test_patches_is_a_relative_symlink(tree: Path) -> None:
    link = tree / "megatron_ext" / "patches"
    assert link.is_symlink()
    assert os.readlink(link) == "../patches"


def test_every_folder_with_code_is_a_package(tree: Path) -> None:
    """Every folder with code has an ``__init__.py``. A wheel omits other folders without a
    message."""
    folders = {
        path.parent for top in ("megatron_ext", "patches") for path in (tree / top).rglob("*.py")
    }
    missing = [str(f.relative_to(tree)) for f in folders if not (f / "__init__.py").exists()]
    assert not missing, f"add an __init__.py to: {', '.join(sorted(missing))}"


def test_wheel_holds_every_file(tree: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {path.relative_to(tree).as_posix() for path in (tree / "megatron_ext").rglob("*.py")}
    assert patch_files(tree) | ours <= names
    # Without py.typed type checkers would treat everything in the package as Any.
    assert "megatron_ext/py.typed" in names
    browser = (tree / "megatron_ext" / "viz" / "page" / "browser").iterdir()
    assert {path.relative_to(tree).as_posix() for path in browser} <= names
    assert "megatron_ext/cost_model/gpus.toml" in names
    assert "megatron_ext/adapter/rank_settings/rank_arguments.toml" in names
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"megatron_ext"}, "nothing but the package itself may be installed"
    assert any(name.endswith("/LICENSE") for name in names)


def test_source_distribution_makes_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-c", SOURCE_AND_WHEEL, tmp_path, cwd=tree)
    (again,) = tmp_path.glob("*.whl")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


def metadata(wheel: Path) -> Message:
    """Return the metadata of the package in ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(path).decode())


def test_base_package_needs_numpy_and_typer_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "megatron-ext = megatron_ext.cli:app" in archive.read(path).decode()
    data = metadata(wheel)
    required = data.get_all("Requires-Dist", [])
    assert sorted(line for line in required if "extra ==" not in line) == [
        "numpy>=1.26",
        "rich>=13.7",
        "typer>=0.16",
    ]
    extras = data.get_all("Provides-Extra", [])
    assert sorted(extras) == ["certify", "dev", "docs", "megatron", "plot", "search", "te"]
    # The package apex on PyPI is another project than NVIDIA's.
    assert not [line for line in required if re.match(r"(nvidia[-_])?apex\b", line)]
    assert data["Requires-Python"] == ">=3.12"


def test_strangers_learn_what_it_is(wheel: Path) -> None:
    """The wheel's metadata describe the project: author, license, summary, keywords and README.
    They used to have only a name and a version."""
    data = metadata(wheel)
    assert data["Version"] == megatron_ext.__version__
    assert data["Author"] == "the megatron_ext developers"
    assert data["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in data.get_all("Classifier", [])
    assert data["Summary"] and data["Keywords"]
    assert data["Description-Content-Type"] == "text/markdown"
    assert data.get_payload() == (ROOT / "README.md").read_text()
    assert data["Project-URL"] is None  # the place of publication is not decided


def test_a_release_links_to_where_it_is_published(tree: Path, tmp_path: Path) -> None:
    """The description in a release links to the repository's pages at the release's tag. On a
    package index a relative link to docs/flags.md would lead nowhere."""
    url = "https://example.invalid/somebody/megatron_ext"
    prepare = (sys.executable, "-c", METADATA.format(tmp_path))
    run(*prepare, cwd=tree, env={"REPOSITORY_URL": url})
    (made,) = tmp_path.glob("*.dist-info/METADATA")
    data = message_from_string(made.read_text())
    at = f"v{megatron_ext.__version__}"
    assert f"Source, {url}" in data.get_all("Project-URL", [])
    text = str(data.get_payload())
    assert f"]({url}/blob/{at}/docs/flags.md)" in text
    assert f"]({url}/raw/{at}/docs/images/zb-h1.svg)" in text
    assert not re.findall(r"\]\((?!https?:|#)", text)


def test_what_a_star_brings() -> None:
    brought: dict[str, object] = {}
    exec("from megatron_ext import *", brought)
    public = {"__version__", "install", "order_microbatches", "share_prompts"}
    assert public == brought.keys() - {"__builtins__"}


def test_the_image_keeps_what_nvidia_put_in_it_and_asks_doctor() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text().splitlines()
    assert re.fullmatch(r"ARG IMAGE=nvcr\.io/nvidia/nemo:\d\d\.\d\d", dockerfile[1])
    install, doctor = dockerfile[-2:]
    # The image's list of version constraints is ignored, as it would forbid our build requirements;
    # installing our package changes no version.
    assert "PIP_CONSTRAINT= python -m pip install" in install and "[" not in install
    assert doctor == "RUN python -m megatron_ext doctor"


def test_an_image_gets_nothing_that_git_ignores() -> None:
    """A container image gets no file that git ignores, such as .venv with its several GB."""
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "build", "dist", "runs"} <= set(left_out)


def check_import(python: str | Path, env: dict[str, str], home: Path, cwd: Path) -> None:
    lines = run(python, "-c", IMPORT, cwd=cwd, env=env).splitlines()
    for file in lines[:2]:
        assert Path(file).resolve().is_relative_to(home.resolve())
    heavy = {"torch", "megatron", "transformer_engine", "matplotlib", "ortools"}
    assert not heavy & set(lines[2].split()), "importing the package must stay cheap"


def test_installed_wheel_imports_without_torch(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    install = (sys.executable, "-m", "pip", "install", "--no-compile", "--target", home)
    run(*install, *OFFLINE, wheel, cwd=tmp_path)
    check_import(sys.executable, {"PYTHONPATH": str(home)}, home, tmp_path)


def test_editable_installation_follows_the_symlink(tree: Path, tmp_path: Path) -> None:
    """An editable installation follows the link megatron_ext/patches. The test installs into a venv
    that is made within a venv and would see no packages, so a path file adds those of the outer
    one."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    Path(site.strip(), "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--ignore-installed")
    run(*pip, *OFFLINE, "--editable", tree, cwd=tmp_path)
    check_import(python, {"PYTHONPATH": ""}, tree, tmp_path)
    # The installation's import hook covers the package only: the repository root would also bring
    # `patches` and `tests`.
    code = (
        "import importlib.util\n"
        "for name in ('patches', 'tests', 'scripts', 'examples'):\n"
        "    assert importlib.util.find_spec(name) is None, name\n"
    )
    run(python, "-c", code, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert (tmp_path / "venv" / "bin" / "megatron-ext").exists()


def test_patches_never_shadow_megatron() -> None:
    """patches/ is not on the module path. If it were, ``import megatron`` would find our mirror of
    Megatron's tree."""
    assert not [entry for entry in sys.path if Path(entry).resolve() == ROOT / "patches"]
