"""A real Slurm on this machine's loopback: its daemons without systemd, cgroups or a database.

    python -m tests.support.slurm_cluster start DIR  # prints how to point Slurm at it
    python -m tests.support.slurm_cluster stop DIR

It needs root, and munge and Slurm as Debian packs them (``apt-get install slurm-wlm munge``). The
node is this host, its GPUs are made up: a job gets ``CUDA_VISIBLE_DEVICES`` and nothing behind it.
There is no accounting, so ``sacct`` says nothing: whether a job lives is asked of ``squeue``.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sweeps.process import die_with_parent, terminated_as_interrupt

PARTITION = "debug"
_PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_DEADLINE = 60.0  # seconds; an idle machine needs less than one
_LOG_LINES = 15

_SETTINGS = """\
ClusterName=made-up
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired, by default two minutes.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1000
ReturnToService=2
KillWait=5
MailProg=/bin/true
GresTypes=gpu
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
"""


def available() -> str:
    """Why no cluster can be started here, as a sentence; empty where one can."""
    if sys.platform != "linux":
        return "Slurm's daemons run on Linux only."
    if os.geteuid() != 0:
        return "Only root can start Slurm's daemons."
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"Slurm or munge is not installed: {', '.join(missing)} not found." if missing else ""


def variables(conf: Path) -> dict[str, str]:
    """The environment in which Slurm's commands speak to a cluster, and as if in no other's job."""
    others = ("SLURM_", "SBATCH_", "SCANCEL_", "SINFO_", "SQUEUE_")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return ours | {"SLURM_CONF": str(conf), "PATH": _PATH}


@contextmanager
def running_cluster(folder: Path, gpus: int = 4) -> Iterator[Path]:
    """A cluster of one node, this host, which runs jobs; yields what ``SLURM_CONF`` must be.

    Up to eight jobs share a CPU: those of tests mostly wait, and some must run at the same time
    on a machine of two CPUs. No job has more CPUs than there are.

    Raises:
        RuntimeError: it did not start; the message ends as the daemons' logs do.
    """
    host = _host()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    devices = folder.resolve() / "devices"
    devices.mkdir(parents=True, exist_ok=True)
    for number in range(gpus):
        device = devices / f"gpu{number}"
        device.unlink(missing_ok=True)
        device.symlink_to(os.devnull)  # Slurm counts devices alone, and looks at nothing else
    conf = _configured(
        folder.resolve(),
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory={memory * 9 // 10} "
        f"Gres=gpu:fake:{gpus} State=UNKNOWN\n"
        f"PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=FORCE:8\n",
        f"NodeName={host} Name=gpu Type=fake File={devices}/gpu[0-{gpus - 1}]\n",
    )
    with _started(conf, "slurmctld", "slurmd"):
        yield conf


@contextmanager
def made_up_cluster(
    folder: Path, nodes: int = 4, gpus: int = 8, cpus: int = 64, memory_gb: int = 512
) -> Iterator[Path]:
    """A cluster whose nodes do not exist, for ``sbatch --test-only``; yields as the other does.

    Its controller is real, and takes the nodes for a cloud's that are switched off: it accepts
    what they could run, and refuses what they could not. Without a database any account will do.

    Raises:
        RuntimeError: it did not start; the message ends as the daemons' logs do.
    """
    names = f"node[1-{nodes}]"
    conf = _configured(
        folder.resolve(),
        f"NodeName={names} CPUs={cpus} RealMemory={memory_gb * 1024} Gres=gpu:{gpus} State=CLOUD\n"
        f"PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE\n"
        "SuspendProgram=/bin/true\nResumeProgram=/bin/true\nSuspendTime=60\nPrivateData=cloud\n",
        f"NodeName={names} Name=gpu Count={gpus}\n",
    )
    with _started(conf, "slurmctld"):
        yield conf


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _configured(folder: Path, nodes: str, gres: str) -> Path:
    """Write what the daemons read, and their key, into a folder that may have been used before."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "munge" / "socket").unlink(missing_ok=True)  # which says that munged is ready
    key = folder / "munge" / "key"
    key.unlink(missing_ok=True)
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    controller_port, node_port = _free_ports(2)
    settings = _SETTINGS.format(
        host=_host(), folder=folder, controller_port=controller_port, node_port=node_port
    )
    (folder / "gres.conf").write_text(gres, encoding="utf-8")
    conf = folder / "slurm.conf"
    conf.write_text(settings + nodes, encoding="utf-8")
    return conf


@contextmanager
def _started(conf: Path, *daemons: str) -> Iterator[None]:
    """Munge and Slurm's daemons until the end, and no process of a job any longer."""
    folder, munge = conf.parent, conf.parent / "munge"
    commands = {
        "munged": [
            "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--seed-file={munge}/seed", f"--log-file={munge}/log",
        ],
        "slurmctld": ["-D", "-c", "-f", str(conf)],
        "slurmd": ["-D", "-f", str(conf)],
    }  # fmt: skip
    running: dict[str, subprocess.Popen[bytes]] = {}

    def wait(what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _DEADLINE
        while not is_so():
            ended = [name for name, process in running.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"{', '.join(ended)} ended" if ended else f"not so after {_DEADLINE:.0f} s"
                raise RuntimeError(f"Slurm did not start: {what}, {why}.\n{_ends_of_logs(folder)}")
            time.sleep(0.05)

    def start(name: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(
                [shutil.which(name, path=_PATH) or name, *commands[name]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables(conf),
                start_new_session=True,  # Ctrl-C is for who uses the cluster
                preexec_fn=die_with_parent,
            )

    try:
        start("munged")
        wait("munge's socket is there", (munge / "socket").exists)
        for name in daemons:
            start(name)
        wait("its nodes are idle", lambda: _states(conf) == {"idle"})
        yield
    finally:
        for process in running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _end_jobs(conf)


def _states(conf: Path) -> set[str]:
    """What the controller says of its nodes; nothing while it does not answer."""
    try:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"],
            capture_output=True, env=variables(conf), text=True, check=False, timeout=5,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return set()
    return {state.rstrip("~") for state in answer.stdout.split()}  # ~ is switched off


def _ends_of_logs(folder: Path) -> str:
    ends = []
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        ends += [f"{log.name} ends:", *(f"  {line}" for line in lines[-_LOG_LINES:])]
    return "\n".join(ends)


def _end_jobs(conf: Path) -> None:
    """Kill what jobs are left: they outlive Slurm's daemons, which may be restarted.

    Raises:
        RuntimeError: there were always more.
    """
    deadline = time.monotonic() + _DEADLINE
    while found := list(_of_jobs(conf)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"Processes of {conf.parent}'s jobs do not end: {found}.")
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _of_jobs(conf: Path) -> Iterator[int]:
    """The jobs' processes and those that Slurm puts above them, by the cluster that they name."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            names = (process / "environ").read_bytes().split(b"\0")
            above = (process / "comm").read_text(encoding="utf-8").startswith("slurm")
        except OSError:  # it has ended meanwhile
            continue
        of_job = above or any(name.startswith(b"SLURM_JOB_ID=") for name in names)
        if of_job and f"SLURM_CONF={conf}".encode() in names:
            yield int(process.name)


def _start(folder: Path) -> None:
    """Leave a process behind that keeps a cluster until it is told to stop."""
    if (folder / "keeper.pid").exists():
        sys.exit(f"A cluster is running in {folder} already.")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "keeper.log").open("wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.support.slurm_cluster", "keep", str(folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
    assert keeper.stdout is not None
    line = keeper.stdout.readline().decode()
    if not line:
        sys.exit(_ends_of_logs(folder))
    print(line, end="")


def _keep(folder: Path) -> None:
    pid = folder / "keeper.pid"
    with terminated_as_interrupt(), suppress(KeyboardInterrupt):
        try:
            with running_cluster(folder) as conf:
                pid.write_text(str(os.getpid()), encoding="utf-8")
                print(f"export SLURM_CONF={shlex.quote(str(conf))}", flush=True)
                signal.pause()
        finally:
            pid.unlink(missing_ok=True)


def _stop(folder: Path) -> None:
    pid = folder / "keeper.pid"
    if not pid.exists():
        sys.exit(f"No cluster is running in {folder}.")
    try:
        os.kill(int(pid.read_text(encoding="utf-8")), signal.SIGTERM)
    except ProcessLookupError:  # it was killed, and its daemons with it
        pid.unlink()
    while pid.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["start", name]:
            if why := available():
                sys.exit(why)
            _start(Path(name))
        case ["keep", name]:
            _keep(Path(name))
        case ["stop", name]:
            _stop(Path(name))
        case _:
            sys.exit("usage: slurm_cluster start|stop DIR")
