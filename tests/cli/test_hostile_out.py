"""What somebody else may have left in OUT, and more shards than a shell lets a program open."""
import os
import resource
import shutil
import subprocess
import unittest

from output_case import AT_CALL, PLAIN, STAGING, OutputCase, at_call, tree
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


class FolderLinks(OutputCase):
    """A folder of OUT is a link to somebody else's, where files have the names of OUT's own."""

    def setUp(self):
        super().setUp()
        weights = {"model.layers.0.mlp.up_proj.weight": ("F32", [32, 64], bytes(4 * 32 * 64))}
        self.model(weights, name="n")
        self.model(weights)
        os.makedirs(self.path("m/docs/deep"))
        os.makedirs(self.path("victim/deep"))
        for name in ("a.txt", "deep/b.txt"):
            self.write("m/docs/" + name, "of the model")
            self.write("victim/" + name, "precious")
        self.before = tree(self.path("victim"))

    def link(self, out, name="docs"):
        if os.path.isdir(self.path(out, name)):
            shutil.rmtree(self.path(out, name))
        os.symlink(os.path.relpath(self.path("victim"), os.path.dirname(self.path(out, name))),
                   self.path(out, name))

    def is_safe(self):
        self.assertEqual(tree(self.path("victim")), self.before)

    def test_what_a_manifest_lists_is_not_deleted_through_one(self):
        """Its digest is right: it lists files that were there."""
        self.ok("-q", "--to", "nf4", "m", "o")
        self.link("o")
        self.ok("-q", "--to", "nf4", "--force", "n", "o")
        self.is_safe()
        self.ok("-q", "verify", "o")
        self.ok("-q", "--to", "nf4", *PLAIN, "m", "u")
        self.link("u")
        self.ok("-q", "unpack", "--force", "o", "u")
        self.is_safe()

    def test_nothing_is_written_through_one(self):
        os.mkdir(self.path("o"))
        for name in ("docs", "docs/deep"):
            os.makedirs(self.path("o", os.path.dirname(name)), exist_ok=True)
            self.link("o", name)
            for dry in ([], ["--dry-run"]):
                self.usage("--to", "nf4", "--force", *dry, "m", "o",
                           has="o/%s is a link where the output has a folder" % name)
            self.ok("-q", "--to", "nf4", "m", "p")
            self.usage("unpack", "--force", "p", "o", has="is a link", command="unpack")
            self.is_safe()
            os.remove(self.path("o", name))

    @unittest.skipUnless(AT_CALL, "needs the library of tests/tools/at_call.c")
    def test_a_link_that_appears_meanwhile(self):
        """Everything is made by then, and stays for when the link is gone."""
        r = self.run_qconv("--to", "nf4", "m", "o",
                           env=at_call("rename:1", "qconv.json", "ln -s ../victim o/docs"))
        self.assertEqual(r.returncode, 1, r.stderr)
        self.assertIn(b"o/docs is a link", r.stderr)
        self.is_safe()
        os.remove(self.path("o/docs"))
        self.ok("-q", "--to", "nf4", "m", "o")
        self.ok("-q", "verify", "o")

    def test_in_the_staging_folder(self):
        """Of a run that died, it seems; what is written there goes through no link."""
        for name in ("docs", "docs/deep", ".aside", "model.safetensors.zst",
                     "qconv.json", "journal-00001-of-00001"):
            for journal in (False, True):
                os.makedirs(self.path("o", STAGING, os.path.dirname(name)))
                self.link("o/" + STAGING, name)
                if journal:
                    self.write("o/%s/journal-x" % STAGING, "")
                for more in ([], ["--force"], ["--restart"]):
                    self.usage("--to", "nf4", *more, "m", "o",
                               has=["o/%s/%s" % (STAGING, name), "found a link"])
                    self.is_safe()
                shutil.rmtree(self.path("o"))

    def test_files_that_are_links(self):
        """They are replaced themselves."""
        self.ok("-q", "--to", "nf4", "n", "o")
        for name in ("config.json", "qconv.json"):
            os.remove(self.path("o", name))
            os.symlink("../victim/a.txt", self.path("o", name))
        self.usage("--to", "nf4", "--force", "n", "o", has="no manifest of qconv lists")
        os.remove(self.path("o/model.safetensors.zst"))
        self.usage("--to", "nf4", "n", "o", has="o is not empty, and it is no output of qconv")
        self.ok("-q", "--to", "nf4", "--force", "n", "o")
        self.is_safe()
        self.assertFalse(os.path.islink(self.path("o/config.json")))
        self.ok("-q", "verify", "o")

    def test_out_itself_may_be_one(self):
        os.mkdir(self.path("there"))
        os.symlink("there", self.path("o"))
        self.ok("-q", "--to", "nf4", "m", "o")
        self.ok("-q", "--to", "int8", "--force", "m", "o")
        self.ok("-q", "verify", "there")


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
