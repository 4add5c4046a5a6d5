"""train.py in forked processes: ranks that meet over gloo, and runs to be stopped or killed. A fork has everything imported, so it begins at once."""
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot  # noqa: F401 (a run draws its curves: half of what a fork would have to import)

ROOT = Path(__file__).resolve().parent.parent


def fork(work, log: Path, **environment) -> int:
    """work() in a fork, its stdout and stderr in `log` -> its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        screen = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(screen, 1), os.dup2(screen, 2)
        sys.stdout, sys.stderr = (open(k, "w", buffering=1, encoding="utf-8", closefd=False) for k in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with Ctrl-C ignored, nohup's with hangups
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update({name: str(value) for name, value in environment.items()})
        work()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def end(pid: int, timeout: float = 120) -> int:
    """Exit code of a fork, negative where a signal ended it."""
    until = time.time() + timeout
    while time.time() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} took more than {timeout} s")


def run(argv, log: Path, ranks: int = 1, before=lambda rank: None) -> tuple[list[int], list[str]]:
    """`python train.py argv` on so many ranks -> their exit codes and screens. before(rank) runs first in each fork: a place for hooks."""
    pids = start(argv, log, ranks, before)
    return [end(pid) for pid in pids], [Path(f"{log}.{rank}").read_text(encoding="utf-8") for rank in range(ranks)]


def start(argv, log: Path, ranks: int, before=lambda rank: None) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = dict(WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) if ranks > 1 else {}

    def work(rank):
        before(rank)
        sys.argv = ["train.py", *map(str, argv)]
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    return [fork(lambda rank=rank: work(rank), Path(f"{log}.{rank}"), RANK=rank, LOCAL_RANK=rank, **meeting) for rank in range(ranks)]
