"""A real Slurm on one machine, for tests: munged, slurmctld and a slurmd for each node, all below
one temporary folder, with keys, sockets and ports of their own. Nothing of the machine's own Slurm
is used or changed. Needs root (slurmd starts tasks as their users) and Debian's slurm-wlm and
munge. Standard library only.

    cluster = SmallCluster(nodes=4)
    cluster.start()
    cluster.run(["srun", "-N4", "hostname"])
    cluster.stop()
"""
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "sacct")
SBIN = "/usr/sbin"

CONF = """\
ClusterName=qconvtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={top}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
ReturnToService=2
KillWait=5
SlurmdTimeout={slurmd_timeout}
MessageTimeout=10
StateSaveLocation={top}/state
SlurmdSpoolDir={top}/spool-%n
SlurmctldPidFile={top}/slurmctld.pid
SlurmdPidFile={top}/slurmd-%n.pid
SlurmctldLogFile={top}/slurmctld.log
SlurmdLogFile={top}/slurmd-%n.log
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{last} CPUs=2 \
RealMemory=500 State=UNKNOWN
PartitionName=p Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not():
    """Why no cluster can be had here, or None."""
    if os.geteuid() != 0:
        return "not root"
    path = os.environ.get("PATH", "") + ":" + SBIN
    missing = [p for p in PROGRAMS[:6] if not shutil.which(p, path=path)]
    return "not installed: " + " ".join(missing) if missing else None


def free_ports(count):
    """The first of `count` ports in a row that nobody listens on."""
    for first in range(17000 + os.getpid() % 1000 * 10, 60000, count):
        held = []
        try:
            for port in range(first, first + count):
                s = socket.socket()
                held.append(s)
                s.bind(("", port))
            return first
        except OSError:
            continue
        finally:
            for s in held:
                s.close()
    raise RuntimeError("no free ports")


class SmallCluster:
    def __init__(self, nodes=4, slurmd_timeout=10):
        self.nodes = nodes
        self.top = tempfile.mkdtemp(prefix="qconv-slurm-")
        os.chmod(self.top, 0o755)
        self.daemons = {}
        port = free_ports(nodes + 1)
        host = socket.gethostname().split(".")[0]
        self.conf = os.path.join(self.top, "slurm.conf")
        for folder in ["state"] + ["spool-n%d" % (i + 1) for i in range(nodes)]:
            os.mkdir(os.path.join(self.top, folder))
        with open(self.conf, "w") as f:
            f.write(CONF.format(host=host, top=self.top, nodes=nodes, port=port, first=port + 1,
                                last=port + nodes, slurmd_timeout=slurmd_timeout))
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.env["PATH"] = self.env.get("PATH", "") + ":" + SBIN
        self.env["SLURM_CONF"] = self.conf

    def daemon(self, name, *args):
        log = open(os.path.join(self.top, name + ".out"), "w")
        self.daemons[name] = subprocess.Popen(args, env=self.env, stdout=log, stderr=log,
                                              stdin=subprocess.DEVNULL, start_new_session=True)
        log.close()

    def start_node(self, name):
        self.daemon(name, "slurmd", "-D", "-N", name)

    def stop_node(self, name):
        """The node's daemon dies, as with its machine; tasks of it must be ended by the caller."""
        self.end(name, signal.SIGKILL)

    def start(self):
        key = os.path.join(self.top, "munge.key")
        with open(key, "wb") as f:
            f.write(os.urandom(128))
        os.chmod(key, 0o400)
        self.daemon("munged", "munged", "--foreground", "--force", "--num-threads=2",
                    "--socket=" + self.top + "/munge.socket", "--key-file=" + key,
                    "--pid-file=" + self.top + "/munged.pid",
                    "--log-file=" + self.top + "/munged.log",
                    "--seed-file=" + self.top + "/munged.seed")
        self.wait(lambda: os.path.exists(self.top + "/munge.socket"), "munged")
        self.daemon("slurmctld", "slurmctld", "-D", "-f", self.conf)
        for i in range(self.nodes):
            self.start_node("n%d" % (i + 1))
        self.wait(lambda: self.node_states() == ["idle"] * self.nodes, "all nodes to be idle")

    def node_states(self):
        r = self.run(["sinfo", "-h", "-N", "-o", "%t"], check=False)
        return r.stdout.split()

    def wait(self, condition, what, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            dead = [n for n, p in self.daemons.items() if p.poll() is not None]
            if time.monotonic() > end or "slurmctld" in dead or "munged" in dead:
                raise RuntimeError("waited for %s; ended: %s\n%s" % (what, dead, self.logs()))
            time.sleep(0.1)

    def node_of(self, pid):
        """The node that a task's process belongs to, by its environment."""
        with open("/proc/%d/environ" % pid, "rb") as f:
            for word in f.read().split(b"\0"):
                if word.startswith(b"SLURMD_NODENAME="):
                    return word.split(b"=", 1)[1].decode()
        raise RuntimeError("process %d belongs to no node" % pid)

    def logs(self):
        text = ""
        for name in sorted(os.listdir(self.top)):
            if name.endswith((".log", ".out")):
                with open(os.path.join(self.top, name), errors="replace") as f:
                    text += "--- %s\n%s" % (name, "".join(f.readlines()[-15:]))
        return text

    def run(self, command, check=True, env=None, timeout=120, **more):
        """A command that sees the cluster."""
        r = subprocess.run(command, env=dict(self.env, **(env or {})), stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, universal_newlines=True, timeout=timeout, **more)
        if check and r.returncode != 0:
            raise RuntimeError("%s: exit %d\n%s%s" % (command, r.returncode, r.stdout, r.stderr))
        return r

    def start_command(self, command, env=None):
        return subprocess.Popen(command, env=dict(self.env, **(env or {})),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                universal_newlines=True)

    def end(self, name, how=signal.SIGTERM):
        p = self.daemons.pop(name, None)
        if p is None:
            return
        if p.poll() is None:
            p.send_signal(how)
        try:
            p.wait(timeout=15)
        except subprocess.TimeoutExpired:
            p.kill()
            p.wait()

    def stop(self):
        for name in [n for n in self.daemons if n.startswith("n")] + ["slurmctld", "munged"]:
            self.end(name)
        shutil.rmtree(self.top, ignore_errors=True)
