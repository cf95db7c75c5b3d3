"""Small wheels made by tests, and pip that reads a folder of wheels, or no index at all."""

import base64
import hashlib
import os
import shutil
import subprocess
import zipfile
from pathlib import Path


def make_wheel(folder, name, version, files):
    """A wheel of these files (path in the wheel to bytes); its path and its sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digest = lambda content: base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    record = [f"{path},sha256={digest(content)},{len(content)}" for path, content in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in contents.items():
            archive.writestr(path, content)
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()


def copy_without_pip(monkeypatch, wheel):
    """`wheel` is what pip downloads, without running it."""
    run = subprocess.run

    def copied(command, **options):
        if "--dest" not in command:  # of a library
            return run(command, **options)
        folder = command[command.index("--dest") + 1]
        os.makedirs(folder, exist_ok=True)
        shutil.copy(wheel, folder)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", copied)


def fail_without_pip(monkeypatch, printed):
    """Every download fails with this output of pip, without running it."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2, stdout=printed))


def use_folder_as_index(monkeypatch, folder: Path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
