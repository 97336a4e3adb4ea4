"""Makes a wheel of the library that cargo builds: `pip wheel --no-deps .`"""

import json
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution


def library():
    """Builds the library and returns its path. The profile `dev` of this workspace is optimised."""
    command = ["cargo", "build", "--lib", "--message-format=json-render-diagnostics"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    files = [Path(file) for message in messages for file in message.get("filenames", ())]
    return next(file for file in files if file.name == "libpython_ops.so")


class Build(build_py):
    def run(self):
        super().run()
        built = library()
        self.copy_file(built, Path(self.build_lib) / "python_ops" / built.name)


class Wheel(bdist_wheel):
    def get_tag(self):
        # Any Python 3, because nothing of it is linked; and this platform.
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Binary)
