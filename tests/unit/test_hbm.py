# SPDX-License-Identifier: Apache-2.0
"""tests/card, on a card: the fake one anywhere, and a real one where there is one.

Each is a process of its own, since a driver's library is loaded once. The fake libraries are
compiled here, and found by LD_LIBRARY_PATH in front of the real ones.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = {"libcuda.so.1": "fake_cuda.c", "libnvidia-ml.so.1": "fake_nvml.c"}
CARDS = ["fake", *(["real"] if Path("/dev/nvidia0").exists() else [])]

IMPORT = "from tierd.tiers.hbm import hbm\n"


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fake libraries, and the file that the fake card is controlled by."""
    folder = tmp_path_factory.mktemp("card")
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Werror", "-fvisibility=hidden"]
    for library, source in SOURCES.items():
        built = ["-shared", "-fPIC", "-pthread", "-o", str(folder / library)]
        subprocess.run(["gcc", *flags, *built, f"tests/card/{source}"], cwd=REPOSITORY, check=True)
    return folder


def environment(fakes: Path, cards: int = 1) -> dict[str, str]:
    (fakes / "control").write_bytes(cards.to_bytes(4, "little") + bytes(60))
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(fakes),
        "FAKE_CUDA_CONTROL": str(fakes / "control"),
        "FAKE_CUDA_BYTES": str(64 << 20),
        "FAKE_NVML_FREE": str(48 << 20),
        "FAKE_NVML_LOST": str(fakes / "lost"),
    }


def python(code: str, environment: dict[str, str]) -> str:
    """Returns what the code raises."""
    code = f"{IMPORT}from tierd.errors import TierdError\ntry:\n    {code}\n" + (
        "except TierdError as error:\n    print(type(error).__name__, error, error.hint, sep='|')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize("card", CARDS)
def test_on_a_card(card: str, fakes: Path) -> None:
    env = environment(fakes) if card == "fake" else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/card/hbm.py"],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"\d+ (skipped|xfailed)", done.stdout)
    (name,) = re.findall(r"^card: (.*?),", done.stdout, re.MULTILINE)
    assert name.startswith("Fake") == (card == "fake"), "it ran on the other one"


def test_without_a_driver(tmp_path: Path) -> None:
    """What stands for one is no library."""
    (tmp_path / "libcuda.so.1").write_bytes(b"")
    told = python("hbm()", {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert told.startswith("TierdError|CUDA's driver cannot be loaded")
    assert "install NVIDIA's driver" in told


def test_without_a_card(fakes: Path) -> None:
    told = python("hbm()", environment(fakes, cards=0))
    assert told.startswith("NotFound|CUDA's driver finds no card|")


def test_without_the_bindings(fakes: Path) -> None:
    told = python("import sys; sys.modules['cuda.bindings'] = None; hbm()", environment(fakes))
    assert told.startswith("TierdError|CUDA's bindings are missing")
    assert "pip install 'tierd[gpu]'" in told


@pytest.mark.parametrize("missing", ["bindings", "library"])
def test_without_nvml_the_driver_tells_what_is_free(fakes: Path, missing: str) -> None:
    env = environment(fakes)
    hide = "import sys; sys.modules['pynvml'] = None; " if missing == "bindings" else ""
    nvml = fakes / "libnvidia-ml.so.1"
    away = nvml.rename(fakes / "away") if missing == "library" else None
    if away is not None:
        nvml.write_bytes(b"")
    told = python(f"{hide}print(hbm(reserve_bytes=1 << 20).facts.capacity_bytes)", env)
    if away is not None:
        away.rename(nvml)
    assert int(told) == 63 << 20


def test_the_cpu_does_not_reach_the_card(fakes: Path) -> None:
    """So that a test on the fake would find who tries."""
    code = f"{IMPORT}import ctypes\nspace = hbm(1 << 21).reserve(4096, 4)\n"
    code += "ctypes.c_char.from_address(space.device.address).value"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(fakes), capture_output=True, timeout=60
    )
    assert done.returncode == -11


def test_the_bench_runs(fakes: Path) -> None:
    """On the fake, for function: small, and what it says is of no card."""
    env = {**environment(fakes), "PYTHONPATH": f"{REPOSITORY}/scripts:{REPOSITORY}"}
    small = "BATCHES, LAYERS, FAST, LAYER_BYTES, ROUNDS, LAPS = 1, 8, 4, 1 << 20, 2, 1"
    sizes = "SIZES = (128 << 10, 64 << 10)"
    code = f"from benches import hbm\nexec({f'{small}; {sizes}'!r}, vars(hbm))\n"
    code += "print(*(figure.name for figure in hbm.run()), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert len(told) == 13
    assert all(name.startswith("Fake CUDA card 0 (no real one): ") for name in told)


def test_the_bench_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": "scripts:."}
    done = subprocess.run(
        [sys.executable, "-m", "benches", "hbm"],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert "hbm  not measured: CUDA's driver cannot be loaded" in done.stdout
    assert "install NVIDIA's driver" in done.stdout
