"""Settings of small runs, and a Slurm cluster of two nodes on this machine for the duration of a test."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port, wait_until

SMALL = [
    "dist.cpu_only=true", "dist.dtype=float32", "logging.every_iterations=1", "logging.tensorboard=false",
    "misc.n_threads=1", "dataset.batch_size=8",
]  # fmt: skip
DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scancel", "scontrol", "sinfo", "setpriv")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"

# cred_expire: seconds before Slurm may start a requeued job; default 120, minimum 5
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait=20
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} RealMemory={memory} Gres=gpu:1
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName={host}-second NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
GRES = "Name=gpu File=/dev/null\n"


class Slurm:
    """The commands of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.variables = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def __call__(self, *words: str, cwd: Path | None = None, **variables: str) -> str:
        """Run a Slurm command and return its output; an error fails the test."""
        environment = {**self.variables, **variables}
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def show_job(self, number: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self("scontrol", "show", "job", number)))


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    """Start private slurmctld, munged and two slurmd on the loopback interface; end them afterwards."""
    missing = [name for name in (*DAEMONS, *COMMANDS) if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid():
        pytest.skip("Slurm's daemons start jobs as root only")
    host = socket.gethostname().partition(".")[0]
    try:
        socket.gethostbyname(host)
    except OSError:
        pytest.skip(f"the host name {host} has no address: add it to /etc/hosts")
    # not tmp_path: the path of a socket is limited to 108 characters
    with tempfile.TemporaryDirectory(prefix="slurm") as name:
        folder = Path(name)
        folder.chmod(0o755)  # munged requires that every user can reach its socket
        slurm = Slurm(folder)
        try:
            _start_cluster(slurm, folder, host)
            yield slurm
        finally:
            _stop_cluster(slurm)


def _start_cluster(slurm: Slurm, folder: Path, host: str) -> None:
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    # half of the machine's memory, in MiB; a node without RealMemory refuses jobs that request some
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 << 20)
    ports = [free_port() for _ in range(3)]
    conf = CONF.format(host=host, ports=ports, folder=folder, cpus=os.cpu_count(), memory=memory)
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(GRES)
    files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
    munged.append(f"--socket={files['socket']}")
    munged += [f"--{option}-file={files[option]}" for option in ("pid", "log", "seed")]
    nodes = (["slurmd", "-D", "-N", name] for name in (host, f"{host}-second"))
    for words in (munged, ["slurmctld", "-D"], *nodes):
        with (folder / "daemons.log").open("ab") as log:
            # the daemons are killed when this process ends for any reason
            command = ["setpriv", "--pdeathsig", "KILL", *words]
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            daemon = subprocess.Popen(command, env=slurm.variables, start_new_session=True, **streams)
            slurm.daemons.append(daemon)
        if words[0] == "munged":
            wait_until(files["socket"].exists, lambda: "munged does not start")

    def is_idle() -> bool:
        query = ["sinfo", "-h", "-o", "%D %T"]
        listing = subprocess.run(query, env=slurm.variables, capture_output=True, text=True, timeout=240)
        return listing.stdout.strip() == "2 idle"

    wait_until(is_idle, (folder / "daemons.log").read_text)


def _stop_cluster(slurm: Slurm) -> None:
    """Kill all processes of the cluster: daemons, job steps and their children."""
    variable, end = f"SLURM_CONF={slurm.variables['SLURM_CONF']}".encode(), time.monotonic() + 30
    while time.monotonic() < end:
        left = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if variable in (process / "environ").read_bytes().split(b"\0"):
                    left.append(int(process.name))
                    os.kill(left[-1], signal.SIGKILL)
        for daemon in slurm.daemons:
            daemon.poll()
        if not left:
            return
        time.sleep(0.2)
    raise AssertionError(f"processes of a cluster do not end: {left}")
