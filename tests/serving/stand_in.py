"""A program with the processes of a server: it writes the ids of itself and a child, answers /health, or misbehaves."""

import argparse
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pids", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM, the child too")
    parser.add_argument("--exit", type=int, help="end with this code right after the start")
    arguments, _ = parser.parse_known_args()
    if arguments.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    unfinished = arguments.pids.with_suffix(".part")
    unfinished.write_text(f"{os.getpid()} {child.pid}")
    unfinished.rename(arguments.pids)
    print("stand-in: started", flush=True)
    if arguments.exit is not None:
        print("stand-in: no memory left", flush=True)
        os._exit(arguments.exit)
    server = http.server.ThreadingHTTPServer((arguments.host, arguments.port), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    time.sleep(600)


if __name__ == "__main__":
    main()
