"""What pyproject.toml cannot say: the one compiled module. Where there is no compiler it is left out, and NumPy does its work."""

from Cython.Build import cythonize
from setuptools import Extension, setup

LOOPS = Extension("kvreshard.model._loops", ["src/kvreshard/model/_loops.pyx"], extra_compile_args=["-g0"])

extensions = cythonize([LOOPS], build_dir="build")
for extension in extensions:
    extension.optional = True  # `cythonize` makes extensions anew, without it

setup(ext_modules=extensions)
