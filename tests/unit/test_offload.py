"""The offload folder by itself: what is written and mapped, what is left, and whose it is, with real processes."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
import torch
from filelock import FileLock
from safetensors import safe_open

from dmconfig.errors import Code, DispatchError
from dmconfig.offload import OffloadFolder, remove_leftovers
from tests.conftest import only_problem

ROOT = Path(__file__).parents[2]
only_linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")

Start = Callable[..., "subprocess.Popen[str]"]

HOLD = """
import sys
from pathlib import Path
from dmconfig.offload import OffloadFolder
files = OffloadFolder(Path(sys.argv[1]), needed_bytes=0)
print(files.folder, flush=True)
sys.stdin.readline()
"""
"""A process that has a sub-folder until it is told to end, or is killed."""
KILLED_WHILE_WRITING = """
import resource, signal, sys
from pathlib import Path
import torch
from dmconfig.offload import OffloadFolder
files = OffloadFolder(Path(sys.argv[1]), needed_bytes=0)
files.take("first", [("weight", torch.nn.Parameter(torch.ones(9)))])
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
files.take("second", [("weight", torch.nn.Parameter(torch.ones(1 << 20)))])
"""
"""A process that the system kills when a file that it writes becomes larger than 64 KiB."""
FORK = """
import os, sys
from pathlib import Path
from dmconfig.offload import OffloadFolder
files = OffloadFolder(Path(sys.argv[1]), needed_bytes=0)
child = os.fork()
if child == 0:
    if sys.argv[2] == "closes":
        files.close()
    sys.exit()
os.waitpid(child, 0)
print(files.folder.exists(), flush=True)
"""
"""A process whose child ends, with a copy of all that it has."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Give a function that starts a script with arguments, in a process that is gone when the test ends."""
    started = []

    def run(script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, *map(str, arguments)]
        process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    """Wait for the next line that a process writes, and return it."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def contents(folder: Path) -> set[str]:
    """Return what is in a folder and below it, as paths from there."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def own(files: OffloadFolder) -> set[str]:
    """Return what a sub-folder without weights is in its folder: itself and its lock."""
    return {files.folder.name, f"{files.folder.name}.lock"}


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """Return random weights."""
    return torch.nn.Parameter(torch.randn(shape).to(dtype))


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, which equal also where numbers do not: -0 and 0, or two kinds of NaN."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def file_of(tensor: torch.Tensor) -> str:
    """Return the file that the memory of a tensor is mapped from, or nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return name if name.startswith("/") else ""
    return ""


@contextmanager
def files_at_most(limit_bytes: int) -> Iterator[None]:
    """Let this process write no file larger than this, as on a disk that becomes full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Whose is what


def test_each_has_a_sub_folder_of_its_own(tmp_path: Path) -> None:
    """Two in one folder do not meet: each is a sub-folder with a lock, and closing one leaves the other."""
    one, other = (OffloadFolder(tmp_path, needed_bytes=0) for _ in range(2))
    assert one.folder.parent == other.folder.parent == tmp_path
    assert contents(tmp_path) == own(one) | own(other)

    one.close()
    one.close()

    assert contents(tmp_path) == own(other)
    other.close()
    assert not contents(tmp_path)


def test_missing_folders_are_made(tmp_path: Path) -> None:
    """The folder and those above it are made; they stay, and only the sub-folder goes."""
    folder = tmp_path / "not" / "there"
    files = OffloadFolder(folder, needed_bytes=0)
    assert contents(folder) == own(files)

    files.close()

    assert not contents(folder)
    assert folder.is_dir()


def test_one_that_nobody_holds_is_removed(tmp_path: Path) -> None:
    """Who forgets to close it loses nothing but memory: it goes with its last reference."""
    files = OffloadFolder(tmp_path, needed_bytes=0)
    files.take("unet", [("weight", parameter(3))])

    del files
    gc.collect()

    assert not contents(tmp_path)


def test_what_others_put_there_is_not_touched(tmp_path: Path) -> None:
    """Whatever it is called: files, folders, locks without a sub-folder and sub-folders without a lock, and links."""
    elsewhere = tmp_path / "elsewhere"
    folder = tmp_path / "offload"
    for path in ("notes/a.txt", "dmconfig-notes/a.txt", "dmconfig-01234567/a.txt", "dmconfig-0123456789/a.txt"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text("mine")
    for path in ("dmconfig-notes.lock", "dmconfig-0123456789.lock", "notes.lock", "weights.safetensors"):
        (folder / path).write_text("mine")
    elsewhere.mkdir()
    (elsewhere / "a.txt").write_text("mine")
    (folder / "dmconfig-89abcdef").symlink_to(elsewhere)
    (folder / "dmconfig-89abcdef.lock").touch()
    before = contents(tmp_path)

    assert remove_leftovers(folder) == ()
    files = OffloadFolder(folder, needed_bytes=0)
    files.take("unet", [("weight", parameter(3))])
    files.close()

    assert contents(tmp_path) == before
    assert all(path.read_text() == "mine" for path in tmp_path.rglob("*.txt"))


def test_a_lock_that_somebody_looks_at_is_left_to_him(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who looks for left-overs may lock a new lock file before its maker does: another name is tried."""
    theirs = FileLock(tmp_path / "dmconfig-00000000.lock")
    names = iter(["00000000", "11111111"])
    monkeypatch.setattr("secrets.token_hex", lambda _count: next(names))
    with theirs:
        files = OffloadFolder(tmp_path, needed_bytes=0)

        assert files.folder == tmp_path / "dmconfig-11111111"
        assert contents(tmp_path) == own(files) | {"dmconfig-00000000.lock"}


@only_linux
def test_made_in_one_thread_and_closed_in_another(tmp_path: Path) -> None:
    """A server loads in a worker's thread, which ends: the lock holds on, and closing lets go of its file."""
    made: list[OffloadFolder] = []
    thread = Thread(target=lambda: made.append(OffloadFolder(tmp_path, needed_bytes=0)))
    thread.start()
    thread.join()
    (files,) = made
    assert remove_leftovers(tmp_path) == ()
    assert contents(tmp_path) == own(files)

    files.close()

    assert not contents(tmp_path)
    assert not [link for link in open_files() if link.startswith(str(tmp_path))]


def open_files() -> list[str]:
    """Return what the descriptors of this process are open on."""
    links = Path("/proc/self/fd").iterdir()
    return [str(link.readlink()) for link in links if link.is_symlink()]  # the one that listed them is gone


# Processes


def test_a_process_that_ends_takes_its_sub_folder_along(tmp_path: Path, start: Start) -> None:
    """Nobody closes it, and the process ends by itself: nothing is left."""
    process = start(HOLD, tmp_path)
    folder = Path(line_of(process))
    assert contents(tmp_path) == {folder.name, f"{folder.name}.lock"}

    process.communicate("\n")

    assert process.returncode == 0
    assert not contents(tmp_path)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, start: Start) -> None:
    """While it lives, its sub-folder stays whatever others do there; once it is killed, the next one removes it."""
    process = start(HOLD, tmp_path)
    theirs = Path(line_of(process))
    (theirs / "unet").mkdir()
    (theirs / "unet" / "weights.safetensors").write_bytes(bytes(99))
    left = {theirs.name, f"{theirs.name}.lock", f"{theirs.name}/unet", f"{theirs.name}/unet/weights.safetensors"}
    one = OffloadFolder(tmp_path, needed_bytes=0)
    assert contents(tmp_path) == left | own(one)

    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert contents(tmp_path) == left | own(one)
    other = OffloadFolder(tmp_path, needed_bytes=0)

    assert contents(tmp_path) == own(one) | own(other)


def test_left_overs_are_told(tmp_path: Path, start: Start) -> None:
    """Removing left-overs says which they were; where there is none, nothing."""
    process = start(HOLD, tmp_path)
    theirs = Path(line_of(process))
    assert remove_leftovers(tmp_path) == ()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    assert remove_leftovers(tmp_path) == (theirs,)
    assert remove_leftovers(tmp_path) == ()


def test_a_process_killed_while_it_writes_leaves_no_file_that_looks_whole(tmp_path: Path, start: Start) -> None:
    """What was written before is whole, what is being written has another name; all of it is a left-over."""
    process = start(KILLED_WHILE_WRITING, tmp_path)
    process.communicate()
    assert process.returncode == -signal.SIGXFSZ
    (written,) = tmp_path.rglob("*.safetensors")
    assert written.parent.name == "first"
    with safe_open(written, "pt") as file:
        assert bits(file.get_tensor("weight")) == bits(torch.ones(9))

    files = OffloadFolder(tmp_path, needed_bytes=0)

    assert contents(tmp_path) == own(files)


@pytest.mark.parametrize("how", ["ends", "closes"])
def test_a_forked_child_leaves_its_parents_sub_folder(how: str, tmp_path: Path, start: Start) -> None:
    """A worker process made by fork has a copy of everything, and its end is not the end of the pipeline."""
    process = start(FORK, tmp_path, how)
    assert line_of(process) == "True"

    process.communicate()

    assert not contents(tmp_path)


# Weights


@only_linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_weights_are_written_and_mapped_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of every shape, contiguous or not; each stays the same parameter, in the file and nowhere else."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        given = {
            "matrix": parameter(3, 5, dtype=torch.float32),
            "turned": parameter(4, 6, dtype=torch.float32),
            "number": parameter(dtype=torch.float32),
        }
        special = torch.tensor([-0.0, float("nan"), float("inf"), 1e-40])
    if dtype.is_floating_point:
        given["special"] = torch.nn.Parameter(special)
    for each in given.values():
        each.requires_grad = False
        each.data = each.data.to(dtype)
    given["turned"].data = given["turned"].data.t()
    before = {name: (each.dtype, each.shape, bits(each)) for name, each in given.items()}
    files = OffloadFolder(tmp_path, needed_bytes=0)

    files.take("unet", given.items())

    assert {name: (each.dtype, each.shape, bits(each)) for name, each in given.items()} == before
    assert {file_of(each) for each in given.values()} == {str(files.folder / "unet" / "weights.safetensors")}
    assert contents(files.folder) == {"unet", "unet/weights.safetensors"}


@only_linux
def test_weights_stay_readable_until_the_last_one_is_gone(tmp_path: Path) -> None:
    """Closing removes the file, not what is mapped from it; bringing back before needs the file no more."""
    kept, brought = parameter(3), parameter(3)
    before = bits(kept), bits(brought)
    files = OffloadFolder(tmp_path, needed_bytes=0)
    files.take("unet", [("kept", kept), ("brought", brought)])

    files.bring_back([brought])
    files.close()

    assert (bits(kept), bits(brought)) == before
    assert file_of(kept).endswith("(deleted)")
    assert file_of(brought) == ""
    assert not contents(tmp_path)


def test_parameters_that_share_a_weight_share_it_in_memory_too(tmp_path: Path) -> None:
    """Hooks may leave a tied weight as two parameters over the same bytes: bringing back does not make two of them."""
    one, other, alone = parameter(3), parameter(3), parameter(3)
    files = OffloadFolder(tmp_path, needed_bytes=0)
    files.take("text_encoder", [("one", one), ("alone", alone)])
    other.data = one.data
    before = bits(one), bits(alone)

    files.bring_back([one, other, alone])

    assert one.data_ptr() == other.data_ptr() != alone.data_ptr()
    assert (bits(one), bits(alone)) == before


def test_writing_that_fails_changes_nothing(tmp_path: Path) -> None:
    """A disk that becomes full in the middle: the weights are in memory as before, and no file is left of them."""
    small, large = parameter(9), parameter(1 << 16)
    before, memory = bits(large), large.data_ptr()
    files = OffloadFolder(tmp_path, needed_bytes=0)
    files.take("vae", [("weight", small)])

    with files_at_most(1 << 16), pytest.raises(DispatchError) as caught:
        files.take("unet", [("weight", large)])

    problem = only_problem(caught.value)
    assert problem.code == Code.BAD_OFFLOAD_FOLDER
    assert problem.what.startswith(f"unet cannot be written to {files.folder}: ")
    assert "File too large" in problem.what
    assert problem.fix == "see that it has room"
    assert (bits(large), large.data_ptr()) == (before, memory)
    assert contents(files.folder) == {"vae", "vae/weights.safetensors"}
    files.take("unet", [("weight", large)])
    assert bits(large) == before


# Folders that cannot be used


def impossible_folders(tmp_path: Path) -> dict[Path, str]:
    """Return folders that nobody can write to, not even root, with what is said of each."""
    file = tmp_path / "file"
    file.write_text("mine")
    found = {file: "File exists", file / "below": "Not a directory"}
    if Path("/proc/self").exists():
        found[Path("/proc/offload")] = "No such file or directory"
        found[Path("/proc")] = "no file in it can be locked"
    return found


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """A file, a folder below one, a file system that makes no files: each is said with the system's reason."""
    for folder, reason in impossible_folders(tmp_path).items():
        with pytest.raises(DispatchError) as caught:
            OffloadFolder(folder, needed_bytes=0)

        problem = only_problem(caught.value)
        assert (problem.code, problem.path) == (Code.BAD_OFFLOAD_FOLDER, ("offload_folder",))
        assert problem.what == f"{folder} cannot be written to: {reason}"
        assert problem.fix == "name a folder that this user can write to"
    assert contents(tmp_path) == {"file"}


def test_a_folder_without_room_is_refused_and_left_empty(tmp_path: Path) -> None:
    """More bytes than any disk has are refused with what is free, and no sub-folder stays."""
    with pytest.raises(DispatchError) as caught:
        OffloadFolder(tmp_path, needed_bytes=1 << 60)

    problem = only_problem(caught.value)
    assert problem.code == Code.BAD_OFFLOAD_FOLDER
    assert problem.what.startswith(f"1048576.0 TiB are to rest in {tmp_path}, where ")
    assert problem.what.endswith(" are free")
    assert problem.fix == "name a folder on a larger disk, or load in the dtype that is stored, which needs no copy"
    assert not contents(tmp_path)


def test_what_was_left_over_counts_as_free(tmp_path: Path, start: Start) -> None:
    """Left-overs go before the room is measured: a refusal has removed them too."""
    process = start(HOLD, tmp_path)
    line_of(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    with pytest.raises(DispatchError):
        OffloadFolder(tmp_path, needed_bytes=1 << 60)

    assert not contents(tmp_path)
