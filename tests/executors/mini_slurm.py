"""A real Slurm cluster of several fake nodes in a temp folder, for tests: no systemd, no cgroups, no accounting.

Needs root and Debian's `slurm-wlm slurm-wlm-basic-plugins munge`, whose build lets several slurmd run on one host. GPUs
are links to a device that containers have too: Slurm then sets CUDA_VISIBLE_DEVICES as it does for real ones.

    python -m tests.executors.mini_slurm DIR        starts one by hand; Ctrl-C ends it
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# proctrack/pgid: linuxproc loses children whose parent died. cred_expire: how long a requeued job waits (least: 5).
_CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
KillWait=5
MinJobAge=300
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
JobRequeue=1
RequeueExit={requeue_exit}
GresTypes=gpu
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    """What is missing for tests with Slurm, None when they can run."""
    if os.geteuid() != 0:
        return "needs root (a cluster of its own)"
    if not all(shutil.which(program) for program in ("slurmctld", "slurmd", "munged")):
        return "needs `apt-get install slurm-wlm slurm-wlm-basic-plugins munge`"
    return None


@dataclass
class MiniSlurm:
    """A cluster in `folder`; use as a context manager. `environment` is what Slurm's commands need."""

    folder: Path
    nodes: int = 2
    gpus: int = 2
    requeue_exit: int = 75
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _port: int = 0

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def __enter__(self) -> MiniSlurm:
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        self._write_conf()
        self._start_munge()
        try:
            for daemon in ["slurmctld", *(f"slurmd-n{node + 1}" for node in range(self.nodes))]:
                self.start(daemon)
            self.wait_for_nodes()
        except BaseException:  # of which `with` never comes to the end
            self.__exit__()
            raise
        return self

    def start(self, daemon: str) -> None:
        """Start `slurmctld` or `slurmd-NODE` (again)."""
        program, _, node = daemon.partition("-")
        command = [program, "-D", "-f", str(self.folder / "slurm.conf"), *(["-N", node] if node else [])]
        with (self.folder / f"{daemon}.out").open("ab") as log:
            self._daemons[daemon] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, daemon: str) -> None:
        """kill -9, as a crash of that node or of the controller."""
        self._daemons[daemon].kill()
        self._daemons[daemon].wait()

    def wait_for_nodes(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            asked = subprocess.run(
                ["sinfo", "-h", "-N", "-o", "%T"], env=self.environment, capture_output=True, text=True, check=False
            )
            if asked.returncode == 0 and asked.stdout.split() == ["idle"] * self.nodes:
                return
            time.sleep(0.1)
        raise AssertionError(f"the nodes never came up; see {self.folder}/*.log")

    def __exit__(self, *_: object) -> None:
        subprocess.run(["timeout", "5", "scancel", "-u", "root"], env=self.environment, check=False)
        time.sleep(0.5)
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(6)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        with suppress(OSError, ValueError):
            os.kill(int((self.folder / "munged.pid").read_text()), signal.SIGTERM)
        for pid in self.processes():  # a slurmd that was killed leaves its stepd and job behind
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Job processes and step daemons of this cluster that are still there."""
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        return [pid for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")) if self._is_job(pid, mark)]

    @staticmethod
    def _is_job(pid: int, mark: bytes) -> bool:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            name = Path(f"/proc/{pid}/comm").read_text()
        except OSError:
            return False
        return mark in environ and (
            name.startswith("slurmstepd") or any(entry.startswith(b"SLURM_JOB_ID=") for entry in environ)
        )

    def _write_conf(self) -> None:
        host, cpus = socket.gethostname().split(".")[0], max(2, os.cpu_count() or 1)
        nodes = [
            f"NodeName=n{node + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} CPUs={cpus} "
            f"RealMemory=4096 Gres=gpu:{self.gpus} State=UNKNOWN"
            for node in range(self.nodes)
        ]
        values = {"host": host, "folder": self.folder, "port": _free_port(), "nodes": "\n".join(nodes)}
        (self.folder / "slurm.conf").write_text(_CONF.format(**values, requeue_exit=self.requeue_exit))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for gpu in range(self.gpus):
            (self.folder / f"gpu{gpu}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{self.gpus - 1}]\n")

    def _start_munge(self) -> None:
        key, name = self.folder / "munge.key", str(self.folder / "munge")
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"--key-file": str(key), "--socket": f"{name}.sock", "--pid-file": f"{name}d.pid"}
        files |= {"--log-file": f"{name}d.log", "--seed-file": f"{name}d.seed"}
        subprocess.run(["munged", "--force", *(part for pair in files.items() for part in pair)], check=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    with MiniSlurm(Path(sys.argv[1]).resolve()) as cluster:
        print(f"export SLURM_CONF={cluster.folder}/slurm.conf")
        with suppress(KeyboardInterrupt):
            signal.pause()
