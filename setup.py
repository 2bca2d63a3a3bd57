"""Build of the extension megatron._csrc, and of the commands in a wheel. The rest is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.command.build_py import build_py

ParallelCompile(default=0).install()

# compiled first, each for about as long as all others together: pybind11 takes most of the time
BINDINGS = ("csrc/kernels.cpp", "csrc/tokenizer.cpp", "csrc/module.cpp")
# what the console script and the Slurm launcher of an installed wheel run
COMMANDS = (
    *sorted(Path("tools").glob("*.py")),
    *(Path("examples_scaling", "training", name) for name in ("sweep_slurm.sh", "requeue.sh")),
)


class BuildWithCommands(build_py):
    """Copies COMMANDS into a wheel as megatron/commands/, where megatron/cli.py finds them."""

    def run(self) -> None:
        """Build the package, then copy the commands unless the installation refers to the checkout."""
        super().run()
        if not self.editable_mode:
            folder = str(Path(self.build_lib, "megatron", "commands"))
            self.mkpath(folder)
            for command in COMMANDS:
                self.copy_file(str(command), folder)


class BuildHelper(build_ext):
    """Builds the helper: required in place (editable, --inplace), else optional, as laws work without it."""

    def finalize_options(self) -> None:
        """Make a failure a warning, except in place."""
        super().finalize_options()
        for extension in self.extensions:
            extension.optional = not self.inplace


setup(
    ext_modules=[
        Pybind11Extension(
            "megatron._csrc",
            [*BINDINGS, *sorted({str(path) for path in Path("csrc").glob("*.cpp")} - set(BINDINGS))],
            depends=sorted(str(path) for path in Path("csrc").glob("*.[hi]*")),
            cxx_std=20,
            # -g0: debug information, which Python asks for, is 40 % of the compilation
            extra_compile_args=["-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildHelper, "build_py": BuildWithCommands},
)
