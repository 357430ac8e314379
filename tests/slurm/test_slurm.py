#!/usr/bin/env python3
"""qconv as the tasks of a real Slurm: steps, batch scripts, job arrays; tasks that are killed, jobs
that are requeued, nodes that die. Needs root, slurm-wlm and munge; exit 77 where they are missing,
unless QCONV_SLURM_REQUIRED is set.

  QCONV=build/qconv tests/slurm/test_slurm.py
"""
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "tests"), os.path.join(ROOT, "tests", "cli")]
import make_checkpoint as mk  # noqa: E402
from output_case import tree_digest  # noqa: E402
from test_parts import has_weight  # noqa: E402
from small_cluster import SmallCluster, why_not  # noqa: E402

QCONV = os.path.abspath(os.environ.get("QCONV", os.path.join(ROOT, "build", "qconv")))
NODES = 4
SHARD = ["--max-shard-size", "2MB", "--threads", "1"]
SHOW = ("echo $SLURM_STEP_ID/$SLURM_STEP_NUM_TASKS/$SLURM_NTASKS/$SLURM_PROCID")


class SlurmCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = SmallCluster(NODES)
        cls.addClassCleanup(cls.cluster.stop)
        cls.cluster.start()

    def setUp(self):
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.dir = tempfile.mkdtemp(prefix="qconv-slurm-model-", dir=base)
        self.addCleanup(shutil.rmtree, self.dir)

    def path(self, *names):
        return os.path.join(self.dir, *names)

    def script(self, name, text):
        with open(self.path(name), "w") as f:
            f.write("#!/bin/sh\n" + text)
        os.chmod(self.path(name), 0o755)
        return self.path(name)

    def read(self, name):
        with open(self.path(name)) as f:
            return f.read()

    def batch(self, script, *args, wait=True):
        """sbatch; the job's id."""
        r = self.cluster.run(["sbatch", "--parsable", *(["-W"] if wait else []), *args, script],
                             check=False, cwd=self.dir)
        self.assertEqual(r.returncode, 0, r.stdout + r.stderr + self.written())
        return r.stdout.strip()

    def written(self):
        """What jobs wrote, for messages."""
        return "".join("--- %s\n%s" % (n, self.read(n)) for n in sorted(os.listdir(self.dir))
                       if n.endswith(".out"))

    def job_state(self, job):
        r = self.cluster.run(["squeue", "-h", "-j", job, "-o", "%T"], check=False)
        return set(r.stdout.split())

    def wait_until(self, condition, what, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                self.fail("waited for %s\n%s\n%s" % (what, self.written(), self.cluster.logs()))
            time.sleep(0.02)


class Environment(SlurmCase):
    """What of Slurm's variables is where: convert/run/part_rank.c rests on it."""

    def test_step(self):
        r = self.cluster.run(["srun", "-N2", "-n4", "sh", "-c", SHOW])
        self.assertEqual(sorted(r.stdout.split()), ["0/4/4/%d" % i for i in range(4)])

    def test_batch_script_is_no_step(self):
        job = self.script("job.sh", SHOW + "\nsrun -n3 sh -c '%s'\n" % SHOW)
        self.batch(job, "-N2", "-n4", "-o", self.path("j.out"))
        lines = self.read("j.out").split()
        self.assertEqual(lines[0], "//4/0")
        self.assertEqual(sorted(lines[1:]), ["0/3/3/%d" % i for i in range(3)])

    def test_shell_of_salloc_is_no_step(self):
        r = self.cluster.run(["salloc", "-N2", "-n4", "sh", "-c", SHOW])
        self.assertEqual(r.stdout.split(), ["//4/"])

    def test_a_job_inherits_the_step_it_was_submitted_from(self):
        job = self.script("job.sh", SHOW + "\n")
        self.cluster.run(["srun", "-n2", "sbatch", "-W", "-n1", "-o", self.path("j%j.out"), job])
        outs = [n for n in os.listdir(self.dir) if n.endswith(".out")]
        self.assertEqual([self.read(n) for n in outs], ["0/2/1/0\n"] * 2)


class Model(SlurmCase):
    """A model of 12 weights, 2 MiB each; what one process makes of it."""

    SHAPE = [1024, 1024]
    COUNT = 12

    def setUp(self):
        super().setUp()
        tensors = {"model.layers.%d.self_attn.q_proj.weight" % i:
                   ("BF16", self.SHAPE, self.content(i)) for i in range(self.COUNT)}
        mk.write_checkpoint(self.path("m"), tensors, config={"model_type": "llama"})
        self.args = [QCONV, "--to", "nf4", *SHARD]
        self.cluster.run(self.args + [self.path("m"), self.path("one")])
        self.want = tree_digest(self.path("one"))

    def content(self, i):
        n = mk.numel(self.SHAPE)
        return bytes((i + 1) * k % 120 for k in range(256)) * (2 * n // 256)

    def command(self, *more):
        return self.args + [*more, self.path("m"), self.path("o")]

    def assert_whole(self):
        self.assertEqual(tree_digest(self.path("o")), self.want, self.written())


class Convert(Model):
    def test_srun(self):
        # A file a task: srun passes on what tasks print in pieces of about 1,000 bytes.
        self.cluster.run(["srun", "-N4", "-o", self.path("report-%t.json"), *self.command("--json")])
        reports = [json.loads(self.read("report-%d.json" % task)) for task in range(4)]
        self.assertEqual(sorted(p["part"]["index"] for p in reports), [1, 2, 3, 4])
        self.assertEqual({p["part"]["of"] for p in reports}, {4})
        self.assertEqual(sum(p["part"]["completed"] == "here" for p in reports), 1, reports)
        self.assert_whole()

    def test_again(self):
        self.cluster.run(["srun", "-N4", *self.command()])
        r = self.cluster.run(["srun", "-N4", *self.command()])
        self.assertEqual(r.stdout.count("is complete already"), 4, r.stdout)
        self.assert_whole()

    def test_two_tasks_a_node_and_steps_of_a_batch_job(self):
        job = self.script("job.sh", "srun " + " ".join(self.command()) + "\n")
        self.batch(job, "-N4", "-n8", "-o", self.path("j.out"))
        self.assert_whole()
        self.assertIn("of 8", self.read("j.out"))

    def test_a_batch_script_without_srun_does_all(self):
        job = self.script("job.sh", " ".join(self.command()) + "\n")
        self.batch(job, "-N2", "-n4", "-o", self.path("j.out"))
        self.assert_whole()
        self.assertNotIn("part", self.read("j.out"))

    def test_one_part_in_a_step(self):
        r = self.cluster.run(["srun", "-n1", *self.command()])
        self.assertNotIn("part", r.stdout)
        self.assert_whole()

    def test_job_array(self):
        job = self.script("job.sh", " ".join(self.command(
            "--part", "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")) + "\n")
        self.batch(job, "--array=1-3", "-o", self.path("j%a.out"))
        self.assert_whole()


class Lost(Model):
    """Weights enough to be in the middle of."""

    SHAPE = [1024, 2048]
    COUNT = 24

    def setUp(self):
        super().setUp()
        self.args += ["--compress", "zstd:9"]
        shutil.rmtree(self.path("one"))
        self.cluster.run(self.args + [self.path("m"), self.path("one")])
        self.want = tree_digest(self.path("one"))

    def journal(self, part, of):
        return self.path("o", ".qconv-partial", "journal-%05d-of-%05d" % (part, of))

    def has_work(self, part, of):
        return has_weight(self.journal(part, of))

    def pid_of(self, name, value):
        """The process of qconv with this in its environment."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink("/proc/%s/exe" % pid) != os.path.realpath(QCONV):
                    continue
                with open("/proc/%s/environ" % pid, "rb") as f:
                    if ("%s=%s" % (name, value)).encode() in f.read().split(b"\0"):
                        return int(pid)
            except OSError:
                continue
        return None

    def stop_in_the_middle(self, part, of, name="SLURM_PROCID", value=None):
        """Stops part `part` once it has recorded something; its process."""
        found = []

        def caught():
            if not found:
                pid = self.pid_of(name, part - 1 if value is None else value)
                if pid is None:
                    return False
                os.kill(pid, signal.SIGSTOP)
                found.append(pid)
            if self.has_work(part, of):
                return True
            os.kill(found[0], signal.SIGCONT)
            time.sleep(0.002)
            os.kill(found[0], signal.SIGSTOP)
            return False
        self.wait_until(caught, "part %d in the middle of its work" % part)
        return found[0]

    def test_a_killed_task_is_redone_alone(self):
        # A file for each task: srun mixes the lines of tasks that end together.
        p = self.cluster.start_command(["srun", "-N4", "--kill-on-bad-exit=0", "-o",
                                        self.path("report-%t.json"), *self.command("--json")])
        victim = self.stop_in_the_middle(3, 4)
        self.wait_until(lambda: not os.path.exists(self.path("o", "qconv.json")) and
                        self.pid_of("SLURM_PROCID", 0) is None and
                        self.pid_of("SLURM_PROCID", 1) is None and
                        self.pid_of("SLURM_PROCID", 3) is None, "the other parts")
        os.kill(victim, signal.SIGKILL)
        _, err = p.communicate(timeout=60)
        self.assertNotEqual(p.returncode, 0)
        reports = [json.loads(self.read("report-%d.json" % i)) for i in (0, 1, 3)]
        self.assertEqual(sorted(r["part"]["index"] for r in reports), [1, 2, 4], err)
        self.assertTrue(all(3 in r["part"]["to_come"] for r in reports))
        others = {i: os.stat(self.journal(i, 4)).st_mtime_ns for i in (1, 2, 4)}
        self.assertEqual(len(others), 3)
        # By any scheduler, or none: the part alone.
        r = self.cluster.run(["srun", "-n1", *self.command("--json", "--part", "3/4")])
        report = json.loads(r.stdout)
        self.assertEqual(report["part"]["to_come"], [])
        self.assert_whole()

    def test_a_requeued_job_goes_on(self):
        job = self.script("job.sh", "srun " + " ".join(self.command()) + "\n")
        job_id = self.batch(job, "-N4", "--requeue", "-o", self.path("j.out"),
                            "--open-mode=append", wait=False)
        self.stop_in_the_middle(2, 4)
        self.cluster.run(["scontrol", "requeue", job_id])
        self.end_of(job_id)
        self.assert_whole()

    def test_a_requeued_array_task_is_redone_alone(self):
        job = self.script("job.sh", " ".join(self.command(
            "--part", "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")) + "\n")
        job_id = self.batch(job, "--array=1-3", "--requeue", "--open-mode=append",
                            "-o", self.path("j%a.out"), wait=False)
        self.stop_in_the_middle(2, 3, "SLURM_ARRAY_TASK_ID", 2)
        self.cluster.run(["scontrol", "requeue", job_id + "_2"])
        self.end_of(job_id)
        self.assert_whole()
        self.assertEqual(self.read("j1.out").count("part 1 of 3"), 1, self.written())
        self.assertEqual(self.read("j3.out").count("part 3 of 3"), 1, self.written())

    def test_a_dead_node(self):
        """Its tasks die with it; the job requeues itself and goes on on what is left."""
        job = self.script("job.sh", "srun --kill-on-bad-exit=0 " + " ".join(self.command()) +
                          " || { [ ${SLURM_RESTART_COUNT:-0} -lt 3 ] && "
                          "scontrol requeue $SLURM_JOB_ID; exit 1; }\n")
        job_id = self.batch(job, "-N2", "-n2", "--requeue", "-o", self.path("j.out"),
                            "--open-mode=append", wait=False)
        victim = self.stop_in_the_middle(2, 2)
        node = self.cluster.node_of(victim)
        self.cluster.stop_node(node)
        self.addCleanup(self.cluster.wait, lambda: self.cluster.node_states() == ["idle"] * NODES,
                        "all nodes to be back")
        self.addCleanup(self.cluster.start_node, node)
        os.kill(victim, signal.SIGKILL)
        self.end_of(job_id, 150)
        self.assert_whole()

    def end_of(self, job_id, seconds=90):
        # A requeued job waits two minutes by default, unless it is released.
        def ended():
            self.cluster.run(["scontrol", "update", "job=" + job_id, "StartTime=now"], check=False)
            time.sleep(0.3)
            return not self.job_state(job_id) & {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING",
                                                 "REQUEUED", "SUSPENDED"}
        self.wait_until(ended, "job " + job_id, seconds)


if __name__ == "__main__":
    reason = why_not()
    if reason and not os.environ.get("QCONV_SLURM_REQUIRED"):
        print("skipped: " + reason)
        sys.exit(77)
    if reason:
        sys.exit("a Slurm is required: " + reason)
    unittest.main()
