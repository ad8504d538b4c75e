"""A Slurm of one node, on loopback and in a temporary folder, for the tests of sweeps on a cluster."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
JobRequeue=1
KillWait=5
ReturnToService=2
SchedulerParameters=defer_batch,batch_sched_delay=0,sched_interval=1,bf_interval=1,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=n1 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=n1 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Return why no Slurm can be started here; None if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return "Slurm is not installed: apt-get install -y --no-install-recommends slurm-wlm munge"
    return None if os.geteuid() == 0 else "only root can start a Slurm for the tests"


@contextmanager
def one_node(folder: Path) -> Iterator[None]:
    """Run a Slurm while the block runs, and let `SLURM_CONF` name it; its programs never outlive this process."""
    for name in ("munge", "controller", "node"):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge" / "key").chmod(0o400)
    host, ports = socket.gethostname().partition(".")[0], _free_ports(2)
    configuration = folder / "slurm.conf"
    configuration.write_text(_CONFIGURATION.format(host=host, ports=ports, folder=folder))
    os.environ["SLURM_CONF"] = str(configuration)
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    files = [f"--{option}={folder}/munge/{name}" for option, name in names.items()]
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.append(_start("munged", "--foreground", "--force", "--num-threads=1", *files))
        _wait(lambda: (folder / "munge" / "socket").exists(), 10)
        running.append(_start("slurmctld", "-D", "-f", str(configuration)))
        running.append(_start("slurmd", "-D", "-N", "n1", "-f", str(configuration)))
        _wait(lambda: "idle" in slurm("sinfo", "-h", "-o", "%T"), 60)
        yield
        slurm("scancel", "--full", f"--user={os.getuid()}")
        _wait(lambda: not slurm("squeue", "-h").strip(), 30)
    finally:
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        del os.environ["SLURM_CONF"]


def slurm(*words: str) -> str:
    """Run a program of Slurm and return what it prints."""
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout


def _start(*words: str) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    place = shutil.which(words[0])
    assert place is not None
    return subprocess.Popen(
        [place, *words[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
    )


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "Slurm does not do what it should"
        time.sleep(0.1)
