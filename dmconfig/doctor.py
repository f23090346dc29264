"""What this machine has and whether it can be trusted, as data and as a text to paste into a bug report.

Everything is looked at and nothing is changed. Nothing secret is shown: of the hub's token only whether there is one,
of the environment only the names in ``ENVIRONMENT``, without what an address carries of passwords; the home folder is
written ``~``. A library that is missing or cannot be imported is a finding here, never an error.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from dmconfig.devices import CPU, is_accelerator
from dmconfig.errors import Problem, render_problem
from dmconfig.inventory import Device, probe_machine
from dmconfig.render import problem_data
from dmconfig.source import hub_cache
from dmconfig.transfers import TransferFailure, check_transfers, transfer_problems, ways
from dmconfig.units import GIB, format_bytes
from dmconfig.version import __version__

ENVIRONMENT = (
    "ACCELERATE_USE_CPU", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "DIFFUSERS_VERBOSITY",
    "DMCONFIG_CACHE", "DMCONFIG_TRACEBACK", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_DISABLE_XET",
    "HF_HUB_OFFLINE", "HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "HUGGINGFACE_HUB_CACHE", "NCCL_P2P_DISABLE",
    "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_HIP_ALLOC_CONF", "ROCR_VISIBLE_DEVICES", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY",
    "XDG_CACHE_HOME", "ZE_AFFINITY_MASK",
)  # fmt: skip
"""The environment variables whose values are shown: they move pipelines about, and none of them is a secret."""

OPTIONAL_PACKAGES = ("peft", "numpy", "pillow", "sentencepiece", "torchao", "bitsandbytes", "optimum-quanto", "gguf")
"""What pipelines can make use of; listed where it is installed."""

LITTLE_HOST_BYTES = 4 * GIB
LITTLE_DISK_BYTES = 5 * GIB

_DEVICES = Path("/dev")
_MAKERS = (("NVIDIA", "nvidia[0-9]*"), ("AMD", "kfd"))
_DRIVERS = (("NVIDIA", "/sys/module/nvidia/version"), ("AMD", "/sys/module/amdgpu/version"))
_USER = re.compile(r"(?<=://)[^/\s]*@")
_QUERY = re.compile(r"(?<=\w)\?\S*")

LinkState = Literal["intact", "corrupt", "failed", "not compared"]
_Row = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package: its version or None, and the range that dmconfig asks for, empty where it asks for none."""

    name: str
    installed: str | None
    required: str
    supported: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk under a folder, which need not exist yet."""

    purpose: str
    folder: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between two devices; from ``cpu`` it is there and back."""

    source: str
    destination: str
    state: LinkState
    failure: TransferFailure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All that was found.

    ``torch_build`` names what torch was built for (``cpu``, ``cuda 12.8``, ``rocm 6.4``) or is ``missing``.
    ``devices`` are the accelerators and the cpu, or nothing where they could not be asked for.
    """

    python: str
    platform: str
    packages: tuple[Package, ...]
    torch_build: str
    driver: str | None
    devices: tuple[Device, ...]
    disks: tuple[Disk, ...]
    links: tuple[Link, ...]
    hub_token: bool
    environment: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    @property
    def accelerators(self) -> tuple[Device, ...]:
        """The devices that are not the cpu."""
        return tuple(device for device in self.devices if is_accelerator(device.id))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What makes the machine unfit: copies between devices that cannot be trusted."""
        return tuple(transfer_problems([link.failure for link in self.links if link.failure]))

    @property
    def exit_code(self) -> int:
        """0, or 4 when bytes do not survive a copy between devices."""
        return 4 if self.problems else 0


def examine() -> Examination:
    """Return what this machine has and whether it works. Takes some MiB of each accelerator for a moment."""
    warnings: list[str] = []
    packages = (*_required_packages(warnings), *_optional_packages())
    torch = _import_torch(warnings)
    devices = _devices(warnings)
    disks = tuple(_disks())
    warnings += [*_package_warnings(packages), *_torch_warnings(torch, devices), *_space_warnings(devices, disks)]
    return Examination(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        packages=packages,
        torch_build=_build_of(torch) if torch else "missing",
        driver=_driver(torch),
        devices=devices,
        disks=disks,
        links=_links([device.id for device in devices]) if torch else (),
        hub_token=_has_hub_token(),
        environment=tuple((name, _shown(os.environ[name])) for name in ENVIRONMENT if name in os.environ),
        warnings=tuple(warnings),
    )


def examination_data(examination: Examination) -> dict[str, Any]:
    """Return examination as JSON data; sizes in bytes."""
    return {
        "ok": not examination.problems,
        "dmconfig": __version__,
        "python": examination.python,
        "platform": examination.platform,
        "torch_build": examination.torch_build,
        "driver": examination.driver,
        "packages": [asdict(package) for package in examination.packages],
        "devices": [asdict(device) for device in examination.devices],
        "disks": [asdict(disk) for disk in examination.disks],
        "copies": [_link_data(link) for link in examination.links],
        "hub_token": examination.hub_token,
        "environment": dict(examination.environment),
        "warnings": list(examination.warnings),
        "problems": [problem_data(problem) for problem in examination.problems],
    }


def examination_text(examination: Examination) -> str:
    """Return examination as lines to read or to paste into a bug report."""
    build = examination.torch_build
    torch_line = "torch is missing" if build == "missing" else f"torch built for {build}"
    head = [
        f"dmconfig {__version__}, {examination.python}, {examination.platform}",
        f"{torch_line}; driver: {examination.driver or 'none found'}",
    ]
    return "\n".join([*head, *_section_lines(examination)]) + "\n"


# ---------------------------------------------------------------- packages


def _required_packages(warnings: list[str]) -> Iterator[Package]:
    """Yield what dmconfig's own metadata requires, so that a minimum is written down once, in pyproject.toml."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("dmconfig") or []
    except importlib.metadata.PackageNotFoundError:
        warnings.append("dmconfig is not installed as a package, so what it needs is not known here")
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            installed = _version_of(requirement.name)
            yield Package(
                name=requirement.name,
                installed=installed,
                required=str(requirement.specifier),
                supported=installed is not None and requirement.specifier.contains(installed, prereleases=True),
            )


def _optional_packages() -> Iterator[Package]:
    for name in OPTIONAL_PACKAGES:
        if installed := _version_of(name):
            yield Package(name=name, installed=installed, required="", supported=True)


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_warnings(packages: Iterable[Package]) -> Iterator[str]:
    for package in packages:
        if package.installed is None:
            yield f"{package.name} is not installed; dmconfig needs {package.name}{package.required}"
        elif not package.supported:
            yield f"{package.name} {package.installed} is not supported; dmconfig needs {package.required}"


# ---------------------------------------------------------------- torch, devices, disks


def _import_torch(warnings: list[str]) -> ModuleType | None:
    """Return torch, or None where it is missing or broken (a library of the system that is not there, say)."""
    try:
        import torch
    except (ImportError, OSError) as error:
        warnings.append(f"torch cannot be imported: {_first_line(error)}")
        return None
    return torch


def _build_of(torch: ModuleType) -> str:
    """Return what torch was built for, and the version of that."""
    for name, attribute in (("rocm", "hip"), ("cuda", "cuda"), ("xpu", "xpu")):
        if version := getattr(torch.version, attribute, None):
            return f"{name} {version}"
    return "mps" if torch.backends.mps.is_built() else "cpu"


def _driver(torch: ModuleType | None) -> str | None:
    """Return the accelerators' driver as the kernel and torch know it, or None."""
    found = [f"{maker} {text}" for maker, file in _DRIVERS if (text := _read(Path(file)))]
    ask = getattr(getattr(torch, "_C", None), "_cuda_getDriverVersion", None)
    number = int(ask()) if ask and torch and torch.version.cuda else 0
    if number:
        found.append(f"for CUDA up to {number // 1000}.{number % 1000 // 10}")
    return ", ".join(found) or None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _devices(warnings: list[str]) -> tuple[Device, ...]:
    try:
        return probe_machine().devices
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: a driver that answers with an error
        warnings.append(f"the devices cannot be listed: {_first_line(error)}")
        return ()


def _torch_warnings(torch: ModuleType | None, devices: Iterable[Device]) -> Iterator[str]:
    """Say so when a device file of an accelerator is there and torch has no use for it."""
    makers = [maker for maker, pattern in _MAKERS if any(_DEVICES.glob(pattern))]
    if torch is None or not makers or any(is_accelerator(device.id) for device in devices):
        return
    seen = f"{' and '.join(makers)} device files are there"
    if _build_of(torch) == "cpu":
        yield f"{seen}, but torch {torch.__version__} is built for the cpu only; install a build for them"
    else:
        yield (
            f"{seen}, but torch sees no accelerator; see that the driver is new enough for {_build_of(torch)} "
            "and that no environment variable hides the devices"
        )


def _disks() -> Iterator[Disk]:
    for purpose, folder in (("working folder", Path.cwd()), ("hub cache", hub_cache())):
        existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), None)
        if existing is not None:
            usage = shutil.disk_usage(existing)
            yield Disk(purpose=purpose, folder=_shown(str(folder)), total_bytes=usage.total, free_bytes=usage.free)


def _space_warnings(devices: Iterable[Device], disks: Iterable[Disk]) -> Iterator[str]:
    for device in devices:
        if device.id == CPU and device.free_bytes < LITTLE_HOST_BYTES:
            yield f"only {format_bytes(device.free_bytes)} of host memory is free; weights pass through it on their way"
    for disk in disks:
        if disk.purpose == "hub cache" and disk.free_bytes < LITTLE_DISK_BYTES:
            yield f"only {format_bytes(disk.free_bytes)} is free under the hub cache; few pipelines are that small"


def _links(devices: list[str]) -> tuple[Link, ...]:
    """Return every way between devices, tried."""
    failures = {(failure.source, failure.destination): failure for failure in check_transfers(devices)}
    host_failed = any(source == CPU for source, _ in failures)
    return tuple(_link(way, failures.get(way), tried=way[0] == CPU or not host_failed) for way in ways(devices))


def _link(way: tuple[str, str], failure: TransferFailure | None, *, tried: bool) -> Link:
    state: LinkState = "intact" if tried else "not compared"
    if failure:
        state = "failed" if failure.error else "corrupt"
    return Link(source=way[0], destination=way[1], state=state, failure=failure)


# ---------------------------------------------------------------- the hub, the environment, what may be shown


def _has_hub_token() -> bool:
    """Tell whether the hub would be asked with a token: one in the environment, or one of an earlier login."""
    try:
        from huggingface_hub import get_token
    except (ImportError, OSError):
        return False
    return bool(get_token())


def _shown(value: str) -> str:
    """Return value without what it may carry of passwords (in an address), and without the user's name."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    value = _QUERY.sub("", _USER.sub("", value))
    return re.sub(rf"(?:^|(?<=[:;])){re.escape(home)}(?=[/\\]|$)", "~", value) if home not in {"~", "/", ""} else value


def _first_line(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


# ---------------------------------------------------------------- text


def _section_lines(examination: Examination) -> Iterator[str]:
    for title, rows in _sections(examination):
        yield from ("", title, *_aligned(rows or [("none",)]))
    for problem in examination.problems:
        yield from ("", render_problem(problem))


def _sections(examination: Examination) -> Iterator[tuple[str, list[_Row]]]:
    yield "packages", [_package_row(package) for package in examination.packages]
    yield "devices", [(device.id, _space(device), device.description) for device in examination.devices]
    yield "disks", [(disk.purpose, _space(disk), disk.folder) for disk in examination.disks]
    yield "copies between devices", [_link_row(link) for link in examination.links] or [(_no_links(examination),)]
    yield "hub", [("token", "present, not shown" if examination.hub_token else "none")]
    yield "environment", [*examination.environment]
    yield "warnings", [(warning,) for warning in examination.warnings]


def _aligned(rows: list[_Row]) -> Iterator[str]:
    """Yield a line per row with its columns, all but the last, as wide as their widest."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    for row in rows:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip()


def _package_row(package: Package) -> _Row:
    needed = f"needs {package.required}" if package.required else ""
    return package.name, package.installed or "missing", needed if not package.supported else package.required


def _space(place: Device | Disk) -> str:
    return f"{format_bytes(place.free_bytes)} free of {format_bytes(place.total_bytes)}"


def _link_row(link: Link) -> _Row:
    back = " and back" if link.source == CPU else ""
    details = f": {link.failure.details}" if link.failure else ""
    return f"{link.source} to {link.destination}{back}", f"{link.state}{details}"


def _no_links(examination: Examination) -> str:
    return "not tried" if examination.accelerators else "no accelerator: nothing to compare"


def _link_data(link: Link) -> dict[str, Any]:
    failure = link.failure
    return {
        "source": link.source,
        "destination": link.destination,
        "state": link.state,
        "wrong_bytes": failure.wrong_bytes if failure else 0,
        "all_zero": failure.all_zero if failure else False,
        "error": (failure.error or None) if failure else None,
    }
