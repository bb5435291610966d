"""`python -m asyncrl.cli ...`, programs of `benchmarks/` and `tests/support/`, code that begins
with FORKED (`python -c`), pytest's workers and environments of verifiers, without their start-up,
in tests of what they do.

    warm_python.install()       in conftest.py: subprocess.Popen is WarmPopen from here on

Importing torch and what else a run needs takes each process two seconds of CPU. Here one process
has everything imported, and forks: a command becomes a process with its own id, session,
files, environment, command line and parent, in which the module runs as `python -m` runs it. The
processes that it starts come about the same way. What is passed over is the interpreter's start and
the first import of each module, so tests of these carry the marker `cold`: they start Python.

A command that Python would start differently is started by Python: another interpreter, other
options, variables that are read while modules are imported, a `preexec_fn` of its own.

Each process gets a seed, a child from before its first line, that forks the processes it starts: a
fork of a process at work would inherit its threads' locks and its files. The fork is a child of the
process that asked, not of its seed. A process of LEAVES, which starts no other, has no seed."""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path
from typing import Any, ClassVar, NoReturn

ROOT = Path(__file__).resolve().parents[2]
HOLD = ROOT / "tests" / "support" / "hold"
MOST = 1 << 17  # bytes of an order
PR_SET_PDEATHSIG, PR_GET_TID_ADDRESS, MADV_COLLAPSE = 1, 40, 25
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
LEAVES = ("actors.reward_worker", "asyncrl.models.model_check", "asyncrl.supervise.cleanup")
MODULES = ("asyncrl.cli", "asyncrl.supervise.start", "torch.distributed.run")
# folders; a test may add its own
PROGRAMS = [ROOT / "benchmarks", ROOT / "benchmarks" / "lib", ROOT / "tests" / "support"]
FORKED = "# forked\n"
WORKER = "import sys;exec(eval(sys.stdin.readline()))"  # of pytest-xdist, by execnet
TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
OPTIONS = ("-P", "-u")  # of Python, before the program
# read while the interpreter starts or a library is loaded
EARLY = (
    *("PYTHON", "OMP_", "ATEN_", "ONEDNN_", "MKL_", "LC_", "LANG", "LD_", "CUDA_", "TORCH_"),
    *("HF_", "TRANSFORMERS_"),
)
# torch reads the last one when it first looks for a GPU, which the warm process never does
LATE = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "CUDA_VISIBLE_DEVICES")
LATE += ("TORCH_EXTENSIONS_DIR", "TORCH_NCCL_ASYNC_ERROR_HANDLING")  # the latter by torchrun
LATE += ("LD_LIBRARY_PATH", "LD_PRELOAD")  # set by vLLM where it is imported
# by asyncrl.models, in each process that imports it
SET_BY_IMPORTS = (("HF_HUB_OFFLINE", "YES"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1"))
LOADED = (
    "numpy zmq.asyncio msgspec torch transformers torch.utils.checkpoint asyncrl.supervise.run "
    "asyncrl.supervise.doctor asyncrl.supervise.exact_check asyncrl.supervise.report.run_view "
    "asyncrl.experiments.serial actors.generator buffer.service learner.loop "
    "asyncrl.tasks.warm_start learner.distributed.fsdp_backend deepspeed "
    # by which DeepSpeed imports torch's compiler in every rank
    "deepspeed.runtime.zero.muon.muon_optimizer deepspeed.module_inject.auto_ep_layer peft "
    "pytest"  # by kits
)
# environment of another Python (agent.python) -> what its processes import, in four seconds
FOREIGN = {
    "clients": "msgspec xxhash verifiers.envs.environment datasets",
    "verifiers": "msgspec xxhash verifiers.v1 verifiers.v1.tasksets",
}
FOREIGN_START = ROOT / "asyncrl" / "contract" / "foreign_start.py"


def startup_variables(env: dict[str, str]) -> dict[str, str]:
    values = {k: v for k, v in env.items() if k.startswith(EARLY) and k not in LATE}
    for name, _ in {*SET_BY_IMPORTS, ("HF_HUB_OFFLINE", "1")} & values.items():
        del values[name]
    return {"OMP_WAIT_POLICY": "PASSIVE"} | values  # the command's own, unless it is given


# Ids of processes that serve all tests of a worker: what they use counts while they live.
SERVERS: list[int] = []


class WarmPopen(subprocess.Popen):
    """Popen, for a command of asyncrl by a fork of the warm process."""

    servers: ClassVar[dict[str, socket.socket]] = {}  # Python -> where this process orders a fork
    foreign: ClassVar[set[str]] = set()  # other Pythons
    cold = True  # Python is started
    owner = 0  # a fork that the process made by itself, as of a mutant, starts Python
    startup_env: ClassVar[dict[str, str]] = {}
    import_env: ClassVar[dict[str, str]] = {}  # variables that modules set while they are imported
    lock = threading.Lock()

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        names = (
            "preexec close_fds pass_fds cwd env startupinfo creationflags shell p2cread p2cwrite "
            "c2pread c2pwrite errread errwrite restore_signals gid gids uid umask session group"
        )
        options = dict(zip(names.split(), rest, strict=True))
        if not is_warm(args, executable, options):
            super()._execute_child(args, executable, *rest)
            return
        streams = [options["p2cread"], options["c2pwrite"], options["errwrite"]]
        fds = [own if fd == -1 else fd for own, fd in enumerate(streams)]
        mask = os.umask(0)
        os.umask(mask)
        cores, argv = split_affinity([os.fspath(word) for word in args])
        order = {
            "argv": argv,
            "cores": cores,
            "env": dict(os.environ if options["env"] is None else options["env"]),
            "cwd": os.path.abspath(options["cwd"] or os.getcwd()),
            "numbers": [0, 1, 2, *options["pass_fds"]],
            "session": options["session"],
            "tied": options["preexec"] is not None,
            "umask": mask,
            "parent": os.getpid(),
        }
        with WarmPopen.lock:
            self.pid = request_fork(order, [*fds, *options["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*[options[name] for name in names.split()[8:14]])


def is_warm(args: Any, executable: Any, options: dict[str, Any]) -> bool:
    mine = os.getpid() == WarmPopen.owner and not WarmPopen.cold
    if not mine or isinstance(args, (str, bytes)) or executable is not None:
        return False
    _, words = split_affinity([os.fspath(word) for word in args])
    words = [word for place, word in enumerate(words) if place != 1 or word not in OPTIONS]
    if words[0] != sys.executable:
        known = words[0] in WarmPopen.foreign and words[1:2] == [str(FOREIGN_START)]
    elif words[1:2] == ["-m"]:
        known = bool({*words[2:3]} & {*MODULES})
    elif words[1:2] == ["-c"]:
        known = is_forked(words[2])
    else:
        known = is_program(Path(options["cwd"] or os.getcwd(), *words[1:2]))
    env = dict(os.environ if options["env"] is None else options["env"])
    preexec = getattr(options["preexec"], "__qualname__", "end_with_parent")
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    return (
        known
        and startup_variables(env) == WarmPopen.startup_env
        and str(ROOT) in paths
        and not any((Path(p) / "sitecustomize.py").exists() for p in paths if p != str(HOLD))
        and preexec.startswith("end_with_parent")
        and (options["cwd"] is None or os.path.isdir(options["cwd"]))
        and not options["shell"]
    )


def split_affinity(words: list[str]) -> tuple[list[int], list[str]]:
    """The cores of `taskset -c 0,1 COMMAND`, none without it, and the command."""
    if words[:2] != ["taskset", "-c"]:
        return [], words
    return [int(core) for core in words[2].split(",")], words[3:]


def is_forked(code: str) -> bool:
    """Also what `asyncrl engines` runs, to see whether an engine works."""
    installed = sys.modules.get("asyncrl.models.installed")
    trials = [] if installed is None else [trial for *_, trial in installed.KNOWN.values()]
    return code.startswith(FORKED) or code in (WORKER, *trials)


def is_program(path: Path) -> bool:
    return path.suffix == ".py" and path.parent in PROGRAMS and path != Path(__file__)


def request_fork(order: dict[str, Any], fds: list[int]) -> int:
    """The pid of the process that is made of an order, a child of this one."""
    python = order["argv"][0]
    server = WarmPopen.servers.get(python) or start(python)
    socket.send_fds(server, [json.dumps(order).encode()], fds)
    answer = server.recv(32)
    assert answer, "the warm process has ended"
    return int(answer)


# ---- the warm process ----------------------------------------------------------------------------


def next_order(orders: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each order; returns in such a process, with its order and files."""
    while True:
        data, fds, _, _ = socket.recv_fds(orders, MOST, 64)
        if not data:
            os._exit(0)
        if (pid := fork_sibling()) == 0:
            return json.loads(data), fds
        orders.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def fork_sibling() -> int:
    """os.fork, but the new process is a child of this one's parent.

    It needs no process in between, whose memory would be a copy too.  glibc keeps the id of a
    thread, at an address that the kernel knows."""
    libc, python, address = ctypes.PyDLL(None), ctypes.pythonapi, ctypes.c_void_p()
    libc.syscall.restype = ctypes.c_long
    flags = CLONE_PARENT | signal.SIGCHLD
    if libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(address)) == 0:
        flags |= CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID
    python.PyOS_BeforeFork()
    words = (SYS_CLONE[os.uname().machine], flags, 0, 0, address.value or 0, address.value or 0)
    pid = int(libc.syscall(*map(ctypes.c_long, words)))
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    assert pid >= 0, "the kernel makes no process"
    return pid


def serve_forks(orders: socket.socket) -> NoReturn:
    """Carry out orders, each in its process, and those that such a process gives in turn."""
    while True:
        order, fds = next_order(orders)
        orders.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        is_leaf = bool({*LEAVES} & {*order["argv"][1:5]}) or "RANK" in order["env"]
        if is_leaf or (child := os.fork()):
            theirs.close()
            SERVERS[:] = [] if is_leaf else [child]
            be_process(order, fds, ours)
        ours.close()
        for fd in fds:  # a seed holds no file of its process open
            os.close(fd)
        set_command_line(["warm seed"])
        orders = theirs


def be_process(order: dict[str, Any], fds: list[int], seed: socket.socket) -> NoReturn:
    """Be the process of the order, from what exec would have left of it."""
    argv, env = order["argv"], order["env"]
    if order["tied"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != order["parent"]:
            os._exit(1)
    if order["session"]:
        os.setsid()
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    WarmPopen.servers = {sys.executable: place_files(fds, order["numbers"], seed)}
    WarmPopen.cold = False
    subprocess.Popen = WarmPopen
    if TORCHRUN in sys.modules:
        sys.modules[TORCHRUN].Popen = WarmPopen
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(WarmPopen.import_env | env)
    WarmPopen.startup_env = startup_variables(dict(os.environ))
    WarmPopen.owner = os.getpid() if SERVERS else 0
    tempfile.tempdir = None  # by this process's TMPDIR
    set_command_line(argv)
    option = argv[1] if argv[1] in OPTIONS else ""
    at_once = option == "-u" or "PYTHONUNBUFFERED" in env
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", 1 if at_once else -1, closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)
    safe, words = option == "-P", argv[1 + bool(option) :]
    paths = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.orig_argv = argv
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path[:] = [*paths, *sys.path, *([] if safe else [order["cwd"]])]
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[:] = ["", *paths, *sys.path]
    else:
        sys.argv = words
        own = [] if safe else [str(Path(words[0]).resolve().parent)]
        sys.path[:] = [*own, *paths, *sys.path]
    apply_holds()
    if not safe:
        importlib.import_module("asyncrl.contract.importing").export_checkout_path()
    sys.modules.pop(words[2] if safe and words[2:] else "", None)  # run, not imported
    run_main(words)


def run_main(words: list[str]) -> NoReturn:
    """Run a module, code or a program as the interpreter does, and end as it does."""
    code: Any = 0
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.modules["__main__"] = main_module = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(main_module))
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def place_files(fds: list[int], numbers: list[int], seed: socket.socket) -> socket.socket:
    """Give the files their numbers, and close all others but the seed's."""
    above = max(256, *numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    kept = fcntl.fcntl(seed.fileno(), fcntl.F_DUPFD_CLOEXEC, above)
    seed.detach()
    os.closerange(3, above)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    return socket.socket(fileno=kept)


def set_command_line(argv: list[str]) -> None:
    """What others read of it in /proc: the arguments' memory, kept large for this by `install`."""
    stat = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = int(stat[45]), int(stat[46])
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)[: end - start]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(words.ljust(end - start, b"\0"))


def apply_holds() -> None:
    """What hold/sitecustomize.py would do to modules at their import."""
    if str(HOLD) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        return
    holds = runpy.run_path(str(HOLD / "sitecustomize.py"))["HOLDS"]
    for variable, (name, patch) in holds.items():
        if variable in os.environ and name in sys.modules:
            patch(sys.modules[name])


def install() -> None:
    """From now on this process starts commands of asyncrl by a warm process, unless it is cold."""
    WarmPopen.startup_env = startup_variables(dict(os.environ))
    WarmPopen.owner = os.getpid()
    WarmPopen.foreign = {str(Path(sys.prefix, name, "bin", "python")) for name in FOREIGN}
    subprocess.Popen = WarmPopen


def start(python: str) -> socket.socket:
    """Start the warm process of a Python; returns where to order forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    room = " " * 8192  # for the longest command line
    server = subprocess.Popen(
        [python, __file__, str(theirs.fileno()), room],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"}
        | os.environ
        | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    SERVERS.append(server.pid)
    theirs.close()
    WarmPopen.servers[python] = ours
    return ours


def main() -> None:
    gc.disable()
    orders = socket.socket(fileno=int(sys.argv[1]))
    sys.path.remove(str(Path(__file__).parent))
    before = dict(os.environ)
    if modules := FOREIGN.get(Path(sys.prefix).name):
        for name in modules.split():
            importlib.import_module(name)
    else:
        import_all()
    for finalizer in weakref.finalize._registry:  # torch's own, which take 60 ms of each process
        finalizer.atexit = False
    sys.path.remove(str(ROOT))
    WarmPopen.import_env = dict(os.environ.items() - before.items())
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    # pyarrow's allocator begins its thread again in a fork
    others = set(threads[1:]) - {"jemalloc_bg_thd"}
    assert not others, f"a thread does not survive a fork: {others}"
    gc.collect()
    gc.freeze()
    gc.enable()
    if not modules:
        use_large_pages()
    serve_forks(orders)


def import_all() -> None:
    """Import what a run needs, and do what the first use does in each process."""
    metrics = importlib.import_module("asyncrl.records.metrics")
    metrics.import_protocol()  # without torch, as in a buffer
    from asyncrl.cli import FAMILIES

    for name in (*LOADED.split(), *(f"asyncrl.cli.{family}" for family in FAMILIES)):
        importlib.import_module(name)
    # DeepSpeed starts compilers, msgspec reads types
    assert importlib.import_module("deepspeed").ops.__compatible_ops__
    importlib.import_module("asyncrl.config.load").load(ROOT / "configs" / "demo.toml")
    for split in ("heldout", "ood"):
        importlib.import_module("asyncrl.tasks.synthetic").SortTask().build_fixed_problems(split)


def use_large_pages() -> None:
    """Move what is in memory to large pages, where the kernel has them: a fork copies the table of
    all pages, and most of what a fork costs is this."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if access == "rw-p" and inode == "0":
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


if __name__ == "__main__":
    sys.modules["warm_python"] = sys.modules["__main__"]
    main()
