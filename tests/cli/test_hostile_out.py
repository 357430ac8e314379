"""What somebody else may have left in OUT, and more shards than a shell lets a program open."""
import os
import resource
import subprocess
import unittest

from output_case import PLAIN, STAGING, OutputCase, tree
from qconv_case import QCONV
import make_checkpoint as mk


class Links(OutputCase):
    """A link in OUT must not lead qconv to files that are not its own."""

    def setUp(self):
        super().setUp()
        self.model({"model.layers.0.mlp.up_proj.weight": ("F32", [32, 64], bytes(4 * 32 * 64))})
        os.makedirs(self.path("victim/sub"))
        for name in ("victim/a", "victim/sub/b"):
            with open(self.path(name), "w") as f:
                f.write("precious")
        self.before = tree(self.path("victim"))
        os.mkdir(self.path("o"))

    def test_staging_folder_is_a_link(self):
        os.symlink("../victim", self.path("o/" + STAGING))
        for more in ([], ["--force"]):
            self.usage("--to", "nf4", *more, "m", "o", has="found a link")
            self.assertEqual(tree(self.path("victim")), self.before)

    def test_lock_is_a_link(self):
        os.mkdir(self.path("o/" + STAGING))
        os.symlink("../../victim/a", self.path("o/%s/lock" % STAGING))
        self.fails(1, "--to", "nf4", "m", "o", has="lock")
        self.assertEqual(tree(self.path("victim")), self.before)


class ManyShards(OutputCase):
    """The soft limit of open files is raised to the hard one where it is needed."""

    def test_more_shards_than_handles(self):
        count = 230
        self.model({"model.layers.%d.mlp.up_proj.weight" % i: ("F32", [32, 32], bytes(4096))
                    for i in range(count)})

        def few_handles():
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))

        for words in (["--to", "nf4", "--max-shard-size", "1B", "m", "o"], ["verify", "o"],
                      ["unpack", "o", "p"], ["verify", "p"], ["--to", "bf16", *PLAIN, "p", "q"]):
            r = subprocess.run([QCONV, "-q", *words], cwd=self.dir, stderr=subprocess.PIPE,
                               preexec_fn=few_handles)
            self.assertEqual((r.returncode, r.stderr), (0, b""), words)
        self.assertEqual(len(mk.read_checkpoint(self.path("q"))), count)


if __name__ == "__main__":
    unittest.main()
