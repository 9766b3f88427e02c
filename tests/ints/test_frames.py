"""The watch may look at the training thread at any moment, whatever the garbage collector does then."""

import subprocess
import sys
from textwrap import dedent

# Each collection gives the interpreter's lock away, and the other thread takes the lock of the list of threads all the time.
PROGRAM = dedent("""
    import gc, threading, time
    from types import SimpleNamespace
    from lightning_zero3.strategies.watch import Watch

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            time.sleep(1e-5)

    here, end = threading.get_ident(), time.monotonic() + 1

    def look():
        while time.monotonic() < end:
            Cycle()
            assert Watch._frame(SimpleNamespace(_trained=here)) is not None

    gc.set_threshold(1)
    looking = threading.Thread(target=look)
    looking.start()
    while time.monotonic() < end:
        other = threading.Thread(target=int)
        other.start()
        other.join()
    looking.join()
    assert gc.isenabled()
    print("both went on")
""")


def test_frames_can_be_listed_while_threads_start_and_garbage_is_collected():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "both went on\n", done.stderr
