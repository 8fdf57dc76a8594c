"""Fresh interpreters: what is timed from the start of a process has a process of its own.

The bytecode is cached (a first round warms up), and JAX's compilation cache is off unless the code turns it on.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def python(code: str) -> str:
    """The last line that a fresh interpreter prints on the standard output, in an empty working directory.

    Raises:
        subprocess.CalledProcessError: it fails; its standard error stands in the note.
    """
    unwanted = ("JAX_COMPILATION_CACHE_DIR", "EQUIKD_COMPILATION_CACHE", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    home = str(Path(__file__).parents[1])  # where this package lies
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command)
        error.add_note(done.stderr)
        raise error
    return done.stdout.splitlines()[-1]


def seconds_to_first_step(code: str) -> float:
    """Seconds from the start of a process to the time that it prints."""
    start = time.time()
    return float(python(code)) - start
