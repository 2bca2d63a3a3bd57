"""Build of the C++ extension megatron._csrc. Everything else is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ParallelCompile(default=0).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "megatron._csrc",
            sorted(str(path) for path in Path("csrc").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").glob("*.[hi]*")),
            cxx_std=20,
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": build_ext},
)
