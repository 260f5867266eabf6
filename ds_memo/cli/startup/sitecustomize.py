"""Every Python that starts under `ds-memo run` runs this file: the folder is on PYTHONPATH, and it looks for this name.

It may be of any version, with ds_memo or without. Until it imports deepspeed nothing happens, and nothing is imported.
"""

import os
import sys


class _Watch:
    """Stands before the other finders, and calls install() as soon as deepspeed is imported, or looked for."""

    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed":
            return None
        from importlib.util import find_spec

        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        try:
            from ds_memo.deepspeed.install import install_as_told

            install_as_told()
        except Exception as error:
            if find_spec(name):
                sys.stderr.write("ds-memo run: " + sys.executable + " runs DeepSpeed without memo: " + str(error) + "\n")
        return find_spec(name)


def _run_the_one_behind():
    """The sitecustomize that this one hides: it is run, and has the name, as if this folder were not there."""
    here, ours = os.path.dirname(__file__), sys.modules[__name__]
    sys.path[:] = [folder for folder in sys.path if folder != here]
    del sys.modules[__name__]
    try:
        __import__(__name__)
    except ImportError as error:
        if getattr(error, "name", None) != __name__:
            raise
        sys.modules[__name__] = ours  # there is none
    finally:
        sys.path.insert(0, here)  # some give sys.path to those they start


if sys.version_info >= (3, 4):  # noqa: UP036  older ones ask finders in another way
    sys.meta_path.insert(0, _Watch())
_run_the_one_behind()
