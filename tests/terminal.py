"""The command line in a pseudo-terminal."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

LIMIT = 120  # seconds; a test that reaches it fails


def _adopt():
    """Make the terminal on the standard input that of the new session, so that Ctrl-C is a signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # test runners may ignore it, which their children inherit
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command in a terminal of the given size; `screen` is what a user sees, `output` everything written."""

    def __init__(self, arguments, environment=None, columns=80, rows=24):
        import pyte

        self._display = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._display)
        self.output = b""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            arguments, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_adopt,
            env={**os.environ, "TERM": "xterm-256color", **(environment or {})})  # fmt: skip
        os.close(theirs)
        self._ours = ours

    def read(self, seconds=0.1):
        """Take what was written; False if the terminal was closed."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return True
        try:
            found = os.read(self._ours, 65536)
        except OSError:
            return False
        self.output += found
        self._stream.feed(found)
        return bool(found)

    @property
    def screen(self):
        return "\n".join(self._display.display)

    def wait_for(self, condition):
        """Read until `condition(screen)` holds."""
        end = time.monotonic() + LIMIT
        while not condition(self.screen):
            assert self.read() and time.monotonic() < end, self.screen

    def press(self, keys):
        os.write(self._ours, keys.encode())

    def close(self):
        """End the command if it runs, for tests that fail."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def end(self):
        """Read until the command ends; returns its exit status."""
        end = time.monotonic() + LIMIT
        while self.read():
            assert time.monotonic() < end, self.screen
            if self.process.poll() is not None and not select.select([self._ours], [], [], 0)[0]:
                break
        os.close(self._ours)
        return self.process.wait(LIMIT)


def ebft_command(*arguments):
    return [sys.executable, "-m", "ebft", *arguments]
