"""What cmake --install and cpack leave: the example of docs/reading.md is built against it outside the
tree, in C and C++, with pkg-config and with CMake, and loads an output; the package of Debian has it all
and says what it needs.

$QCONV_BUILD is the build folder. Without it, or where the build has no library to install (coverage,
fuzzing) or one that only instrumented programs can load (sanitizers), everything is skipped."""
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

from qconv_case import QCONV, ROOT

BUILD = os.environ.get("QCONV_BUILD", "")
CMAKE = os.environ.get("CMAKE", "cmake")
CC = os.environ.get("CC", "cc")
CXX = os.environ.get("CXX", "c++")
PAGE = os.environ.get("READING_PAGE", os.path.join(ROOT, "docs", "reading.md"))
MODEL = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
LISTS = """cmake_minimum_required(VERSION 3.16)
project(outside C CXX)
find_package(qconv %s REQUIRED)
add_executable(load_c load.c)
add_executable(load_cxx load.cpp)
target_link_libraries(load_c qconv::qconv)
target_link_libraries(load_cxx qconv::qconv)
"""


def run(argv, **more):
    r = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, **more)
    if r.returncode != 0:
        raise AssertionError("%s\n%s" % (" ".join(argv), r.stdout.decode(errors="replace")))
    return r.stdout.decode()


def example():
    with open(PAGE, encoding="utf-8") as f:
        return f.read().split("\n```c\n", 1)[1].split("\n```\n", 1)[0] + "\n"


def has_library():
    return bool(BUILD) and not os.environ.get("QCONV_SANITIZE") and \
        os.path.exists(os.path.join(BUILD, "libqconv.so"))


@unittest.skipUnless(has_library(), "this build has no library to install")
class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # Blanks and letters beyond ASCII: paths end up in files that tools read.
        cls.dir = tempfile.mkdtemp(prefix="qconv install-")
        cls.addClassCleanup(shutil.rmtree, cls.dir)
        first = os.path.join(cls.dir, "first")
        run([CMAKE, "--install", BUILD, "--prefix", first, "--strip"])
        cls.prefix = os.path.join(cls.dir, "moved")  # the package may be moved
        os.rename(first, cls.prefix)
        cls.outside = os.path.join(cls.dir, "outside")
        os.mkdir(cls.outside)
        for name in ("load.c", "load.cpp"):
            with open(os.path.join(cls.outside, name), "w", encoding="utf-8") as f:
                f.write(example())
        cls.out = os.path.join(cls.dir, "out")
        run([QCONV, "-q", "--to", "nf4", "--vram", "2x2GB", "--context", "256", MODEL, cls.out])
        with open(os.path.join(cls.out, "qconv.json"), encoding="utf-8") as f:
            m = json.load(f)
        cls.says = "cuda:1: %d tensors, %d bytes loaded\n" % (
            sum(m["shards"][t["shard"]]["device"] == 1 for t in m["tensors"]),
            m["placement"]["devices"][1]["tensor_bytes"])

    def find(self, name, below=None):
        found = [os.path.join(d, n) for d, _, names in os.walk(below or self.prefix) for n in names
                 if n == name]
        self.assertEqual(len(found), 1, (name, found))
        return found[0]

    def header(self):
        return os.path.join(self.prefix, "include", "qconv", "device_reader.h")

    def assert_loads(self, program, below=None):
        env = dict(os.environ, LD_LIBRARY_PATH=os.path.dirname(self.find("libqconv.so", below)))
        self.assertEqual(run([program, self.out, "cuda:1"], env=env), self.says)

    def assert_links(self, below):
        """The example builds and runs with what lies there: shared, whether pkg-config's line stands
        before or behind the source and whatever the linker leaves out; and static."""
        source = os.path.join(self.outside, "load.c")
        program = os.path.join(self.outside, "linked")
        flags = self.flags("--cflags", "--libs", below=below)
        for line in ([source, *flags], [*flags, source], ["-Wl,--as-needed", *flags, source]):
            run([CC, *line, "-o", program])
            self.assert_loads(program, below)
        if not all(os.path.isabs(run([CC, "-print-file-name=lib%s.a" % n]).strip())
                   for n in ("c", "zstd", "xxhash")):
            return  # this machine cannot link statically, whatever the program
        run([CC, "-static", source, *self.flags("--static", "--cflags", "--libs", below=below),
             "-o", program])
        self.assertEqual(run([program, self.out, "cuda:1"]), self.says)

    def flags(self, *wanted, below=None):
        """Of pkg-config, which escapes blanks as a shell does."""
        env = dict(os.environ, PKG_CONFIG_PATH=os.path.dirname(self.find("qconv.pc", below)))
        out = run(["pkg-config", *wanted, "qconv"], env=env)
        return run(["sh", "-c", 'eval "set -- $1"; printf "%s\\n" "$@"', "sh", out]).split("\n")[:-1]

    def test_the_installed_program_runs(self):
        program = os.path.join(self.prefix, "bin", "qconv")
        self.assertEqual(run([program, "--version"]), run([QCONV, "--version"]))

    def test_the_example_with_pkg_config_in_c_and_cxx(self):
        self.assertEqual(self.flags("--modversion"), [run([QCONV, "--version"]).split()[1]])
        flags = self.flags("--cflags", "--libs")
        for compiler, source, standard in ((CC, "load.c", "c11"), (CXX, "load.cpp", "c++11")):
            program = os.path.join(self.outside, "by-hand-" + standard)
            run([compiler, "-std=" + standard, *WARNINGS, os.path.join(self.outside, source), "-o",
                 program, *flags])
            self.assert_loads(program)

    def test_the_example_links_in_any_order_and_static(self):
        self.assert_links(self.prefix)
        staged = os.path.join(self.dir, "staged")  # as distributions install
        run([CMAKE, "--install", BUILD, "--prefix", "/usr"], env=dict(os.environ, DESTDIR=staged))
        self.assert_links(staged)

    def test_the_example_with_cmake_in_c_and_cxx(self):
        version = run([QCONV, "--version"]).split()[1]
        with open(os.path.join(self.outside, "CMakeLists.txt"), "w", encoding="utf-8") as f:
            f.write(LISTS % version)
        build = os.path.join(self.dir, "build")
        run([CMAKE, "-S", self.outside, "-B", build, "-DCMAKE_PREFIX_PATH=" + self.prefix,
             "-DCMAKE_C_COMPILER=" + CC, "-DCMAKE_CXX_COMPILER=" + CXX])
        run([CMAKE, "--build", build])
        for name in ("load_c", "load_cxx"):
            self.assert_loads(os.path.join(build, name))
        major, minor = version.split(".")[:2]  # what is older or newer is another interface
        for other in ("%s.%d" % (major, int(minor) + 1), "%s.%d" % (major, int(minor) - 1)):
            with open(os.path.join(self.outside, "CMakeLists.txt"), "w", encoding="utf-8") as f:
                f.write(LISTS % other)
            with self.assertRaisesRegex(AssertionError, "qconv"):
                run([CMAKE, "-S", self.outside, "-B", os.path.join(self.dir, "build-other"),
                     "-DCMAKE_PREFIX_PATH=" + self.prefix])

    def test_the_header_is_alone_and_clean(self):
        with open(self.header(), encoding="utf-8") as f:
            text = f.read()
        self.assertEqual(re.findall(r'#\s*include\s*"', text), [])
        alone = os.path.join(self.dir, "alone")
        for ending, compiler, standards in ((".c", CC, ("c99", "c11", "c17")),
                                            (".cpp", CXX, ("c++11", "c++17", "c++20"))):
            with open(alone + ending, "w", encoding="utf-8") as f:
                f.write("".join("#include <qconv/%s>\n" % n for n in
                                2 * sorted(os.listdir(os.path.dirname(self.header())))) +
                        'int main(void) { qc_reader_options o; (void)o; return 0; }\n')
            for standard in standards:
                run([compiler, "-std=" + standard, *WARNINGS, "-Wconversion", "-fsyntax-only",
                     "-I" + os.path.join(self.prefix, "include"), alone + ending])

    def cited(self):
        """The pages that messages and help name."""
        pages = set()
        for folder, _, names in os.walk(os.path.join(ROOT, "convert")):
            for name in names:
                with open(os.path.join(folder, name), "rb") as f:
                    pages |= set(re.findall(rb'"[^"\n]*(docs/[\w/-]+\.md)', f.read()))
        self.assertGreater(len(pages), 5)
        return sorted(p.decode() for p in pages)

    @unittest.skipUnless(all(map(shutil.which, ("cpack", "dpkg-shlibdeps", "file"))),
                         "needs cpack, dpkg-dev and file")
    def test_a_package_of_debian(self):
        packages = os.path.join(self.dir, "packages")
        run(["cpack", "--config", os.path.join(BUILD, "CPackConfig.cmake"), "-G", "DEB", "-B",
             packages])
        deb = [n for n in os.listdir(packages) if n.endswith(".deb")]
        self.assertEqual(len(deb), 1, deb)
        deb = os.path.join(packages, deb[0])
        version = run([QCONV, "--version"]).split()[1]
        self.assertRegex(os.path.basename(deb), r"^qconv_%s_\w+\.deb$" % re.escape(version))
        needs = run(["dpkg-deb", "-f", deb, "Depends"])
        for package in ("libc6", "libzstd1"):
            self.assertIn(package, needs)
        self.assertEqual(run(["dpkg-deb", "-f", deb, "Recommends"]),
                         "libopenblas0\n")
        root = os.path.join(self.dir, "root")
        run(["dpkg-deb", "-x", deb, root])
        self.assertEqual(run([os.path.join(root, "usr", "bin", "qconv"), "--version"]),
                         run([QCONV, "--version"]))
        names = {os.path.relpath(os.path.join(d, n), os.path.join(root, "usr"))
                 for d, _, files in os.walk(root) for n in files}
        for name in ("include/qconv/device_reader.h", "share/man/man1/qconv.1",
                     "share/bash-completion/completions/qconv", "share/doc/qconv/copyright"):
            self.assertIn(name, names)
        for page in self.cited():
            self.assertIn("share/doc/qconv/" + page, names)
        self.assert_links(root)
        control = os.path.join(self.dir, "control")
        run(["dpkg-deb", "-e", deb, control])
        for name, text in (("postinst", "ldconfig"),
                           ("shlibs", "libqconv %s qconv" % version.rsplit(".", 1)[0])):
            with open(os.path.join(control, name), encoding="utf-8") as f:
                self.assertIn(text, f.read())


if __name__ == "__main__":
    unittest.main()
